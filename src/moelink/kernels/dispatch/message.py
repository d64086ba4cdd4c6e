"""Dispatch, sender role: a message's place at each rank, what is small in it, and how it gets to other nodes.

What is large in it, the row, is in ``kernels.dispatch.message``.

Example: token 5 goes to ranks 0 and 2 of 3, in slots 4 and 0 there: its places are the addresses of message (me, 4) of
rank 0, 0, and of message (me, 0) of rank 2; local ids there are [1, -1] and [-1, 0] if its experts are theirs.

Dispatch, sender role: rows, a piece of columns at a time: read once, brought into the format once, stored to every
destination.

Destinations are taken one after the other, each with all threads of the program, from registers: a piece is quantised
once however many ranks it goes to. Whether it goes to one is in the mask of the store and not a branch: in a branch
Triton 3.6 brings the piece into the store's layout again, through shared memory and five barriers, for each rank. The
caller reads a piece before it stores the one before, so that reading hides behind storing. For that nothing may touch
what was read before it is used: what masked loads leave out is left undefined (a value of its own would be moved in,
behind the load), and elements of 16 bits are read as words of two, and taken apart where they are encoded.

Example: bf16 columns 1.0, 2.0 (bits 0x3f80, 0x4000) are read as the word 0x40003f80.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.route import first_of
from moelink.kernels.numeric import only, round_to
from moelink.kernels.sync.internode import direct_or_staged, is_intra_node, put, staged_at
from moelink.kernels.sync.signals import I32, I64, U8, fence


@triton.jit
def places_of(base, own, slot, me, mine, S: tl.constexpr):
    """Addresses [N, ranks] of the messages in ``slot`` [N, ranks] of the ranks whose blocks are at ``base`` [ranks]; 0
    unless ``own``."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    places = base[None, :] + S.OFFSET_MESSAGES + (me * S.MAX_TOKENS + slot).to(tl.int64) * S.MESSAGE_BYTES
    places = direct_or_staged(places, mine, r, me, S.OFFSET_STAGED_MESSAGES, S.MAX_TOKENS, slot, S.MESSAGE_BYTES, S)
    return tl.where(own, places, 0)


@triton.jit
def flags_of(base, slot, me, S: tl.constexpr):
    """Words [N, ranks] that say that those messages are stored."""
    return (base + S.OFFSET_MESSAGE_FLAG).to(I64)[None, :] + (me * S.MAX_TOKENS + slot)


@triton.jit
def load_weights(weights, token, num_tokens, S: tl.constexpr):
    """Router weights [N, slots] of tokens ``token`` [N], anything behind the last; zeros where they do not travel."""
    k = tl.arange(0, S.TOPK_POW2)
    if S.HAS_WEIGHTS:
        inside = (token < num_tokens)[:, None] & (k < S.TOPK)[None, :]
        return tl.load(weights + token[:, None] * S.TOPK + k[None, :], mask=inside)
    else:
        return tl.zeros([token.shape[0], S.TOPK_POW2], tl.float32)


