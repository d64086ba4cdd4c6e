"""Dispatch, receiver role: where scales go, and the zeros behind each group's real rows.

Example: ALIGN 4 and group sizes [3, 1]: rows 3, 5, 6, 7 are padding: zero tokens, scales and weights, src_info -1.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only
from moelink.kernels.sync.signals import I32


@triton.jit
def scale_places(row, inner, block, c, scale_rows, S: tl.constexpr):
    """Element offsets of the scales of a row at scale columns c [m], or of rows [n, 1] at c [1, m]."""
    if S.SCALES == 1:
        return c.to(tl.int64) * scale_rows + row
    elif S.SCALES == 2:
        tile = (block + inner // 128).to(tl.int64) * ((S.SW + 3) // 4) + c // 4
        return (tile * 32 + inner % 32) * 16 + inner % 128 // 32 * 4 + c % 4
    else:
        return row.to(tl.int64) * S.SW + c


@triton.jit
def tile_words(inner, block, w, S: tl.constexpr):
    """Layout of 128x4 tiles: offsets of the words (four scales of a row each) of rows (columns) at words w ([1, m])."""
    tile = (block + inner // 128).to(tl.int64) * ((S.SW + 3) // 4) + w
    return (tile * 32 + inner % 32) * 4 + inner % 128 // 32


@triton.jit
def load_scales(mine, at, S: tl.constexpr):
    """Scales of the message numbered ``at``; anything for -1, and behind the last. In tiles as words of four, zeros
    behind the last in its word."""
    message = mine + S.O_MESSAGES + at.to(tl.int64) * S.MESSAGE + S.M_SCALES
    if S.SCALES == 2:
        w = tl.arange(0, S.SWP // 4)
        word = tl.load(message.to(I32) + w, mask=only(at >= 0, w < (S.SW + 3) // 4))
        if S.SW % 4:
            word = tl.where(w == S.SW // 4, word & ((1 << (S.SW % 4 * 8)) - 1), word)
        return word
    else:
        c = tl.arange(0, S.SWP)
        return tl.load(message.to(S.SCALE_P) + c, mask=only(at >= 0, c < S.SW))


@triton.jit
def store_scales(scales, row, inner, block, scales_out, scale_rows, S: tl.constexpr):
    """A message's ``scales``, as :func:`load_scales` gives them, to the rows ``row`` [RP], -1 for none."""
    c = tl.arange(0, scales.shape[0])
    if S.SCALES == 2:
        to = scales_out.to(I32, bitcast=True) + tile_words(inner[:, None], block[:, None], c[None, :], S)
        width = (S.SW + 3) // 4
    else:
        to = scales_out.to(S.SCALE_P, bitcast=True)
        to += scale_places(row[:, None], inner[:, None], block[:, None], c[None, :], scale_rows, S)
        width = S.SW
    tl.store(
        to, tl.broadcast_to(scales[None, :], (S.RP, scales.shape[0])), mask=(row >= 0)[:, None] & (c < width)[None, :]
    )


@triton.jit
def note_messages(message_of_row, row, at, S: tl.constexpr):
    """LATER: rows ``row`` [N, RP], -1 for none, came with messages ``at`` [N] (``kernels.dispatch.scales``)."""
    number = tl.broadcast_to(at[:, None], row.shape)
    tl.store(message_of_row.to(I32, bitcast=True) + row, number, mask=row >= 0)


@triton.jit
def group_at(g, sizes, starts, aligned, bases, shared, shared_rows, capacity, S: tl.constexpr):
    """Start, real rows, rows and first scale block of routed group ``g`` (-1: the shared one), within capacity."""
    pick = tl.arange(0, S.LOOK) == g
    size = tl.sum(tl.where(pick, sizes, 0), 0)
    start = tl.sum(tl.where(pick, starts, 0), 0)
    rows = tl.sum(tl.where(pick, aligned, 0), 0)
    block = tl.sum(tl.where(pick, bases, 0), 0)
    if g < 0:
        size += shared
        rows += shared_rows
    rows = tl.minimum(start + rows, capacity) - tl.minimum(start, capacity)
    return start, tl.minimum(size, rows), rows, block


