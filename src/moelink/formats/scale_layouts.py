"""Define the scale layouts of the "expert" output: row-major, transposed, and 128x4 tiles.

Legend: ``n`` rows, ``w`` scales a row, ``G`` groups. Nothing here synchronises with a device or loops over rows. Scales
are moved as bits, so every scale dtype works, with every version of torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.arith import ceil_div
from moelink.formats.base import ScaleLayout

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

TILE_ROWS = 128
TILE_COLUMNS = 4


def _bits(x: Tensor) -> Tensor:
    """Return the tensor's bits as integers, because float8 types lack most operations."""
    return x.view(_BITS[x.dtype.itemsize])


def _packed(x: Tensor) -> Tensor:
    """Return a copy with row-major strides.

    ``contiguous`` keeps odd strides of dimensions of size 1, and such a tensor cannot be viewed as bytes.
    """
    return x.clone(memory_format=torch.contiguous_format)


def scatter_by_group(
    layout: ScaleLayout, out: Tensor, scales: Tensor, *, groups: Tensor, inner: Tensor, rows_per_group: int
) -> None:
    """Write ``scales`` [n, w] of rows ``inner`` [n] of ``groups`` [n], which ascend, into ``out``: layout "masked", a
    tensor of :meth:`ScaleLayout.group_shape` for each group. The host waits for the bounds of the groups.

    Example: rows 0 and 1 of group 0 and row 0 of group 2, transposed: ``out[0][:, 0]``, ``out[0][:, 1]`` and
    ``out[2][:, 0]`` are written.
    """
    ends = torch.searchsorted(groups, torch.arange(len(out), device=groups.device), right=True).tolist()
    first, offsets = torch.zeros_like(inner), torch.tensor([0, rows_per_group], dtype=torch.int32, device=out.device)
    begin = 0
    for group, end in enumerate(ends):
        if begin < end:
            rows, one = inner[begin:end], first[begin:end]
            layout.scatter(out[group], scales[begin:end], rows=rows, groups=one, row_offsets=offsets)
        begin = end


def _past_the_size(place: Tensor, starts: Tensor, ends: Tensor, sizes: Tensor) -> Tensor:
    """Return True for each ``place`` in [starts[g] + sizes[g], ends[g]) of a group g (G > 0)."""
    group = torch.searchsorted(ends, place, right=True)
    inside = group < ends.numel()
    group = group.clamp(max=ends.numel() - 1)
    return inside & (place - starts[group] >= sizes[group])


def _padding_rows(num_rows: int, row_offsets: Tensor, group_sizes: Tensor) -> Tensor:
    """Return [num_rows] bool: rows of a group past its real rows. Rows beyond the last offset are not padding."""
    place = torch.arange(num_rows, device=row_offsets.device, dtype=row_offsets.dtype)
    return _past_the_size(place, row_offsets[:-1], row_offsets[1:].contiguous(), group_sizes)


class RowMajor(ScaleLayout):
    """[rows, w]: the scales of output row r are row r."""

    name = "row_major"

    def shape(self, num_rows: int, scale_width: int, num_groups: int) -> tuple[int, ...]:
        return (num_rows, scale_width)

    def scatter(self, out: Tensor, scales: Tensor, *, rows: Tensor, groups: Tensor, row_offsets: Tensor) -> None:
        _bits(out)[rows] = _bits(scales)

    def gather(self, scales: Tensor, *, rows: Tensor, groups: Tensor, row_offsets: Tensor, scale_width: int) -> Tensor:
        return _bits(scales)[rows].view(scales.dtype)

    def clear_padding(self, out: Tensor, *, row_offsets: Tensor, group_sizes: Tensor) -> None:
        if group_sizes.numel():
            _bits(out).masked_fill_(_padding_rows(out.shape[0], row_offsets, group_sizes)[:, None], 0)


class Transposed(ScaleLayout):
    """[w, rows]: the scales of output row r are column r."""

    name = "transposed"

    def shape(self, num_rows: int, scale_width: int, num_groups: int) -> tuple[int, ...]:
        return (scale_width, num_rows)

    def scatter(self, out: Tensor, scales: Tensor, *, rows: Tensor, groups: Tensor, row_offsets: Tensor) -> None:
        _bits(out)[:, rows] = _bits(scales).t()

    def gather(self, scales: Tensor, *, rows: Tensor, groups: Tensor, row_offsets: Tensor, scale_width: int) -> Tensor:
        return _packed(_bits(scales)[:, rows].t()).view(scales.dtype)

    def clear_padding(self, out: Tensor, *, row_offsets: Tensor, group_sizes: Tensor) -> None:
        if group_sizes.numel():
            _bits(out).masked_fill_(_padding_rows(out.shape[1], row_offsets, group_sizes)[None, :], 0)


