"""Weights in fp8 with one scale a block of 128 x 128, and the grouped product of fp8 rows with them, or with mxfp4.

Legend: ``R`` rows of the buffer, ``K`` columns of a row, ``G`` groups, ``N`` columns of the output.

The product is an operator, ``moelink::grouped_fp8``, with two implementations of one formula. The kernels
(:mod:`moelink.rows.grouped_fp8`, and on compute capability 9.0 :mod:`moelink.rows.grouped_gluon` and
:mod:`moelink.rows.grouped_gluon_few`) read on the device how many rows each group has. The twin multiplies dequantised
numbers in fp32, group by group, and reads on the host how many rows there are.

Accuracy, against exact arithmetic on the dequantised numbers: an element of the output is within::

    u * abs(exact) + e * sum over k of abs(row[k] * weight[n, k])

with u half a step of the output's dtype (2**-8 bf16, 2**-11 fp16, 2**-24 fp32), and e 2**-18 where sums are fp32 (the
twin, the interpreter, K up to 2**13). Tensor cores of compute capability 9.0 align 32 products at a time and keep about
14 bits: there e is 2**-6 at worst, when all 128 terms of a block have one sign, and tests hold rows whose terms have
either sign to 2**-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moelink.arith import ceil_div
from moelink.errors import ArgumentError, UnsupportedError
from moelink.formats.casts import E4M3_MAX, amax, canonical_nan, divide, e4m3_to_f32, f32_to_e4m3
from moelink.formats.fp8 import AMAX_FLOOR
from moelink.nn.mxfp4 import Mxfp4Weight
from moelink.rows.grouped_choice import takes_gluon, tile_rows

BLOCK = 128
OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class BlockQuantized:
    """Weights [..., N, K] in fp8.

    Attributes:
        codes: [..., N, K] float8_e4m3fn.
        scales: [..., ceil(N / 128), K / 128] fp32: element (n, k) is ``codes[n, k] * scales[n // 128, k // 128]``.
    """

    codes: Tensor
    scales: Tensor
    kind: ClassVar[str] = "fp8"
    dtypes: ClassVar[tuple[torch.dtype, torch.dtype]] = (torch.float8_e4m3fn, torch.float32)

    @property
    def shape(self) -> torch.Size:
        """[..., N, K]."""
        return self.codes.shape

    def expected(self, groups: int, columns: int, inner: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of codes and scales of weights [G, N, K]."""
        return (groups, columns, inner), (groups, ceil_div(columns, BLOCK), inner // BLOCK)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the numbers [..., N, K]."""
        rows, inner = self.codes.shape[-2:]
        scales = self.scales.repeat_interleave(BLOCK, -2).narrow(-2, 0, rows)
        scales = scales.repeat_interleave(BLOCK, -1).narrow(-1, 0, inner)
        return (e4m3_to_f32(self.codes) * scales).to(dtype)

    def times(self, group: int, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the product [n, N] fp32 of rows, ``codes`` [n, K] and ``scales`` [K / 128, n], and the weights of
        ``group``: the twin of the kernel."""
        rows = e4m3_to_f32(codes) * scales.t().repeat_interleave(BLOCK, 1)
        return rows @ BlockQuantized(self.codes[group], self.scales[group]).dequantize().t()

    def launch(
        self, codes: Tensor, scales: Tensor, row_offsets: Tensor, out: Tensor, *, follows_product: bool = False,
        likely_rows: int | None = None,
    ) -> None:  # fmt: skip
        """Fill ``out`` by a kernel: on compute capability 9.0 by one in Gluon, for few rows of each group or for many,
        else by the Triton kernel."""
        given = codes, scales, row_offsets, self.codes, self.scales, out
        if not takes_gluon(codes):
            from moelink.rows.grouped_fp8 import launch

            launch(*given)
        elif few := tile_rows(likely_rows or len(codes), len(self.codes)):
            from moelink.rows.grouped_gluon_few import launch as launch_few

            launch_few(*given, few, early=follows_product)
        else:
            from moelink.rows.grouped_gluon import launch as launch_many

            launch_many(*given, early=follows_product)


Weight = BlockQuantized | Mxfp4Weight
"""Weights that multiply rows in fp8."""


def weight_of(codes: Tensor, scales: Tensor) -> Weight:
    """Return the weights whose tensors these are: in fp8, or in mxfp4, whose codes are bytes."""
    return Mxfp4Weight(codes, scales) if codes.dtype == torch.uint8 else BlockQuantized(codes, scales)


def quantize_weight(weight: Tensor) -> BlockQuantized:
    """Quantise [..., N, K] to fp8 with a scale for each block of 128 x 128, as checkpoints of DeepSeek-V3 have them.

    Of each block ``scale = max(amax, 1e-4) / 448`` and ``code = e4m3(weight / scale)``, each operation rounded once in
    fp32: the arithmetic of format fp8_block128. So a zero block has codes 0, an inf saturates, and a NaN makes its
    block NaN. The last block of N may have fewer than 128 rows. Leading dimensions are quantised one after the other,
    so that no copy of all weights in fp32 exists.

    Raises:
        ArgumentError: ``weight`` has fewer than two dimensions, is not floating point, or K is not a multiple of 128.

    >>> quantized = quantize_weight(torch.full((2, 128), 448.0))
    >>> quantized.scales, quantized.codes.float().unique()
    (tensor([[1.]]), tensor([448.]))
    """
    if weight.dim() < 2 or not weight.is_floating_point() or weight.shape[-1] % BLOCK or not weight.shape[-1]:
        got = f"{weight.dtype} {list(weight.shape)}"
        raise ArgumentError("weight", f"floating point [..., N, K] with K a multiple of {BLOCK}", got)
    weight = weight.detach()
    rows, inner = weight.shape[-2:]
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    blocks = (*weight.shape[:-2], ceil_div(rows, BLOCK), inner // BLOCK)
    scales = torch.empty(blocks, dtype=torch.float32, device=weight.device)
    matrices = zip(
        weight.reshape(-1, rows, inner), codes.view(-1, rows, inner), scales.view(-1, *blocks[-2:]), strict=True
    )
    for one, codes_of_one, scales_of_one in matrices:
        _quantize_matrix(one.to(torch.float32), codes_of_one, scales_of_one)
    return BlockQuantized(codes, scales)


def _quantize_matrix(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Fill ``codes`` and ``scales`` of one fp32 matrix [N, K]."""
    rows, inner = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -rows % BLOCK))
    blocks = padded.view(-1, BLOCK, inner // BLOCK, BLOCK).transpose(1, 2)
    scales.copy_(canonical_nan(divide(amax(blocks.flatten(2)).clamp(min=AMAX_FLOOR), E4M3_MAX)))
    quotients = blocks / scales[..., None, None]
    codes.copy_(f32_to_e4m3(quotients.transpose(1, 2).reshape(padded.shape))[:rows])


def dequantize_weight(quantized: Weight, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of :func:`quantize_weight`, or of :func:`moelink.nn.quantize_mxfp4`, [..., N, K] of ``dtype``."""
    return quantized.dequantize(dtype)


def grouped_fp8(
    codes: Tensor,
    scales: Tensor,
    row_offsets: Tensor,
    weight: Weight,
    *,
    dtype: torch.dtype = torch.bfloat16,
    implementation: str = "auto",
) -> Tensor:
    """``rows @ weight[g].T`` for the rows of each group g, fp8 times fp8: [R, K] and [G, N, K] give [R, N].

    Args:
        codes: [R, K] float8_e4m3fn, rows as format fp8_block128 has them.
        scales: [K / 128, R] fp32, one for each 128 elements of a row, transposed.
        row_offsets: [G + 1] int32, exclusive starts. Rows from ``row_offsets[-1]`` on are undefined, in and out.
        weight: of shape [G, N, K], in fp8 or in mxfp4.
        dtype: of the result: bf16, fp16 or fp32.
        implementation: "triton", the kernel (on CPU tensors only in Triton's interpreter); "torch", the twin; "auto":
            "triton" on CUDA, "torch" elsewhere.

    No gradients. The kernel synchronises with nothing, and a CUDA graph may capture it. A device's first call makes
    counters of tiles, 512 KiB, and waits for these.

    Raises:
        ArgumentError: a shape, dtype or device does not fit, or a tensor is not contiguous.
        UnsupportedError: the kernel cannot run here, or the twin was called in a capture.
    """
    check_product(codes, scales, row_offsets, weight, dtype)
    if implementation not in ("auto", "triton", "torch"):
        raise ArgumentError("implementation", "one of auto, triton, torch", repr(implementation))
    kernel = implementation == "triton" or (implementation == "auto" and codes.is_cuda)
    return torch.ops.moelink.grouped_fp8(  # type: ignore[no-any-return]
        codes, scales, row_offsets, weight.codes, weight.scales, dtype, kernel
    )


def check_product(codes: Tensor, scales: Tensor, row_offsets: Tensor, weight: Weight, dtype: torch.dtype) -> None:
    """Refuse tensors that do not fit together, with the errors of :func:`grouped_fp8`."""
    kind = f"in {weight.kind}, of shape [G, N, K]"
    if weight.codes.dim() != len(weight.expected(1, 1, 1)[0]):
        raise ArgumentError("weight", f"codes {kind}", list(weight.codes.shape))
    groups, columns, inner = weight.shape
    if not groups or not columns or not inner or inner % BLOCK:
        raise ArgumentError("weight", f"codes {kind} without empty sizes, K a multiple of {BLOCK}",
                            list(weight.shape))  # fmt: skip
    if codes.dim() != 2:
        raise ArgumentError("codes", f"shape [R, {inner}]", list(codes.shape))
    rows, (code_shape, scale_shape) = codes.shape[0], weight.expected(groups, columns, inner)
    wanted = (
        ("codes", codes, (rows, inner), torch.float8_e4m3fn),
        ("scales", scales, (inner // BLOCK, rows), torch.float32),
        ("row_offsets", row_offsets, (groups + 1,), torch.int32),
        ("weight.codes", weight.codes, code_shape, weight.dtypes[0]),
        ("weight.scales", weight.scales, scale_shape, weight.dtypes[1]),
    )
    for name, tensor, shape, of in wanted:
        if tuple(tensor.shape) != shape or tensor.dtype != of:
            raise ArgumentError(name, f"{of} {list(shape)}", f"{tensor.dtype} {list(tensor.shape)}")
        if tensor.device != codes.device:
            raise ArgumentError(name, f"device {codes.device}", tensor.device)
        if not tensor.is_contiguous():
            raise ArgumentError(name, "a contiguous tensor", f"strides {tensor.stride()}")
    if dtype not in OUTPUT_DTYPES:
        raise ArgumentError("dtype", f"one of {', '.join(map(str, OUTPUT_DTYPES))}", dtype)


@torch.library.custom_op("moelink::grouped_fp8", mutates_args=())
def _grouped_fp8(
    codes: Tensor,
    scales: Tensor,
    row_offsets: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype,
    kernel: bool,
) -> Tensor:
    by = weight_of(weight, weight_scales)
    out = torch.empty(codes.shape[0], by.shape[1], dtype=dtype, device=codes.device)
    (launch_kernel if kernel else multiply_by_group)(codes, scales, row_offsets, by, out)
    return out


@_grouped_fp8.register_fake
def _grouped_fp8_fake(codes: Tensor, scales: Tensor, row_offsets: Tensor, weight: Tensor, *given: Any) -> Tensor:
    return codes.new_empty(codes.shape[0], weight_of(weight, given[0]).shape[1], dtype=given[1])


def launch_kernel(
    codes: Tensor, scales: Tensor, row_offsets: Tensor, weight: Weight, out: Tensor, *, follows_product: bool = False,
    likely_rows: int | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` by the kernel for such weights.

    Args:
        follows_product: a product of the same groups was launched, and one launch since, so that a kernel may begin
            early (:mod:`moelink.rows.grouped_gluon`).
        likely_rows: as of :func:`moelink.rows.grouped_choice.tile_rows`; None for those of the buffer.
    """
    from moelink.kernels.launch.device import is_interpreted

    if not codes.is_cuda and not is_interpreted():
        raise UnsupportedError(
            "grouped_fp8: expected CUDA tensors for the kernel, or Triton's interpreter (TRITON_INTERPRET=1, set "
            f"before triton is imported), got tensors on {codes.device}; use implementation='torch'"
        )
    weight.launch(codes, scales, row_offsets, out, follows_product=follows_product, likely_rows=likely_rows)


def multiply_by_group(codes: Tensor, scales: Tensor, row_offsets: Tensor, weight: Weight, out: Tensor) -> None:
    """Fill ``out`` by the twin."""
    if codes.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "grouped_fp8: expected a product that a CUDA graph can capture, got the torch twin, which reads group "
            "sizes on the host; use the Triton kernel"
        )
    offsets = [min(offset, len(codes)) for offset in row_offsets.tolist()]
    for group, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        if start < end:
            out[start:end] = weight.times(group, codes[start:end], scales[:, start:end]).to(out.dtype)