@triton.jit
def store_headers(ids_of, position, owner, token, places, w, first, N: tl.constexpr, S: tl.constexpr):
    """What is small in a message: token, local ids, positions and weights, of a block of tokens at once.

    ``ids_of``, ``position``, ``owner``, ``w``: [N, slots]; ``token`` [N]; ``places`` [N, ranks] addresses, 0 for none.
    CACHED: no positions, and local ids only where they are an output (layout "rank"), as receivers know the rows.
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    k = tl.arange(0, S.TOPK_POW2)
    goes = places != 0
    tl.store((places + S.MESSAGE_TOKEN).to(I32), tl.broadcast_to(token[:, None], (N, S.WORLD_SIZE_POW2)), mask=goes)
    named = goes[:, :, None] & (k < S.TOPK)[None, None, :]
    shape: tl.constexpr = (N, S.WORLD_SIZE_POW2, S.TOPK_POW2)
    if S.RANK_LAYOUT or not S.CACHED_ROUTING:
        local = tl.where(
            owner[:, None, :] == r[None, :, None], ids_of[:, None, :] - first_of(r, first, S)[None, :, None], -1
        )
        tl.store((places + S.MESSAGE_IDS).to(I32)[:, :, None] + k[None, None, :], local, mask=named)
    if not S.CACHED_ROUTING:
        tl.store(
            (places + S.MESSAGE_POSITIONS).to(I32)[:, :, None] + k[None, None, :],
            tl.broadcast_to(position[:, None, :], shape),
            mask=named,
        )
    if S.HAS_WEIGHTS:
        to = (places + S.MESSAGE_WEIGHTS).to(S.WEIGHT_POINTER)
        tl.store(to[:, :, None] + k[None, None, :], tl.broadcast_to(w[:, None, :], shape), mask=named)


@triton.jit
def put_messages(ctx, mine, own, slot, N: tl.constexpr, S: tl.constexpr):
    """Put messages at the ranks of other nodes: of each of N tokens, at those where ``own`` [N, ranks], in ``slot``
    [N, ranks]."""
    fence(ctx.control)
    t = tl.arange(0, N)[:, None]
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    for i in range(N * S.WORLD_SIZE):
        d = i % S.WORLD_SIZE
        one = (t == i // S.WORLD_SIZE) & (r == d)
        goes = tl.max(tl.max((one & own).to(tl.int32), 1), 0)
        if (goes > 0) & (is_intra_node(d, ctx.me, S) == 0):
            place = tl.max(tl.max(tl.where(one, slot, 0), 1), 0)
            there = tl.cast(ctx.me * S.MAX_TOKENS + place, tl.int64)
            put(
                ctx.table,
                mine + S.OFFSET_MESSAGES + there * S.MESSAGE_BYTES,
                staged_at(mine, d, ctx.me, S.OFFSET_STAGED_MESSAGES, S.MAX_TOKENS, place, S.MESSAGE_BYTES, S),
                S.MESSAGE_BYTES,
                mine + S.OFFSET_MESSAGE_FLAG + there * 8,
                ctx.call,
                d,
                S,
            )


@triton.jit
def load_piece(x, token, piece, end, S: tl.constexpr):
    """Columns of piece ``piece`` of row ``token`` as in memory; from ``end`` on, and behind the row, anything."""
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
    """Columns [GB, GROUP], fp32, of a piece that is to be encoded, as :func:`load_piece` gives it."""
    if S.INPUT_DTYPE.primitive_bitwidth == 16:
        if S.INPUT_DTYPE == tl.bfloat16:  # the upper half of an fp32
            even = (row << 16).to(tl.float32, bitcast=True)
            odd = (row & -65536).to(tl.float32, bitcast=True)
        else:
            even = row.to(tl.int16).to(S.INPUT_DTYPE, bitcast=True).to(tl.float32)
            odd = (row >> 16).to(tl.int16).to(S.INPUT_DTYPE, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(even, odd), (S.GROUPS_PER_PIECE, S.GROUP_SIZE))
    else:
        return row.to(tl.float32)


@triton.jit
def in_format(row, input_scale, S: tl.constexpr):
    """A piece, as :func:`load_piece` gives it, in the message's format, flat; and the scales of its groups, as integers
    of their size (whatever comes ready, or has none: the piece again)."""
    if S.SOURCE == 2:
        factor = tl.load(input_scale) if S.HAS_INPUT_SCALE else 1.0
        payload, scale = S.ENCODE_FN(columns_of(row, S), factor, S.NATIVE_CASTS)
        return tl.reshape(payload, (S.GROUPS_PER_PIECE * S.GROUP_BYTES,)), scale.to(S.SCALE_DTYPE, bitcast=True)
    elif S.SOURCE == 1:
        rounded = round_to(row.to(tl.float64 if S.ROW_DTYPE == tl.float64 else tl.float32), S.ROW_DTYPE, S.NATIVE_CASTS)
        return rounded, rounded
    else:
        return row, row


@triton.jit
def place_at(places, d):
    """Element d of ``places`` [ranks], as a scalar."""
    return tl.sum(tl.where(tl.arange(0, places.shape[0]) == d, places, 0), 0)


@triton.jit
def ready_scales(scales, token, S: tl.constexpr):
    """Scales [scales] of a row that came quantised."""
    c = tl.arange(0, S.SCALE_WIDTH_POW2)
    return tl.load(
        scales.to(S.SCALE_POINTER, bitcast=True) + tl.cast(token, tl.int64) * S.SCALE_WIDTH + c,
        mask=c < S.SCALE_WIDTH,
        other=0,
    )


@triton.jit
def store_piece(row, piece, scales, token, places, input_scale, S: tl.constexpr):
    """Piece ``piece`` of row ``token`` to the messages at ``places`` [ranks] (int64 addresses, 0 where it does not
    go)."""
    payload, scale = in_format(row, input_scale, S)
    if S.SOURCE == 2:
        g = piece * S.GROUPS_PER_PIECE + tl.arange(0, S.GROUPS_PER_PIECE)
        b = piece * (S.GROUPS_PER_PIECE * S.GROUP_BYTES) + tl.arange(0, S.GROUPS_PER_PIECE * S.GROUP_BYTES)
        for d in tl.static_range(S.WORLD_SIZE):
            place = place_at(places, d)
            goes = place != 0
            tl.store(
                tl.multiple_of(place.to(U8), 16) + b, payload, mask=only(goes, b < S.NUM_SCALE_GROUPS * S.GROUP_BYTES)
            )
            tl.store((place + S.MESSAGE_SCALES).to(S.SCALE_POINTER) + g, scale, mask=only(goes, g < S.NUM_SCALE_GROUPS))
    elif S.SOURCE == 1:
        c = piece * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
        for d in tl.static_range(S.WORLD_SIZE):
            place = place_at(places, d)
            tl.store(tl.multiple_of(place.to(S.ROW_POINTER), 16) + c, payload, mask=only(place != 0, c < S.HIDDEN_SIZE))
    else:
        c = piece * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
        for d in tl.static_range(S.WORLD_SIZE):
            place = place_at(places, d)
            tl.store(tl.multiple_of(place.to(S.WORD_POINTER), 16) + c, payload, mask=only(place != 0, c < S.ROW_WORDS))
        if S.SCALE_WIDTH > 0:
            if piece == 0:
                ready = ready_scales(scales, token, S)
                g = tl.arange(0, S.SCALE_WIDTH_POW2)
                for d in tl.static_range(S.WORLD_SIZE):
                    place = place_at(places, d)
                    tl.store(
                        (place + S.MESSAGE_SCALES).to(S.SCALE_POINTER) + g,
                        ready,
                        mask=only(place != 0, g < S.SCALE_WIDTH),
                    )
