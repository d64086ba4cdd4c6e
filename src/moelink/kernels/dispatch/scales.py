"""Write the scales of a large dispatch in their layout, in a launch after the receiver's.

Grouped matmuls expect the scales of a row far apart: those of fp8_block128 in columns over all rows, those of the MX
formats and nvfp4 in tiles of 128 rows. A receiver that stored them row by row would write 4 bytes at a time to
scattered addresses, 56 times per row; with 32768 rows that took a quarter of a call. So the receiver only stores, in
place of the scales, the number of the message that each row came with (-1 for padding). This kernel knows all rows and
writes whole cache lines.

A CTA takes 32 columns of 4 bytes of a tile of up to 128 rows of one group. It reads them row by row from the messages,
where they still are, and stores them column by column. Why no call overwrites the messages meanwhile: a rank grants
credit for a call in its next launch of a phase (``kernels.sync.credit``), which follows this one in stream order. A
message number out of range (a peer sent malformed data, which left a row without a message) counts as padding. After a
call that brought nothing there are no rows, so the kernel does nothing.

Example: 2 groups whose rows are [0, 130) and [130, 134): three tiles, of 128, 2 and 4 rows. In the layout of tiles the
word of row 33 of the first tile and scale columns 4 to 7 is word 128 * 1 + 4 * (33 % 32) + 33 // 32 = 133.
"""

import triton
import triton.language as tl

from moelink.kernels.launch.roles import run_role
from moelink.kernels.scale_tiles import row_of_word
from moelink.kernels.sync.signals import I32, own_block
from moelink.memory.protocol import DISPATCH_RECEIVED

_KIND = tl.constexpr(DISPATCH_RECEIVED)
_ROWS = tl.constexpr(128)
_COLUMNS = tl.constexpr(32)


@triton.jit
def groups_of(row_offsets, num_groups, S: tl.constexpr):
    """Return for each group: first row, rows, and number of the first tile after it."""
    g = tl.arange(0, S.NUM_GROUPS_POW2)
    begins = tl.load(row_offsets + g, mask=g < num_groups, other=0)
    rows = tl.load(row_offsets + 1 + g, mask=g < num_groups, other=0) - begins
    return begins, rows, tl.cumsum(tl.cdiv(rows, _ROWS), 0)


@triton.jit
def tile_of(begins, rows, ends, i):
    """Return for tile ``i`` over all groups: its group's first row and rows, and its number in the group."""
    here = tl.arange(0, ends.shape[0]) == tl.sum((ends <= i).to(tl.int32), 0)
    begin = tl.sum(tl.where(here, begins, 0), 0)
    tile = i - tl.sum(tl.where(here, ends - tl.cdiv(rows, _ROWS), 0), 0)
    return begin, tl.sum(tl.where(here, rows, 0), 0), tile


@triton.jit
def lay_out(
    program, programs, control, row_offsets, message_of_row, scales_out, num_groups, scale_rows, S: tl.constexpr
):
    """Write every ``programs``-th piece of the scales, as CTA ``program``."""
    mine = own_block(control, S)
    out = scales_out.to(I32, bitcast=True)
    words: tl.constexpr = (S.SCALE_WIDTH * S.SCALE_DTYPE.primitive_bitwidth // 8 + 3) // 4
    rest: tl.constexpr = S.SCALE_WIDTH * S.SCALE_DTYPE.primitive_bitwidth // 8 % 4
    blocks: tl.constexpr = (words + _COLUMNS - 1) // _COLUMNS
    j = tl.arange(0, _ROWS)
    begins, sizes, ends = groups_of(row_offsets, num_groups, S)
    i = program
    while i < tl.max(ends, 0) * blocks:
        begin, rows, tile = tile_of(begins, sizes, ends, i // blocks)
        # Addresses ascend along j in either layout.
        inner = tile * _ROWS + (row_of_word(j) if S.SCALE_LAYOUT == 2 else j)
        row = begin + inner
        at = tl.load(message_of_row + row, mask=inner < rows, other=-1)
        real = (at >= 0) & (at < S.WORLD_SIZE * S.MAX_TOKENS)
        message = mine + S.OFFSET_MESSAGES + at.to(tl.int64) * S.MESSAGE_BYTES + S.MESSAGE_SCALES
        c = i % blocks * _COLUMNS + tl.arange(0, _COLUMNS)
        mask = real[:, None] & (c < words)[None, :]
        word = tl.load(message.to(I32)[:, None] + c[None, :], mask=mask, other=0)
        if rest > 0:
            word = tl.where((c == words - 1)[None, :], word & ((1 << (8 * rest)) - 1), word)
        if S.SCALE_LAYOUT == 2:
            to = out + (tl.cast(i // blocks, tl.int64) * words + c)[None, :] * _ROWS + j[:, None]
            tl.store(to, word, mask=(j >= 0)[:, None] & (c < words)[None, :])
        else:
            to = out + c.to(tl.int64)[None, :] * scale_rows + row[:, None]
            tl.store(to, word, mask=(inner < rows)[:, None] & (c < words)[None, :])
        i += programs


@triton.jit
def ep_lay_out_scales_kernel(peers, row_offsets, message_of_row, scales_out, numbers, S: tl.constexpr):
    """Write the scales of all rows [0, row_offsets[num_groups]), of which row r came with message
    ``message_of_row[r]``."""
    pieces = (peers.control, row_offsets, message_of_row, scales_out, numbers.num_groups, numbers.scale_rows)
    run_role(lay_out, pieces, peers.control, _KIND, numbers.programs, S)
