"""Store a row in its messages, piece by piece: a step of dispatch's sender role.

A row is read one piece of columns at a time, encoded once, and stored to every destination from registers. The CTA
takes the destinations one after the other (:func:`nth_rank`), each with all threads, so a piece is quantised once
however many ranks it goes to. Whether it goes to a rank is in the mask of the store, not in a branch: in a branch
Triton 3.6 rearranges the piece into the store's layout again for each rank, through shared memory and five barriers.
The CTA reads a piece before it stores the one before, so that reading hides behind storing. For that, nothing may touch
a piece between its load and its use. Hence masked loads have no ``other`` value (it would be moved in behind the load),
and elements of 16 bits are loaded as words of two and taken apart where they are encoded. For the same reason the
scales of a row that came quantised are read before its first piece is stored, and stored after the last one. In a
format with one scale per row, a row is one piece and one group, rounded up to a power of two, so that its largest
element is known before the first store.

Example of a piece: bf16 columns 1.0, 2.0 (bits 0x3f80, 0x4000) are read as the word 0x40003f80.

Example of scales: hidden size 640. In fp8_token a piece has 1024 columns, 640 of the row and 384 zeros, 640 of which
are stored, and one scale. In fp8_block128_e8m0 it has 8 groups, 5 of the row; they and 3 zeros are 2 words of scales.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only, round_to
from moelink.kernels.sync.signals import I32, U8


@triton.jit
def load_piece(x, token, piece, end, S: tl.constexpr):
    """Load the columns of piece ``piece`` of row ``token`` as they are in memory.

    Values of a token from ``end`` on, and past the end of the row, are undefined.
    """
    if S.SOURCE == 2:
        g = piece * S.GROUPS_PER_PIECE + tl.arange(0, S.GROUPS_PER_PIECE)
        if S.INPUT_DTYPE.primitive_bitwidth == 16:
            c = g[:, None] * (S.GROUP_SIZE // 2) + tl.arange(0, S.GROUP_SIZE // 2)[None, :]
            source = x.to(I32, bitcast=True) + tl.cast(token, tl.int64) * (S.HIDDEN_SIZE // 2)
            return tl.load(source + c, mask=only(token < end, c < S.HIDDEN_SIZE // 2), eviction_policy=S.EVICTION)
        else:
            c = g[:, None] * S.GROUP_SIZE + tl.arange(0, S.GROUP_SIZE)[None, :]
            source = x + tl.cast(token, tl.int64) * S.HIDDEN_SIZE
            return tl.load(source + c, mask=only(token < end, c < S.HIDDEN_SIZE), eviction_policy=S.EVICTION)
    elif S.SOURCE == 1:
        c = piece * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
        source = x + tl.cast(token, tl.int64) * S.HIDDEN_SIZE
        return tl.load(source + c, mask=only(token < end, c < S.HIDDEN_SIZE), eviction_policy=S.EVICTION)
    else:
        c = piece * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
        source = x.to(S.WORD_POINTER, bitcast=True) + tl.cast(token, tl.int64) * S.ROW_WORDS
        return tl.load(source + c, mask=only(token < end, c < S.ROW_WORDS), eviction_policy=S.EVICTION)


@triton.jit
def columns_of(row, S: tl.constexpr):
    """Return the columns [groups, elements of a group], fp32, of a piece from :func:`load_piece` that is to be
    encoded; zeros past the end of a row that is one group."""
    if S.INPUT_DTYPE.primitive_bitwidth == 16:
        if S.INPUT_DTYPE == tl.bfloat16:  # the upper half of an fp32
            even = (row << 16).to(tl.float32, bitcast=True)
            odd = (row & -65536).to(tl.float32, bitcast=True)
        else:
            even = row.to(tl.int16).to(S.INPUT_DTYPE, bitcast=True).to(tl.float32)
            odd = (row >> 16).to(tl.int16).to(S.INPUT_DTYPE, bitcast=True).to(tl.float32)
        columns = tl.reshape(tl.join(even, odd), (S.GROUPS_PER_PIECE, S.GROUP_SIZE))
    else:
        columns = row.to(tl.float32)
    rest: tl.constexpr = S.HIDDEN_SIZE % S.GROUP_SIZE
    if rest > 0:
        columns = tl.where((tl.arange(0, S.GROUP_SIZE) < S.HIDDEN_SIZE)[None, :], columns, 0.0)
    return columns


@triton.jit
def in_format(row, input_scale, S: tl.constexpr):
    """Return a piece from :func:`load_piece` in the message's format, flat, and the scales of its groups.

    Scales are integers of their size. A piece that is already encoded, or whose format has no scales, stands in their
    place.
    """
    if S.SOURCE == 2:
        factor = tl.load(input_scale) if S.HAS_INPUT_SCALE else 1.0
        casts: tl.constexpr = S.BF16_CASTS if S.NATIVE_CASTS and S.INPUT_DTYPE == tl.bfloat16 else S.NATIVE_CASTS
        payload, scale = S.ENCODE_FN(columns_of(row, S), factor, casts)
        scale = scale.to(S.GROUP_SCALE_POINTER.element_ty, bitcast=True)
        return tl.reshape(payload, (S.GROUPS_PER_PIECE * S.GROUP_BYTES,)), scale
    elif S.SOURCE == 1:
        rounded = round_to(row.to(tl.float64 if S.ROW_DTYPE == tl.float64 else tl.float32), S.ROW_DTYPE, S.NATIVE_CASTS)
        return rounded, rounded
    else:
        return row, row


@triton.jit
def nth_rank(i, me, S: tl.constexpr):
    """Return the ``i``-th rank that rank ``me`` stores a row to: first the next one, and itself last.

    So at each step every rank is stored to by one other. If all ranks began with rank 0, its links would be crowded
    while the others carry nothing.

    Example: rank 2 of 4 stores to ranks 3, 0, 1, 2.
    """
    return (me + 1 + i) % S.WORLD_SIZE


@triton.jit
def place_at(places, d):
    """Return element d of ``places`` [ranks] as a scalar."""
    return tl.sum(tl.where(tl.arange(0, places.shape[0]) == d, places, 0), 0)


@triton.jit
def ready_scales(scales, token, S: tl.constexpr):
    """Load the scales [scales] of row ``token`` if it came quantised; else, and past the last scale, they are
    undefined."""
    c = tl.arange(0, S.SCALE_WIDTH_POW2)
    if S.SOURCE == 0 and S.SCALE_WIDTH > 0:
        source = scales.to(S.SCALE_POINTER, bitcast=True) + tl.cast(token, tl.int64) * S.SCALE_WIDTH
        return tl.load(source + c, mask=c < S.SCALE_WIDTH)
    else:
        return c


@triton.jit
def store_ready_scales(scales, places, me, S: tl.constexpr):
    """Store ``scales``, from :func:`ready_scales`, in the messages of rank ``me`` at ``places`` [ranks], 0 for
    none, if the row came quantised."""
    c = tl.arange(0, S.SCALE_WIDTH_POW2)
    if S.SOURCE == 0 and S.SCALE_WIDTH > 0:
        for i in tl.static_range(S.WORLD_SIZE):
            place = place_at(places, nth_rank(i, me, S))
            to = (place + S.MESSAGE_SCALES).to(S.SCALE_POINTER)
            tl.store(to + c, scales, mask=only(place != 0, c < S.SCALE_WIDTH))


@triton.jit
def store_piece(row, piece, places, me, input_scale, S: tl.constexpr):
    """Store piece ``piece`` of a row in the messages of rank ``me`` at ``places`` [ranks] (int64 addresses, 0 where it
    does not go), with the scales of its groups if it is encoded here."""
    payload, scale = in_format(row, input_scale, S)
    if S.SOURCE == 2:
        g = piece * S.GROUPS_PER_PIECE + tl.arange(0, S.GROUPS_PER_PIECE)
        b = piece * (S.GROUPS_PER_PIECE * S.GROUP_BYTES) + tl.arange(0, S.GROUPS_PER_PIECE * S.GROUP_BYTES)
        row_bytes: tl.constexpr = S.HIDDEN_SIZE * S.GROUP_BYTES // S.GROUP_SIZE
        unused: tl.constexpr = S.GROUP_SCALES - S.NUM_SCALE_GROUPS
        if unused > 0:
            scale = tl.where(g < S.NUM_SCALE_GROUPS, scale, 0).to(scale.dtype)
        for i in tl.static_range(S.WORLD_SIZE):
            place = place_at(places, nth_rank(i, me, S))
            goes = place != 0
            tl.store(tl.multiple_of(place.to(U8), 16) + b, payload, mask=only(goes, b < row_bytes))
            to = (place + S.MESSAGE_SCALES).to(S.GROUP_SCALE_POINTER)
            tl.store(to + g, scale, mask=only(goes, g < S.GROUP_SCALES))
    elif S.SOURCE == 1:
        c = piece * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
        for i in tl.static_range(S.WORLD_SIZE):
            place = place_at(places, nth_rank(i, me, S))
            tl.store(tl.multiple_of(place.to(S.ROW_POINTER), 16) + c, payload, mask=only(place != 0, c < S.HIDDEN_SIZE))
    else:
        c = piece * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
        for i in tl.static_range(S.WORLD_SIZE):
            place = place_at(places, nth_rank(i, me, S))
            tl.store(tl.multiple_of(place.to(S.WORD_POINTER), 16) + c, payload, mask=only(place != 0, c < S.ROW_WORDS))
