"""Dispatch, sender role: rows, a piece of columns at a time: read once, brought into the format once, stored to every
destination.

Destinations are taken one after the other, each with all threads of the program, from registers: a piece is quantised
once however many ranks it goes to. Whether it goes to one is in the mask of the store and not a branch: in a branch
Triton 3.6 brings the piece into the store's layout again, through shared memory and five barriers, for each rank. The
caller reads a piece before it stores the one before, so that reading hides behind storing.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only, round_to
from moelink.kernels.signals import U8


@triton.jit
def load_piece(x, token, piece, end, S: tl.constexpr):
    """Columns of piece ``piece`` of row ``token`` as they are in memory; anything unless ``token`` < ``end``."""
    if S.SOURCE == 2:
        g = piece * S.GB + tl.arange(0, S.GB)
        c = g[:, None] * S.GROUP + tl.arange(0, S.GROUP)[None, :]
        return tl.load(x + tl.cast(token, tl.int64) * S.H + c, mask=only(token < end, c < S.H), other=0.0)
    elif S.SOURCE == 1:
        c = piece * S.BLOCK + tl.arange(0, S.BLOCK)
        return tl.load(x + tl.cast(token, tl.int64) * S.H + c, mask=only(token < end, c < S.H), other=0.0)
    else:
        c = piece * S.BLOCK + tl.arange(0, S.BLOCK)
        source = x.to(S.WORD_P, bitcast=True) + tl.cast(token, tl.int64) * S.NWORDS
        return tl.load(source + c, mask=only(token < end, c < S.NWORDS), other=0)


@triton.jit
def _place(places, d):
    """Element d of ``places`` [WP], as a scalar."""
    return tl.sum(tl.where(tl.arange(0, places.shape[0]) == d, places, 0), 0)


@triton.jit
def _store_ready_scales(scales, token, places, S: tl.constexpr):
    """Scales of a row that came quantised."""
    c = tl.arange(0, S.SWP)
    ready = scales.to(S.SCALE_P, bitcast=True) + tl.cast(token, tl.int64) * S.SW
    mine = tl.load(ready + c, mask=c < S.SW, other=0)
    for d in tl.static_range(S.W):
        place = _place(places, d)
        tl.store((place + S.M_SCALES).to(S.SCALE_P) + c, mine, mask=only(place != 0, c < S.SW))


@triton.jit
def store_piece(row, piece, scales, token, places, input_scale, S: tl.constexpr):
    """Piece ``piece`` of row ``token`` to the messages at ``places`` [WP] (int64 addresses, 0 where it does not go)."""
    if S.SOURCE == 2:
        factor = tl.load(input_scale) if S.INPUT_SCALE else 1.0
        payload, scale = S.ENCODE_FN(row.to(tl.float32), factor, S.NATIVE)
        payload = tl.reshape(payload, (S.GB * S.PB,))
        scale = scale.to(S.SCALE, bitcast=True)
        g = piece * S.GB + tl.arange(0, S.GB)
        b = piece * (S.GB * S.PB) + tl.arange(0, S.GB * S.PB)
        for d in tl.static_range(S.W):
            place = _place(places, d)
            goes = place != 0
            tl.store(tl.multiple_of(place.to(U8), 16) + b, payload, mask=only(goes, b < S.NG * S.PB))
            tl.store((place + S.M_SCALES).to(S.SCALE_P) + g, scale, mask=only(goes, g < S.NG))
    elif S.SOURCE == 1:
        c = piece * S.BLOCK + tl.arange(0, S.BLOCK)
        rounded = round_to(row.to(tl.float64 if S.DTYPE == tl.float64 else tl.float32), S.DTYPE, S.NATIVE)
        for d in tl.static_range(S.W):
            place = _place(places, d)
            tl.store(tl.multiple_of(place.to(S.DTYPE_P), 16) + c, rounded, mask=only(place != 0, c < S.H))
    else:
        c = piece * S.BLOCK + tl.arange(0, S.BLOCK)
        for d in tl.static_range(S.W):
            place = _place(places, d)
            tl.store(tl.multiple_of(place.to(S.WORD_P), 16) + c, row, mask=only(place != 0, c < S.NWORDS))
        if S.SW > 0:
            if piece == 0:
                _store_ready_scales(scales, token, places, S)