class Tiles128x4(ScaleLayout):
    """[n_blocks, ceil(w / 4), 32, 4, 4]: tiles of 128 rows x 4 scales (512 bytes), as block-scaled matmuls read them.

    Every group starts a fresh block of 128 rows. With i the row inside group g and c the scale column::

        base(g) = row_offsets[g] // 128 + scales_offsets[g]        = blocks of the groups before g
        scales_offsets[g] = sum over j < g of ceil(m_j / 128) - row_offsets[g] // 128     m_j: rows of group j
        scale(g, i, c) = out[base(g) + i // 128, c // 4, i % 32, i % 128 // 32, c % 4]

    row_offsets [0, 100, 300, 400] gives scales_offsets [0, 1, 1] and bases 0, 1, 3. In the touched blocks the rows
    past a group's end and the columns past w hold zero; blocks past the last group's are never written. The tensor
    has room for the worst case, n_blocks = ceil((rows + 128 G) / 128).
    """

    name = "tiles_128x4"
    block_rows = TILE_ROWS

    def shape(self, num_rows: int, scale_width: int, num_groups: int) -> tuple[int, ...]:
        blocks = ceil_div(num_rows + num_groups * TILE_ROWS, TILE_ROWS)
        return (blocks, ceil_div(scale_width, TILE_COLUMNS), 32, TILE_ROWS // 32, TILE_COLUMNS)

    def group_shape(self, num_rows: int, scale_width: int) -> tuple[int, ...]:
        return (num_rows // TILE_ROWS, ceil_div(scale_width, TILE_COLUMNS), 32, TILE_ROWS // 32, TILE_COLUMNS)

    @staticmethod
    def _block_ends(row_offsets: Tensor) -> Tensor:
        """Return [G] int32: base(g + 1)."""
        sizes = row_offsets[1:] - row_offsets[:-1]
        return torch.div(sizes + (TILE_ROWS - 1), TILE_ROWS, rounding_mode="floor").cumsum(0, dtype=torch.int32)

    def bases(self, row_offsets: Tensor) -> Tensor:
        """Return [G] int32: the first block of every group."""
        ends = self._block_ends(row_offsets)
        return torch.cat((ends.new_zeros(1), ends))[:-1]

    def scales_offsets(self, row_offsets: Tensor) -> Tensor:
        starts = torch.div(row_offsets[:-1], TILE_ROWS, rounding_mode="floor")
        return (self.bases(row_offsets) - starts).to(torch.int32)

    def _place(self, rows: Tensor, groups: Tensor, row_offsets: Tensor) -> tuple[Tensor, slice, Tensor, Tensor]:
        inner = rows - row_offsets[groups].long()
        block = self.bases(row_offsets)[groups].long() + inner // TILE_ROWS
        return block, slice(None), inner % 32, inner % TILE_ROWS // 32

    def scatter(self, out: Tensor, scales: Tensor, *, rows: Tensor, groups: Tensor, row_offsets: Tensor) -> None:
        columns = out.shape[1] * TILE_COLUMNS
        padded = torch.nn.functional.pad(_bits(scales), (0, columns - scales.shape[1]))
        _bits(out)[self._place(rows, groups, row_offsets)] = padded.view(-1, out.shape[1], TILE_COLUMNS)

    def gather(self, scales: Tensor, *, rows: Tensor, groups: Tensor, row_offsets: Tensor, scale_width: int) -> Tensor:
        tiles = _bits(scales)[self._place(rows, groups, row_offsets)]
        return _packed(tiles.flatten(1)[:, :scale_width]).view(scales.dtype)

    def clear_padding(self, out: Tensor, *, row_offsets: Tensor, group_sizes: Tensor) -> None:
        if not group_sizes.numel():
            return
        ends = self._block_ends(row_offsets)
        rows = row_offsets[1:] - row_offsets[:-1]
        place = torch.arange(out.shape[0] * TILE_ROWS, device=out.device, dtype=torch.int32)
        padding = _past_the_size(
            place, self.bases(row_offsets) * TILE_ROWS, ends * TILE_ROWS, torch.minimum(group_sizes, rows)
        )
        # A tile's row i is [i % 32, i // 32].
        mask = padding.view(-1, TILE_ROWS // 32, 32).transpose(1, 2)[:, None, :, :, None]
        _bits(out).masked_fill_(mask, 0)
