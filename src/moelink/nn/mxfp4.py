"""Weights in mxfp4: two e2m1 codes a byte and an e8m0 scale for each 32 elements along K, as gpt_oss is published.

Legend: ``G`` groups, ``N`` columns of the output, ``K`` columns of a row. Checkpoints have *blocks*
[..., N, K / 32, 16] uint8, the even element in the low nibble, and *scales* [..., N, K / 32] uint8. The kernels
(:mod:`moelink.rows.grouped_mxfp4`, and on compute capability 9.0 :mod:`moelink.rows.grouped_gluon_mxfp4`) read the same
bits in another order, that of :class:`Mxfp4Weight`.

Accuracy of the product, against exact arithmetic on the numbers of rows and weights: an element of the output is within
the bound of :mod:`moelink.nn.block_quantized`, with e 2**-18 where sums are fp32. Tensor cores of compute capability
9.0 add 32 products at a time, those of one scale, and keep about 14 bits: there e is 2**-8 at worst, and tests hold
rows whose terms have either sign to 2**-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moelink.errors import ArgumentError
from moelink.formats.casts import (
    E8M0_NAN,
    amax,
    e2m1_to_f32,
    e4m3_to_f32,
    e8m0_reciprocal,
    f32_to_e2m1,
    pack_e2m1,
    unpack_e2m1,
)
from moelink.rows.grouped_choice import takes_gluon, tile_rows
from moelink.tuning import ROWS_OF_MXFP4

BLOCK, GROUP = 128, 32
"""Elements of a row, and of a weight, that share a scale."""


@dataclass(frozen=True)
class Mxfp4Weight:
    """Weights [..., N, K] in mxfp4, in the order in which kernels read them.

    Attributes:
        codes: [..., K / 64, N, 32] uint8, two elements a byte (:mod:`moelink.rows.grouped_mxfp4`).
        scales: [..., K / 128, N] int32, four e8m0 codes each. Code 0 counts as a scale of zero, 255 as inf. With a bias
            (:meth:`with_bias`) there is one more row, of its bits.
    """

    codes: Tensor
    scales: Tensor
    kind: ClassVar[str] = "mxfp4"

    @classmethod
    def from_blocks(cls, blocks: Tensor, scales: Tensor) -> Mxfp4Weight:
        """Reorder a checkpoint's ``blocks`` [..., N, K / 32, 16] and ``scales`` [..., N, K / 32], uint8 (or e8m0).

        Raises:
            ArgumentError: shapes or dtypes are others, or K is not a multiple of 128.
        """
        rows, count = blocks.shape[-3:-1] if blocks.dim() > 2 else (0, 0)
        if blocks.dtype != torch.uint8 or not rows or not count or count % 4 or blocks.shape[-1] != 16:
            raise ArgumentError("blocks", "uint8 [..., N, K / 32, 16] with K a multiple of 128",
                                f"{blocks.dtype} {list(blocks.shape)}")  # fmt: skip
        if scales.shape != blocks.shape[:-1] or scales.element_size() != 1:
            raise ArgumentError("scales", f"uint8 {list(blocks.shape[:-1])}", f"{scales.dtype} {list(scales.shape)}")
        codes = blocks.new_empty(*blocks.shape[:-3], count // 2, rows, GROUP)
        matrices = zip(blocks.reshape(-1, rows, count, 16), codes.view(-1, *codes.shape[-3:]), strict=True)
        for block, packed in matrices:  # one after the other, so that no copy of all codes exists
            pairs = unpack_e2m1(block).view(rows, -1, 2, GROUP).transpose(0, 1)
            first, second = pairs[:, :, 0], pairs[:, :, 1]
            packed.copy_((first & 7) | (first & 8) << 2)
            packed |= (second & 6) << 2 | (second & 1) << 6 | (second & 8) << 4
        scales = scales.view(torch.uint8).contiguous()
        words = (scales.clone() if scales.storage_offset() % 4 else scales).view(torch.int32)
        return cls(codes, words.transpose(-1, -2).contiguous())

    def with_bias(self, bias: Tensor) -> Mxfp4Weight:
        """Return weights whose products have ``bias`` [..., N], which is kept in fp32, added to each row. It takes the
        place of an earlier one.

        Raises:
            ArgumentError: it has another shape, or is not floating point.
        """
        if bias.shape != self.shape[:-1] or not bias.is_floating_point():
            raise ArgumentError("bias", f"floating point {list(self.shape[:-1])}", f"{bias.dtype} {list(bias.shape)}")
        row = bias.to(torch.float32).contiguous().view(torch.int32)
        words = self.scales[..., : self.codes.shape[-3] // 2, :]
        return Mxfp4Weight(self.codes, torch.cat((words, row.unsqueeze(-2)), dim=-2))

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias, by the shapes, which may be wrong ones."""
        return self.codes.dim() > 2 and self.scales.shape[-2:-1] == (self.codes.shape[-3] // 2 + 1,)

    @property
    def bias(self) -> Tensor | None:
        """[..., N] fp32, or None."""
        return self.scales[..., -1, :].view(torch.float32) if self.has_bias else None

    def to_blocks(self) -> tuple[Tensor, Tensor]:
        """Return the blocks and scales of a checkpoint, the inverse of :meth:`from_blocks`, without the bias."""
        b = self.codes.transpose(-2, -3)
        first = b & 7 | b >> 2 & 8
        second = b >> 2 & 6 | b >> 6 & 1 | b >> 4 & 8
        codes = torch.stack((first, second), dim=-2)
        blocks = pack_e2m1(codes).reshape(*codes.shape[:-3], -1, GROUP // 2)
        # Not contiguous(), which leaves the strides of a dimension of 1 as they are.
        words = self.scales[..., : self.codes.shape[-3] // 2, :]
        return blocks, words.transpose(-1, -2).clone(memory_format=torch.contiguous_format).view(torch.uint8)

    @property
    def shape(self) -> torch.Size:
        """[..., N, K]."""
        *outer, count, rows, width = self.codes.shape
        return torch.Size((*outer, rows, 2 * count * width))

    def expected(self, groups: int, columns: int, inner: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of codes and scales of weights [G, N, K]."""
        words = inner // BLOCK + self.has_bias
        return (groups, inner // (2 * GROUP), columns, GROUP), (groups, words, columns)

    dtypes: ClassVar[tuple[torch.dtype, torch.dtype]] = (torch.uint8, torch.int32)

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return the elements [..., N, K], before their scales, and the scales [..., N, K / 32], both fp32."""
        blocks, scales = self.to_blocks()
        return e2m1_to_f32(unpack_e2m1(blocks)).flatten(-2), (scales.to(torch.int32) << 23).view(torch.float32)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the numbers [..., N, K]."""
        numbers, scales = self.numbers()
        return (numbers * scales.repeat_interleave(GROUP, -1)).to(dtype)

    def times(self, group: int, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the product [n, N] fp32 of rows, ``codes`` [n, K] and ``scales`` [K / 128, n], and the weights of
        ``group``: the twin of the kernel, with its order of sums."""
        numbers, factors = Mxfp4Weight(self.codes[group], self.scales[group]).numbers()
        rows = e4m3_to_f32(codes).unflatten(1, (-1, 4, GROUP)).permute(1, 2, 0, 3)
        columns = numbers.unflatten(1, (-1, 4, GROUP)).permute(1, 2, 3, 0)
        factors = factors.unflatten(1, (-1, 4)).permute(1, 2, 0)
        out = scales.new_zeros(codes.shape[0], numbers.shape[0])
        for row, column, factor, by_row in zip(rows, columns, factors, scales, strict=True):
            d = torch.bmm(row, column) * factor[:, None]
            out += (d[0] + d[1] + d[2] + d[3]) * by_row[:, None]
        bias = self.bias
        return out if bias is None else out + bias[group]

    def launch(
        self, codes: Tensor, scales: Tensor, row_offsets: Tensor, out: Tensor, *, follows_product: bool = False,
        likely_rows: int | None = None,
    ) -> None:  # fmt: skip
        """Fill ``out`` by a kernel: on compute capability 9.0, for N a multiple of 4 (the columns of a line of bytes),
        by one in Gluon, else by the Triton kernel, which begins behind any launch."""
        given = codes, scales, row_offsets, self.codes, self.scales, out
        if not takes_gluon(codes) or self.codes.shape[2] % 4:
            from moelink.rows.grouped_mxfp4 import launch

            launch(*given)
        else:
            from moelink.rows.grouped_gluon_mxfp4 import launch as launch_by_gluon

            tile = tile_rows(likely_rows or len(codes), len(self.codes), by_mean=ROWS_OF_MXFP4) or 64
            launch_by_gluon(*given, tile, early=follows_product)


def quantize_mxfp4(weight: Tensor) -> Mxfp4Weight:
    """Quantise [..., N, K] to mxfp4, by the conversion of the OCP specification of MX formats.

    Of each 32 elements ``scale = 2**(floor(log2(amax)) - 2)`` and ``code = e2m1(weight / scale)``, nearest even,
    saturating at 6. The division is exact. amax below 2**-124 gives the scale's code 0, for zeros; an inf counts as the
    largest number, and a NaN makes its scale NaN.

    Raises:
        ArgumentError: ``weight`` has fewer than two dimensions, is not floating point, or K is not a multiple of 128.

    >>> blocks, scales = quantize_mxfp4(torch.full((1, 128), 3.0)).to_blocks()
    >>> scales.tolist(), blocks[0, 0, 0].item() == 0x77  # 6 * 2**-1
    ([[126, 126, 126, 126]], True)
    """
    if weight.dim() < 2 or not weight.is_floating_point() or weight.shape[-1] % BLOCK or not all(weight.shape[-2:]):
        got = f"{weight.dtype} {list(weight.shape)}"
        raise ArgumentError("weight", f"floating point [..., N, K], none empty, with K a multiple of {BLOCK}", got)
    weight = weight.detach()
    rows, inner = weight.shape[-2:]
    blocks = torch.empty(*weight.shape[:-1], inner // GROUP, GROUP // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(blocks.shape[:-1], dtype=torch.uint8, device=weight.device)
    matrices = zip(
        weight.reshape(-1, rows, inner), blocks.view(-1, *blocks.shape[-3:]), scales.view(-1, *scales.shape[-2:]),
        strict=True,
    )  # fmt: skip
    for one, block, scale in matrices:
        groups = one.to(torch.float32).unflatten(1, (-1, GROUP))
        largest = amax(groups)
        code = ((largest.view(torch.int32) >> 23) - 2).clamp(min=0)
        scale.copy_(torch.where(largest.isnan(), E8M0_NAN, code))
        scaled = torch.where((scale == 0)[..., None], 0.0, groups * e8m0_reciprocal(scale)[..., None])
        block.copy_(pack_e2m1(f32_to_e2m1(scaled)))
    return Mxfp4Weight.from_blocks(blocks, scales)
