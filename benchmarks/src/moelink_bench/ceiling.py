"""Measure the ceiling: how fast bytes can leave all ranks at once, in the same run as the times it is compared with.

On CUDA devices every SM stores 64 MiB to each peer over symmetric memory, with the same kind of stores as moelink's
kernels; the fastest of several grids counts. On CPUs the ceiling is the group's own all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moelink.errors import MoelinkError
from moelink.memory import TorchMemory
from moelink_bench.timing import Clock, everyone, host_barrier, slowest_rank

PEER_BYTES = 64 << 20
CPU_PEER_BYTES = 1 << 20
LAUNCHES = 8
GRIDS = (1, 2, 4)
"""CTAs per SM that are tried."""

METHOD = {
    "cuda": f"plain 16-byte stores of all SMs to all peers at once over symmetric memory, "
    f"{PEER_BYTES >> 20} MiB for each peer, {LAUNCHES} launches a sample, the fastest of {len(GRIDS)} grids",
    "cpu": f"all_to_all_single of the process group, {CPU_PEER_BYTES >> 20} MiB for each peer, wall-clock time",
}


@dataclass(frozen=True)
class CeilingSamples:
    """The measurements of one rank.

    Attributes:
        bytes: that leave this rank in one sample.
        microseconds: per variant, per sample.
        reason: why there is nothing, or "".
    """

    bytes: int
    microseconds: tuple[tuple[float, ...], ...]
    reason: str = ""


@dataclass(frozen=True)
class Ceiling:
    """GB/s (10**9 bytes a second) out of each rank, all ranks at once.

    Attributes:
        gb_per_s: by the median of the slowest rank; None when it could not be measured.
        by_rank: by each rank's own median, in the same variant.
        method: how it was measured.
        reason: why it was not, or "".
    """

    gb_per_s: float | None
    by_rank: tuple[float, ...]
    method: str
    reason: str


def measure_ceiling(clock: Clock, *, samples: int, timeout: float) -> CeilingSamples:
    """Measure this rank's part of the ceiling. Collective over the default group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return CeilingSamples(0, (), "one rank has no link")
    if clock.device.type == "cpu":
        return _all_to_all(clock, samples)
    try:
        return _push(clock, samples, timeout)
    except MoelinkError as error:  # raised on all ranks alike
        return CeilingSamples(0, (), str(error))


def _all_to_all(clock: Clock, samples: int) -> CeilingSamples:
    ranks = dist.get_world_size()
    sent = torch.zeros(ranks * CPU_PEER_BYTES, dtype=torch.uint8)
    received = torch.empty_like(sent)
    times = clock.measure(lambda: dist.all_to_all_single(received, sent), samples=samples, warmup=1)
    return CeilingSamples((ranks - 1) * CPU_PEER_BYTES, (tuple(times),))


def _push(clock: Clock, samples: int, timeout: float) -> CeilingSamples:
    from moelink_bench.push import BLOCK, ceiling_push_kernel

    rank, ranks, device = dist.get_rank(), dist.get_world_size(), clock.device
    group = dist.distributed_c10d._get_default_group()
    memory = TorchMemory.create(ranks * PEER_BYTES, device=device, group=group, exchange=everyone)
    try:
        source = torch.zeros(ranks * PEER_BYTES // 4, dtype=torch.int32, device=device)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        times = []
        for grid in GRIDS:
            ctas = max(1, sms * grid // (ranks - 1)) * (ranks - 1)

            def launch(ctas: int = ctas) -> None:
                for _ in range(LAUNCHES):
                    ceiling_push_kernel[(ctas,)](
                        memory.pointers, source, rank, PEER_BYTES // 4, W=ranks, BLOCK=BLOCK, num_warps=8
                    )

            launch()
            times.append(tuple(clock.measure(launch, samples=samples, warmup=1)))
        return CeilingSamples(LAUNCHES * (ranks - 1) * PEER_BYTES, tuple(times))
    finally:
        torch.cuda.synchronize(device)
        host_barrier()  # no peer stores into a block that is being released
        memory.close()


def ceiling_of(by_rank: Sequence[CeilingSamples], device: str) -> Ceiling:
    """Return the figure of all ranks' samples: that of the variant whose slowest rank is fastest.

    Example: two ranks, 3e6 bytes a sample, one variant with 10 us on both: 300 GB/s.
    """
    reasons = [part.reason for part in by_rank if part.reason]
    if reasons:
        return Ceiling(None, (), METHOD[device], reasons[0])
    variants = range(len(by_rank[0].microseconds))
    medians = {v: slowest_rank([part.microseconds[v] for part in by_rank]).median for v in variants}
    best = min(medians, key=medians.__getitem__)
    own = tuple(part.bytes / slowest_rank([part.microseconds[best]]).median / 1e3 for part in by_rank)
    return Ceiling(by_rank[0].bytes / medians[best] / 1e3, own, METHOD[device], "")
