"""What the launchers share: specs relative to the caller's pointers, the cut of a sender's tokens, the launch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moelink.arith import ceil_div
from moelink.kernels.contract.buffers import RECV, EPBuffers
from moelink.kernels.contract.layouts import NUM_WARPS
from moelink.routing import shared_slice

CHUNKS_PER_PROGRAM = 4
"""Chunks of a sender with many tokens: receivers start on the first while the last is still on the wire."""


@lru_cache(maxsize=256)
def relative_to(spec: Any, start: int) -> Any:
    """``spec`` for a table of addresses of a region that begins at byte ``start`` of each block, instead of blocks."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    values = {name: value.value if isinstance(value, tl.constexpr) else value for name, value in values.items()}
    moved = {name: value - start if name.startswith("O_") else value for name, value in values.items()}
    return type(spec)(**moved)


@dataclass(frozen=True)
class Cut:
    """A sender's tokens in ``count`` chunks of ``size``, ``per_program`` consecutive ones for each program.

    Example: 10 tokens, 2 programs, 1024 flags: chunks of 2 tokens, 5 of them, 3 for the first program.
    """

    size: int
    count: int
    per_program: int

    @classmethod
    def of(cls, num_tokens: int, *, programs: int, flags: int) -> Cut:
        """Cut ``num_tokens`` for ``programs`` programs, within ``flags`` chunks."""
        size = max(1, ceil_div(ceil_div(num_tokens, programs), CHUNKS_PER_PROGRAM), ceil_div(num_tokens, flags))
        count = ceil_div(num_tokens, size)
        return cls(size, count, max(1, ceil_div(count, programs)))


def shared_bounds(ep: EPBuffers, num_tokens: int) -> tuple[int, int]:
    """First and last + 1 own token of the fused shared expert's group."""
    if not ep.params.fused_shared_expert:
        return 0, 0
    replicated = ep.params.skip_a2a
    parts = ep.params.n_ranks if replicated else 1
    part = shared_slice(num_tokens, rank=ep.my_rank if replicated else 0, parts=parts)
    return part.start, part.stop


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
    if ep.device.type == "cpu":
        kernel[(programs,)](pointers[RECV], ep.record, atomic_counters, *args, **options)
        return
    with torch.cuda.device(ep.device):
        kernel[(programs,)](pointers[RECV], ep.record, atomic_counters, *args, num_warps=NUM_WARPS, **options)
