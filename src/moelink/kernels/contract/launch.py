"""What the launchers share: specs relative to the caller's pointers, and the launch."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moelink.kernels.cache_keys import settle_cache_key
from moelink.kernels.contract.buffers import RECV, EPBuffers
from moelink.kernels.contract.layouts import NUM_WARPS


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
    given = (pointers[RECV], ep.record, atomic_counters, *args)
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
