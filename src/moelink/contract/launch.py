"""What the launchers share: specs relative to the caller's pointers, and the launch."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moelink.contract.buffers import EPBuffers
from moelink.contract.layouts import NUM_WARPS
from moelink.kernels.launch.cache_keys import settle_cache_key
from moelink.kernels.sync.credit import ep_tell_drained_kernel
from moelink.memory.pointers import RECV


@lru_cache(maxsize=256)
def relative_to(spec: Any, start: int) -> Any:
    """``spec`` for a table of addresses of a region that begins at byte ``start`` of each block, instead of blocks."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    values = {name: value.value if isinstance(value, tl.constexpr) else value for name, value in values.items()}
    moved = {name: value - start if name.startswith("O_") else value for name, value in values.items()}
    return type(spec)(**moved)


def or_dummy(tensor: Tensor | None, dummy: Tensor) -> Tensor:
    """``tensor``, or in place of None some pointer that the kernel will not follow."""
    return dummy if tensor is None else tensor


def tell_drained(ep: EPBuffers, pointers: Tensor, atomic_counters: Tensor, spec: Any) -> None:
    """After a receiving half on CPUs, where the ranks of a process may run one after the other: say that it has read.
    Elsewhere the next launch that sends says so (``kernels.sync.credit``)."""
    if ep.device.type == "cpu" and not spec.ALLREDUCE:
        launch(ep, ep_tell_drained_kernel, 1, pointers, atomic_counters, ep.me, S=spec)


def launch(
    ep: EPBuffers,
    kernel: Any,
    programs: int,
    pointers: Tensor,
    atomic_counters: Tensor,
    *args: Any,
    **options: Any,
) -> None:
    """Launch ``kernel`` on the current stream of ep's device."""
    given = (pointers[RECV], ep.record, atomic_counters, *args, programs)
    if ep.device.type == "cpu":
        kernel[(programs,)](*given, **options)
        return
    with torch.cuda.device(ep.device):
        settle_cache_key(kernel)
        if ep.network.options:  # what is linked in is prepared before the first launch
            options = {**options, **ep.network.options}
            compiled = kernel.warmup(*given, grid=(programs,), num_warps=NUM_WARPS, **options)
            compiled._init_handles()
            ep.network.load(compiled)
        kernel[(programs,)](*given, num_warps=NUM_WARPS, **options)
