"""Write the padding of dispatch's output: zero rows after each group's real ones, zero scales up to the end of a tile,
and -1 in ids of rows that hold no token.

The CTAs that have no message to unpack do so while messages are on their way (:func:`who_pads`).

Example: S.ROW_ALIGNMENT 4 and group sizes [3, 1]: rows 3, 5, 6, 7 are padding: zero tokens, scales and weights,
src_info -1. With layout "masked" (S.MASKED) nothing is written behind the real rows.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.unpack import row_of_slot, scale_places
from moelink.kernels.numeric import greater
from moelink.kernels.scale_tiles import row_of_word
from moelink.kernels.sync.signals import I32

_STEP = tl.constexpr(4096)
"""Words of tiles that a CTA zeroes at a time: 16 for each of its threads."""


@triton.jit
def who_pads(program, num_programs, most, num_local, S: tl.constexpr):
    """Return which one CTA ``program`` is of the CTAs that write padding (-1: none of them), and how many these are.

    They are the CTAs that have no message to unpack, because no source has more than ``most`` messages. If these CTAs
    are less than half as many as the groups, all CTAs write padding. A rank without experts has rows of no token to
    mark, so at least one CTA writes padding.

    Example: 133 CTAs, 2 ranks with up to 32 messages, 128 groups: CTAs 65 to 132, 68 of them.
    """
    busy = 1 + S.WORLD_SIZE * most
    idle = num_programs - busy
    enough = 2 * idle >= tl.maximum(num_local + S.FUSED_SHARED_EXPERT, 1)
    first = tl.where(enough, busy, 0)
    return tl.maximum(program - first, -1), num_programs - first


@triton.jit
def write_padding(outputs, messages, groups, numbers, pad, pads, S: tl.constexpr):
    """Write the padding of all ``groups``, as one of ``pads`` CTAs. ``messages`` [ranks]: those that came, which only
    layout "rank" needs."""
    if S.RANK_LAYOUT:
        fill_ids_of_no_rows(outputs.topk_ids, messages, numbers, pad, pads, S)
    if S.ROW_ALIGNMENT > 1:
        pad_rows(outputs, groups, numbers, pad, pads, S)
    if S.PADS_TILES:
        pad_tiles(outputs.scales, groups, numbers, pad, pads, S)


@triton.jit
def all_groups(groups, numbers, S: tl.constexpr):
    """Return start, real rows, rows and first scale block of all groups [N], the shared one first, within capacity.

    Unused group slots have zero rows.
    """
    width: tl.constexpr = S.MAX_LOCAL_EXPERTS_POW2 * (1 + S.FUSED_SHARED_EXPERT)
    g = tl.arange(0, width) - S.FUSED_SHARED_EXPERT
    routed = (g >= 0) & (g < numbers.num_local_experts)
    e = tl.where(routed, g, 0)
    start = tl.where(routed, tl.gather(groups.starts, e, 0), 0)
    size = tl.where(routed, tl.gather(groups.sizes, e, 0), tl.where(g == -1, groups.shared, 0))
    rows = tl.where(routed, tl.gather(groups.aligned, e, 0), tl.where(g == -1, groups.shared_rows, 0))
    block = tl.where(routed, tl.gather(groups.bases, e, 0), 0)
    rows = tl.minimum(start + rows, numbers.capacity) - tl.minimum(start, numbers.capacity)
    return start, tl.minimum(size, rows), rows, block


@triton.jit
def pad_rows(outputs, groups, numbers, program, num_programs, S: tl.constexpr):
    """Zero the padding rows of all groups: at most S.ROW_ALIGNMENT - 1 after each group's real rows.

    Each CTA takes a group that has padding, or several CTAs share one. It waits for nothing, and works while messages
    are on their way.

    Example: S.ROW_ALIGNMENT 4, group sizes [3, 0, 1], 5 CTAs: CTAs 0 and 2 take the group of row 3, CTAs 1 and 3 that
    of rows 5 to 7. CTA 2 finds no row left; CTA 1 zeroes rows 5 and 7, CTA 3 row 6. CTA 4 has nothing to do.
    """
    start, size, rows, _ = all_groups(groups, numbers, S)
    padded = (size < rows).to(tl.int32)
    nth = tl.cumsum(padded, 0) - padded
    count = tl.sum(padded, 0)
    shares = tl.maximum(num_programs // tl.maximum(count, 1), 1)
    c = tl.arange(0, S.BLOCK_SIZE)
    for i in range(program, count * shares, num_programs):
        pick = (padded > 0) & (nth == i % count)
        first = tl.sum(tl.where(pick, start + size, 0), 0)
        number = tl.sum(tl.where(pick, rows - size, 0), 0)
        clear_beside_rows(outputs, first, number, i // count, shares, numbers, S)
        for n in range(i // count, number, shares):
            to = outputs.tokens.to(S.WORD_POINTER, bitcast=True) + (first + n).to(tl.int64) * S.ROW_WORDS
            for c0 in tl.static_range(0, S.ROW_WORDS, S.BLOCK_SIZE):
                none = tl.zeros([S.BLOCK_SIZE], tl.int32).to(S.WORD_POINTER.element_ty)
                tl.store(to + c0 + c, none, mask=c0 + c < S.ROW_WORDS)


@triton.jit
def clear_beside_rows(outputs, first, number, share, shares, numbers, S: tl.constexpr):
    """Clear the sources, weights, and scales (unless in tiles) of the ``number`` padding rows from ``first``. Rows are
    taken a few at a time, by ``share`` of ``shares``."""
    few: tl.constexpr = 4 if S.ROW_ALIGNMENT <= 5 else 32
    j = tl.arange(0, 4)[None, :]
    for n0 in range(share * few, number, shares * few):
        n = n0 + tl.arange(0, few)[:, None]
        here = n < number
        row = first + n
        tl.store(outputs.src_info + row * 3 + j, row * 0 - 1 + j * 0, mask=here & (j < 3))
        if S.HAS_WEIGHTS:
            tl.store(outputs.weights + row, (row * 0).to(S.WEIGHT_POINTER.element_ty), mask=here)
        if S.SCALES_LATER:
            tl.store(outputs.scales.to(I32, bitcast=True) + row, row * 0 - 1, mask=here)
        elif S.SCALE_LAYOUT == 0 or S.SCALE_LAYOUT == 1:
            c = tl.arange(0, S.SCALE_WIDTH_POW2)[None, :]
            place = scale_places(row, row, row, c, numbers.scale_rows, S)
            none = tl.zeros([few, S.SCALE_WIDTH_POW2], tl.int32).to(S.SCALE_DTYPE)
            to = outputs.scales.to(S.SCALE_POINTER, bitcast=True)
            tl.store(to + place, none, mask=here & (c < S.SCALE_WIDTH))


@triton.jit
def pad_tiles(scales_out, groups, numbers, program, num_programs, S: tl.constexpr):
    """Zero the scales after each group's real rows, up to the end of its last tile of 128 rows.

    A step takes the same words of every group's tile, in the order of their addresses (``unpack.tile_words``), and
    zeroes those of rows that are not real. The CTAs share the steps, so each has the same work.

    Example: S.ROW_ALIGNMENT 24 and 121 real rows: 144 rows in 2 tiles. The words at 0, 4, ... 124 of each 128 of the
    first tile are of rows 0 to 31, and stay; those at 103, 107, ... 127 are of rows 121 to 127, and are zeroed, as is
    the second tile.
    """
    _, size, rows, block = all_groups(groups, numbers, S)
    words: tl.constexpr = (S.SCALE_WIDTH + 3) // 4
    most: tl.constexpr = _STEP // size.shape[0] if size.shape[0] < _STEP else 1
    width: tl.constexpr = 128 if most > 128 else most
    pieces: tl.constexpr = words * 128 // width
    # Up to 127 real rows, S.ROW_ALIGNMENT - 1 of padding, and 127 to the end of a tile.
    tiles: tl.constexpr = (253 + S.ROW_ALIGNMENT) // 128
    for i in range(program, tiles * pieces, num_programs):
        tile = (size // 128 + i // pieces)[:, None]
        w = (i % pieces * width + tl.arange(0, width))[None, :]
        inner = tile * 128 + row_of_word(w % 128)
        to = scales_out.to(I32, bitcast=True) + (block[:, None] + tile).to(tl.int64) * (words * 128)
        mask = (inner >= size[:, None]) & (tile * 128 < rows[:, None])
        tl.store(to + w, tl.zeros([size.shape[0], width], tl.int32), mask=mask)


@triton.jit
def fill_ids_of_no_rows(topk_ids, messages, numbers, program, num_programs, S: tl.constexpr):
    """Store -1 in the ids of the rows that hold no token, in layout "rank". ``messages`` [ranks]: those that came.

    Where rows stay in the messages (S.IN_PLACE) they are the last ones of each source's group, else those past the last
    group.
    """
    if S.IN_PLACE:
        block: tl.constexpr = greater(1024 // S.TOPK_POW2, 1)
        k = tl.arange(0, S.TOPK_POW2)[None, :]
        end = row_of_slot(S.WORLD_SIZE, 0, numbers, S)
        for first in range(program * block, end, num_programs * block):
            row = first + tl.arange(0, block)
            source = row // tl.maximum(numbers.capacity, 1)
            # A comparison [rows, ranks] would make the compiler load ``messages`` once for each of its layouts.
            came = tl.gather(messages, tl.minimum(source, S.WORLD_SIZE - 1), 0)
            unused = (row < end) & (row - row_of_slot(source, 0, numbers, S) >= came)
            cell = row[:, None].to(tl.int64) * S.TOPK + k
            tl.store(topk_ids + cell, tl.zeros(cell.shape, tl.int32) - 1, mask=unused[:, None] & (k < S.TOPK))
    else:
        fill_unused_ids(topk_ids, tl.sum(messages, 0), numbers.capacity, program, num_programs, S)


@triton.jit
def fill_unused_ids(topk_ids, total, capacity, program, num_programs, S: tl.constexpr):
    """Store -1 in the ids of the rows from ``total`` to ``capacity``, which hold no token, in layout "rank".

    Example: S.TOPK 3, 2 rows of 4, CTA 0 of 1: ids 6 to 11 become -1.
    """
    block: tl.constexpr = greater(1024 // S.TOPK_POW2, 1)
    row = tl.arange(0, block)[:, None]
    k = tl.arange(0, S.TOPK_POW2)[None, :]
    for first in range(total + program * block, capacity, num_programs * block):
        cell = (first + row).to(tl.int64) * S.TOPK + k
        tl.store(topk_ids + cell, tl.zeros(cell.shape, tl.int32) - 1, mask=(first + row < capacity) & (k < S.TOPK))
