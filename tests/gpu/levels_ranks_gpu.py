"""What each rank does in the GPU tests of two levels: processes with a device each, nodes forced on one machine."""

from __future__ import annotations

from typing import Any

import torch

import moelink
from moelink.testing import assert_bitwise_equal
from tests.gpu import gpu_ranks
from tests.gpu.gpu_compile import FUSED, HALVES, Kernel, kernels_of
from tests.gpu.gpu_ranks import prepare
from tests.gpu.nodes_ranks_gpu import TIMEOUT, run_split
from tests.nodes.levels_ranks import cases_of
from tests.support.cases import Case, Result, by_setup, run_case

REAL = (0, 1, 4, 5)
"""Of ``gpu_ranks.REAL_SIZES``: those that are pre-reduced."""


def levels(node: int) -> dict[str, Any]:
    """Fields of two levels."""
    return {"ranks_per_node": node, "two_level": True}


def kernels(world_size: int, node: int) -> list[Kernel]:
    """What :func:`run_levels` launches."""
    found = []
    for setup, _ in by_setup(cases_of(node)):
        dtype = torch.float64 if setup.dispatch_format == "fp64" else torch.bfloat16
        fields = {**setup.fields, "transport": "symmetric", "two_level": True}
        for weights in ("dispatch", "none"):
            found += kernels_of(fields, world_size, FUSED, weights=weights, input_dtype=dtype)
        found += kernels_of(fields, world_size, HALVES, input_dtype=dtype)
    return found


def real_kernels(world_size: int, node: int) -> list[Kernel]:
    """What :func:`equals_one_level` launches."""
    setups = [gpu_ranks.real_fields(index) | {"transport": "symmetric", "ranks_per_node": node} for index in REAL]
    one = [kernel for fields in setups for kernel in kernels_of(fields, world_size, weights="none")]
    return one + [k for fields in setups for k in kernels_of({**fields, "two_level": True}, world_size, weights="none")]


def run_levels(rank: int, world_size: int, node: int) -> list[tuple[Result, Result | None]]:
    """Every case in one launch a call, then in two where router weights travel and rows have one dimension."""
    prepare(rank)
    results = []
    for setup, group in by_setup(cases_of(node)):
        with moelink.init(**setup.fields, transport="symmetric", two_level=True, timeout=TIMEOUT) as ep:
            results += [(run_case(ep, case, rank), _in_halves(ep, case, rank)) for case in group]
    return results


def _in_halves(ep: moelink.Communicator, case: Case, rank: int) -> Result | None:
    return run_split(ep, case, rank) if case.travel and ep.config.layout != "masked" else None


def equals_one_level(rank: int, world_size: int, node: int) -> list[str]:
    """Real sizes with one level and with two: the same bits in dispatch, and in combine of numbers whose sums are
    exact, so that their order does not matter. Uneven and zero token counts. Returns what the calls took, in us."""
    prepare(rank)
    told = []
    for index in REAL:
        hidden, topk, experts, most, fmt, _ = gpu_ranks.REAL_SIZES[index]
        fields = {**gpu_ranks.real_fields(index), "transport": "symmetric", "ranks_per_node": node}
        with moelink.init(**fields, two_level=True) as two, moelink.init(**fields) as one:
            for seed, share in ((1, 1.0), (2, 0.5), (3, 0.0), (4, 1.0)):
                tokens = most if share == 1.0 else int(most * share * ((rank * 3 + 1) % 4) / 3)
                x, ids, _ = gpu_ranks.inputs(
                    rank, seed=seed * 100 + index, tokens=tokens, hidden=hidden, experts=experts, topk=topk,
                    skew=1.0 if seed == 4 else 0.0, holes=0.1 if seed == 2 else 0.0, repeats=seed == 4,
                    dtype=torch.float32 if fmt == "fp32" else torch.bfloat16,
                )  # fmt: skip
                recvs = [ep.dispatch(x, ids) for ep in (two, one)]
                gpu_ranks.same_rows(f"{fields} seed {seed}", *recvs)
                y = torch.randint(-4, 5, recvs[0].tokens.shape, device="cuda").to(one.config.combine_dtype)
                y = y[:, :1].expand(-1, hidden).contiguous()
                outs = [ep.combine(y, recv) for ep, recv in zip((two, one), recvs, strict=True)]
                assert_bitwise_equal(outs[0], outs[1], f"{fields} seed {seed}: combine")
            times = [_microseconds(ep, x, ids, y) for ep in (two, one)]
            told.append(f"{fmt} {hidden} x {most}: two levels {times[0]:.1f} us, one {times[1]:.1f} us a pair")
    return told


def _microseconds(ep: moelink.Communicator, x: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> float:
    """What a dispatch and its combine take, on average of 20 pairs."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        for _ in range(20):
            ep.combine(y, ep.dispatch(x, ids))
        event.record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) * 1000 / 20
