"""Dispatch, sender role: rows, a piece of columns at a time: read once, brought into the format once, stored to every
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

from moelink.kernels.numeric import only, round_to
from moelink.kernels.sync.signals import I32, U8


@triton.jit
def load_piece(x, token, piece, end, S: tl.constexpr):
    """Columns of piece ``piece`` of row ``token`` as in memory; from ``end`` on, and behind the row, anything."""
    if S.SOURCE == 2:
        g = piece * S.GB + tl.arange(0, S.GB)
        if S.INPUT.primitive_bitwidth == 16:
            c = g[:, None] * (S.GROUP // 2) + tl.arange(0, S.GROUP // 2)[None, :]
            source = x.to(I32, bitcast=True) + tl.cast(token, tl.int64) * (S.H // 2)
            return tl.load(source + c, mask=only(token < end, c < S.H // 2), eviction_policy=S.ONCE)
        else:
            c = g[:, None] * S.GROUP + tl.arange(0, S.GROUP)[None, :]
            source = x + tl.cast(token, tl.int64) * S.H
            return tl.load(source + c, mask=only(token < end, c < S.H), eviction_policy=S.ONCE)
    elif S.SOURCE == 1:
        c = piece * S.BLOCK + tl.arange(0, S.BLOCK)
        source = x + tl.cast(token, tl.int64) * S.H
        return tl.load(source + c, mask=only(token < end, c < S.H), eviction_policy=S.ONCE)
    else:
        c = piece * S.BLOCK + tl.arange(0, S.BLOCK)
        source = x.to(S.WORD_P, bitcast=True) + tl.cast(token, tl.int64) * S.NWORDS
        return tl.load(source + c, mask=only(token < end, c < S.NWORDS), eviction_policy=S.ONCE)


@triton.jit
def columns_of(row, S: tl.constexpr):
    """Columns [GB, GROUP], fp32, of a piece that is to be encoded, as :func:`load_piece` gives it."""
    if S.INPUT.primitive_bitwidth == 16:
        if S.INPUT == tl.bfloat16:  # the upper half of an fp32
            even = (row << 16).to(tl.float32, bitcast=True)
            odd = (row & -65536).to(tl.float32, bitcast=True)
        else:
            even = row.to(tl.int16).to(S.INPUT, bitcast=True).to(tl.float32)
            odd = (row >> 16).to(tl.int16).to(S.INPUT, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(even, odd), (S.GB, S.GROUP))
    else:
        return row.to(tl.float32)


@triton.jit
def in_format(row, input_scale, S: tl.constexpr):
    """A piece, as :func:`load_piece` gives it, in the message's format, flat; and the scales of its groups, as integers
    of their size (whatever comes ready, or has none: the piece again)."""
    if S.SOURCE == 2:
        factor = tl.load(input_scale) if S.INPUT_SCALE else 1.0
        payload, scale = S.ENCODE_FN(columns_of(row, S), factor, S.NATIVE)
        return tl.reshape(payload, (S.GB * S.PB,)), scale.to(S.SCALE, bitcast=True)
    elif S.SOURCE == 1:
        rounded = round_to(row.to(tl.float64 if S.DTYPE == tl.float64 else tl.float32), S.DTYPE, S.NATIVE)
        return rounded, rounded
    else:
        return row, row


@triton.jit
def place_at(places, d):
    """Element d of ``places`` [WP], as a scalar."""
    return tl.sum(tl.where(tl.arange(0, places.shape[0]) == d, places, 0), 0)


@triton.jit
def ready_scales(scales, token, S: tl.constexpr):
    """Scales [SWP] of a row that came quantised."""
    c = tl.arange(0, S.SWP)
    return tl.load(scales.to(S.SCALE_P, bitcast=True) + tl.cast(token, tl.int64) * S.SW + c, mask=c < S.SW, other=0)


@triton.jit
def store_piece(row, piece, scales, token, places, input_scale, S: tl.constexpr):
    """Piece ``piece`` of row ``token`` to the messages at ``places`` [WP] (int64 addresses, 0 where it does not go)."""
    payload, scale = in_format(row, input_scale, S)
    if S.SOURCE == 2:
        g = piece * S.GB + tl.arange(0, S.GB)
        b = piece * (S.GB * S.PB) + tl.arange(0, S.GB * S.PB)
        for d in tl.static_range(S.W):
            place = place_at(places, d)
            goes = place != 0
            tl.store(tl.multiple_of(place.to(U8), 16) + b, payload, mask=only(goes, b < S.NG * S.PB))
            tl.store((place + S.M_SCALES).to(S.SCALE_P) + g, scale, mask=only(goes, g < S.NG))
    elif S.SOURCE == 1:
        c = piece * S.BLOCK + tl.arange(0, S.BLOCK)
        for d in tl.static_range(S.W):
            place = place_at(places, d)
            tl.store(tl.multiple_of(place.to(S.DTYPE_P), 16) + c, payload, mask=only(place != 0, c < S.H))
    else:
        c = piece * S.BLOCK + tl.arange(0, S.BLOCK)
        for d in tl.static_range(S.W):
            place = place_at(places, d)
            tl.store(tl.multiple_of(place.to(S.WORD_P), 16) + c, payload, mask=only(place != 0, c < S.NWORDS))
        if S.SW > 0:
            if piece == 0:
                ready = ready_scales(scales, token, S)
                g = tl.arange(0, S.SWP)
                for d in tl.static_range(S.W):
                    place = place_at(places, d)
                    tl.store((place + S.M_SCALES).to(S.SCALE_P) + g, ready, mask=only(place != 0, g < S.SW))