@triton.jit
def who_pads(program, num_programs, most, num_local, S: tl.constexpr):
    """Which of how many programs that write padding ``program`` is, -1 for none of them: those that have no message to
    place, as no source has more than ``most`` of them, or all where these are less than half as many as groups.

    Example: 133 programs, 2 ranks with up to 32 messages, 128 groups: programs 65 to 132, 68 of them.
    """
    busy = 1 + S.W * most
    idle = num_programs - busy
    enough = 2 * idle >= num_local + S.SHARED
    first = tl.where(enough, busy, 0)
    return tl.maximum(program - first, -1), num_programs - first


@triton.jit
def pad_rows(
    tokens_out, scales_out, src_info, weights_out, sizes, starts, aligned, shared, shared_rows, bases, num_local,
    program, num_programs, capacity, scale_rows, S: tl.constexpr,
):  # fmt: skip
    """Zero the padding rows of all groups: at most ALIGN - 1 behind each group's real rows.

    A group for each program, or several programs for a group. Nothing is waited for: it is done while messages are on
    their way.
    """
    groups = num_local + S.SHARED
    shares = tl.maximum(num_programs // groups, 1)
    j = tl.arange(0, 4)
    for i in range(program, groups * shares, num_programs):
        start, size, rows, _ = group_at(
            i % groups - S.SHARED, sizes, starts, aligned, bases, shared, shared_rows, capacity, S
        )  # fmt: skip
        for inner in range(size + i // groups, rows, shares):
            row = start + inner
            to = tokens_out.to(S.WORD_P, bitcast=True) + row.to(tl.int64) * S.NWORDS
            for c0 in tl.static_range(0, S.NWORDS, S.BLOCK):
                c = c0 + tl.arange(0, S.BLOCK)
                tl.store(to + c, tl.zeros([S.BLOCK], tl.int32).to(S.WORD_P.element_ty), mask=c < S.NWORDS)
            tl.store(src_info + row * 3 + j, j * 0 - 1, mask=j < 3)
            if S.WEIGHTS:
                tl.store(weights_out + row + j, (j * 0).to(S.WEIGHT_P.element_ty), mask=j < 1)
            if S.LATER:
                tl.store(scales_out.to(I32, bitcast=True) + row + j, j * 0 - 1, mask=j < 1)
            elif S.SCALES == 0 or S.SCALES == 1:
                c = tl.arange(0, S.SWP)
                place = scale_places(row, row, row, c, scale_rows, S)
                tl.store(
                    scales_out.to(S.SCALE_P, bitcast=True) + place, tl.zeros([S.SWP], tl.int32).to(S.SCALE),
                    mask=c < S.SW,
                )  # fmt: skip


@triton.jit
def pad_tiles(
    scales_out,
    sizes,
    starts,
    aligned,
    shared,
    shared_rows,
    bases,
    num_local,
    program,
    num_programs,
    capacity,
    S: tl.constexpr,
):
    """Zero the scales behind each group's real rows up to the end of its last 128-row tile.

    Example: ALIGN 24 and 121 real rows: 144 rows in 2 tiles, so 135 rows of scales are zeroed, in two rounds of 128.
    """
    words: tl.constexpr = (S.SW + 3) // 4
    steps: tl.constexpr = (words + 15) // 16
    j = tl.arange(0, 128)
    for i in range(program, (num_local + S.SHARED) * steps, num_programs):
        g = i // steps - S.SHARED
        _, size, rows, block = group_at(g, sizes, starts, aligned, bases, shared, shared_rows, capacity, S)
        w = i % steps * 16 + tl.arange(0, 16)
        for j0 in tl.static_range(0, 126 + S.ALIGN, 128):
            inner = size + j0 + j
            tl.store(
                scales_out.to(I32, bitcast=True) + tile_words(inner[:, None], block, w[None, :], S),
                tl.zeros([128, 16], tl.int32),
                mask=(inner < tl.cdiv(rows, 128) * 128)[:, None] & (w < words)[None, :],
            )  # fmt: skip
