"""The common part of kernels on rows: launch constants, the division of rows, conversions of numbers, the launch.

How many rows exist is read on the device, from the last of ``row_offsets``; later rows are neither read nor written.
So a fixed number of programs serves any number of rows, and the cost of a call follows from its rows, not from the size
of its buffers. Nothing waits for anything; there is no protocol.

The work is cut into steps, and program p of P does the steps p, p + P, p + 2 P, ..., unless a launch is *counted*
(:mod:`moelink.kernels.launch.tile_counters`). Most kernels take the rows as one list of groups of GS = GROUP_SIZE
elements: group f is columns [f % W * GS, f % W * GS + GS) of row f // W, with W = H / GS groups a row. Step s then
handles the groups [s * N, s * N + N), N = GROUPS_PER_STEP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moelink.formats.base import Format
from moelink.formats.device import f32_to_bf16
from moelink.kernels.launch.cache_keys import Constants
from moelink.kernels.launch.device import has_dependent_launches
from moelink.kernels.launch.row_launch import row_launcher

LAYOUTS = ("row_major", "transposed", "tiles_128x4")
"""Layouts of scales that the kernels know."""
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
"""Dtypes that kernels take payloads in, by bytes of an element."""


@dataclass(frozen=True, repr=False, eq=False)
class RowConstants(Constants):
    """The launch constants of a kernel on rows. A field that the kernel does not read has its default.

    Attributes:
        HIDDEN_SIZE: columns of an output row.
        NUM_GROUPS: groups of rows; the last of ``row_offsets`` is the number of rows.
        NATIVE_CASTS: the device's narrow conversions.
        DOUBLE: the arithmetic is fp64.
        GROUP_SIZE, GROUPS_PER_STEP: elements of a group, and groups at a time.
        GROUP_ELEMENTS: payload elements of a group. CODE_FN: the device function of the format, to encode or decode.
        HALVINGS: to find the group of a row by bisection.
        SCALE_LAYOUT: the format's layout of scales, "" for formats without them.
        SCALES_PER_WORD: scales in an element of the scale tensor, as it is seen from outside.
        ONE_SCALE: a row has one scale. HAS_INPUT_SCALE: there is a global scale (or one for each group of rows).
        KIND: of the gated activation. ALPHA, LIMIT: the numbers of the clamped kind.
        TAIL_TILES: 128x4 tiles that are cleared at a time.
        STRIDE: elements from a row of ``d`` to the next, 0 if all rows are one.
        COLUMNS, ROWS: columns at a time, of so many rows.
        HAS_WEIGHTS, HAS_OUT, HAS_DOTS: whether there are weights, and which results are computed.
        BY_SLOT: only rows of one slot are stored.
        DEPENDENT_LAUNCH: the launch may start before the one before it has ended; :func:`launch` sets it.
    """

    HIDDEN_SIZE: int
    NUM_GROUPS: int
    NATIVE_CASTS: bool
    DOUBLE: bool = False
    GROUP_SIZE: int = 1
    GROUPS_PER_STEP: int = 1
    GROUP_ELEMENTS: int = 1
    CODE_FN: Any = None
    HALVINGS: int = 0
    SCALE_LAYOUT: str = ""
    SCALES_PER_WORD: int = 1
    ONE_SCALE: bool = False
    HAS_INPUT_SCALE: bool = False
    KIND: str = ""
    ALPHA: float = 1.0
    LIMIT: float = 1.0
    TAIL_TILES: int = 1
    STRIDE: int = 0
    COLUMNS: int = 1
    ROWS: int = 1
    HAS_WEIGHTS: bool = False
    HAS_OUT: bool = False
    HAS_DOTS: bool = False
    BY_SLOT: bool = False
    DEPENDENT_LAUNCH: bool = False


class Form(NamedTuple):
    """How a kernel on rows in a format is launched.

    Attributes:
        constants: of the launch.
        groups: of a row.
        per_step: groups of a step, which has ``elements``.
        payload, scale: dtypes that the kernel takes payload and scales in; None for no scales.
    """

    constants: RowConstants
    groups: int
    per_step: int
    elements: int
    payload: torch.dtype
    scale: torch.dtype | None

    @classmethod
    def of(cls, constants: RowConstants, fmt: Format, hidden: int, group: int, per_step: int) -> "Form":
        """Return the form of rows of ``hidden`` elements in groups of ``group``."""
        codec = fmt.codec()
        scale = None if fmt.scale_dtype is None else torch.float32 if codec.SCALE_BYTES == 4 else torch.uint8
        payload = UNSIGNED[codec.ELEMENT_BYTES]
        return cls(constants, triton.cdiv(hidden, group), per_step, group * per_step, payload, scale)

    def views(self, payload: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """View payload and scales as the kernel takes them."""
        absent = scales is None or self.scale is None or scales.dtype == self.scale
        return payload.view(self.payload), scales if absent else scales.view(self.scale)  # type: ignore[union-attr, return-value, arg-type]

    def steps(self, rows: int) -> int:
        """Return the steps of ``rows`` rows."""
        return -(-rows * self.groups // self.per_step)


def format_constants(fmt: Format, hidden: int, num_groups: int, group: int, per_step: int) -> dict[str, Any]:
    """Return the sizes that a kernel on rows of ``fmt`` is compiled for, with groups of ``group`` elements."""
    codec = fmt.codec()
    return {
        "HIDDEN_SIZE": hidden, "NUM_GROUPS": num_groups, "HALVINGS": (num_groups - 1).bit_length(),
        "GROUP_SIZE": group, "GROUPS_PER_STEP": per_step,
        "GROUP_ELEMENTS": group // codec.GROUP * codec.PAYLOAD_BYTES_PER_GROUP // codec.ELEMENT_BYTES,
        "SCALES_PER_WORD": 1 if fmt.scale_dtype is None else fmt.scale_dtype.itemsize // max(1, codec.SCALE_BYTES),
    }  # fmt: skip


@triton.jit
def number(value, DOUBLE: tl.constexpr):
    """``value`` in the dtype of the arithmetic."""
    return value.to(tl.float64) if DOUBLE else value.to(tl.float32)


@triton.jit
def rounded(value, DTYPE: tl.constexpr, S: tl.constexpr):
    """``value`` rounded to DTYPE once, from fp64 by way of fp32 as torch does; uint16 stands for the bits of bf16."""
    if DTYPE == tl.float64:
        return value.to(tl.float64)
    elif DTYPE == tl.uint16:
        return f32_to_bf16(value.to(tl.float32), S.NATIVE_CASTS)
    else:
        return value.to(tl.float32).to(DTYPE)


@triton.jit
def place(step, W: tl.constexpr, N: tl.constexpr):
    """Return a step's first group, and of its N groups the row and the group in it, of W a row, both [N]."""
    first = tl.cast(step, tl.int64) * N
    ahead = (first % W).to(tl.int32) + tl.arange(0, N)
    return first, first // W + ahead // W, ahead % W


@triton.jit
def group_of(row, row_offsets, G: tl.constexpr, HALVINGS: tl.constexpr):
    """The group of each row: the last that starts at or before it."""
    low = (row * 0).to(tl.int32)
    high = low + (G - 1)
    for _ in tl.static_range(HALVINGS):
        middle = (low + high + 1) // 2
        before = tl.load(row_offsets + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low


@triton.jit
def bounded(gate, up, LIMIT: tl.constexpr):
    """Gate and the factor beside it, of the clamped activation. NaN stays NaN."""
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    return gate, tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0


def even_groups(hidden: int) -> int:
    """The largest power of two up to 64 that divides ``hidden``."""
    return min(64, hidden & -hidden)


def group_elements(fmt: Format, hidden: int) -> int:
    """GS of rows that are encoded: the elements that share a scale, rounded up to a power of two; for formats without
    scales as :func:`even_groups`."""
    return even_groups(hidden) if fmt.scale_dtype is None else triton.next_power_of_2(fmt.elements_per_scale(hidden))


def step_elements(device: torch.device) -> int:
    """Elements of a step."""
    return 2048 if device.type == "cuda" else 16384


def bits(out: torch.Tensor) -> torch.Tensor:
    """View ``out`` as :func:`rounded` has its elements: bf16 as uint16."""
    return out.view(torch.uint16) if out.dtype == torch.bfloat16 else out


def launch(
    kernel: Any, arguments: Sequence[Any], S: Any, steps: int, *, absent: torch.Tensor, per_sm: int = 8,
    num_programs: int | None = None, fused: bool = False, counted: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Launch ``kernel``, compiled for ``S``, with ``arguments``, in place of those that are None the tensor ``absent``.

    A call like an earlier one is cheap (:mod:`moelink.kernels.launch.row_launch`) if ``S`` is the same object: make it
    in a function with a cache.

    Args:
        steps: as many as the buffers have room for.
        per_sm: the most programs of each SM; two in all if the kernel is interpreted.
        num_programs: in place of the number that follows from these.
        fused: products and sums become FMAs, with every Triton. Else each is rounded, so that bits are those of torch.
        counted: as of :meth:`moelink.kernels.launch.row_launch.RowLauncher.launch`.
    """
    device = absent.device
    if num_programs is None:
        num_programs = max(1, min(per_sm * sms_of(device) if device.type == "cuda" else 2, steps))
    S = _on(S, device)
    given = [absent if argument is None else argument for argument in arguments]
    row_launcher().launch(kernel, given, S, num_programs, device=device, fused=fused, options=options, counted=counted)


@lru_cache(maxsize=1024)
def _on(S: Any, device: torch.device) -> Any:
    """Return the constants of a launch on ``device``, of which ``S`` are those that do not depend on it."""
    return replace(S, DEPENDENT_LAUNCH=True) if has_dependent_launches(device) else S


@cache
def sms_of(device: torch.device) -> int:
    """Return the SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
