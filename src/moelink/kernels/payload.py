"""Dispatch, sender role: one token's row, read once, brought into the format once, stored to every destination.

Destinations are taken one after the other, each with all threads of the program, from registers: what does not travel
costs nothing, and the row is quantised once however many ranks it goes to.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import round_to
from moelink.kernels.signals import U8


@triton.jit
def _pick(places, d):
    """Element d of ``places`` [WP], as a scalar."""
    return tl.sum(tl.where(tl.arange(0, places.shape[0]) == d, places, 0), 0)


@triton.jit
def store_payload(x, scales, token, places, input_scale, S: tl.constexpr):
    """Row ``token`` to the messages at ``places`` [WP] (int64 addresses, 0 where the token does not go)."""
    if S.SOURCE == 0:
        source = x.to(S.WORD_P, bitcast=True) + tl.cast(token, tl.int64) * S.NWORDS
        for c0 in tl.static_range(0, S.NWORDS, S.BLOCK):
            c = c0 + tl.arange(0, S.BLOCK)
            row = tl.load(source + c, mask=c < S.NWORDS, other=0)
            for d in tl.static_range(S.W):
                place = _pick(places, d)
                if place != 0:
                    to = tl.multiple_of(place.to(S.WORD_P), 16)
                    tl.store(to + c, row, mask=c < S.NWORDS)
        if S.SW > 0:
            c = tl.arange(0, S.SWP)
            ready = scales.to(S.SCALE_P, bitcast=True) + tl.cast(token, tl.int64) * S.SW
            row = tl.load(ready + c, mask=c < S.SW, other=0)
            for d in tl.static_range(S.W):
                place = _pick(places, d)
                if place != 0:
                    tl.store((place + S.M_SCALES).to(S.SCALE_P) + c, row, mask=c < S.SW)
    elif S.SOURCE == 1:
        for c0 in tl.static_range(0, S.H, S.BLOCK):
            c = c0 + tl.arange(0, S.BLOCK)
            wide = tl.load(x + tl.cast(token, tl.int64) * S.H + c, mask=c < S.H, other=0.0)
            row = round_to(wide.to(tl.float64 if S.DTYPE == tl.float64 else tl.float32), S.DTYPE, S.NATIVE)
            for d in tl.static_range(S.W):
                place = _pick(places, d)
                if place != 0:
                    to = tl.multiple_of(place.to(S.DTYPE_P), 16)
                    tl.store(to + c, row, mask=c < S.H)
    else:
        factor = tl.load(input_scale) if S.INPUT_SCALE else 1.0
        for g0 in tl.static_range(0, S.NG, S.GB):
            g = g0 + tl.arange(0, S.GB)
            c = g[:, None] * S.GROUP + tl.arange(0, S.GROUP)[None, :]
            wide = tl.load(x + tl.cast(token, tl.int64) * S.H + c, mask=c < S.H, other=0.0).to(tl.float32)
            payload, scale = S.ENCODE_FN(wide, factor, S.NATIVE)
            row = tl.reshape(payload, (S.GB * S.PB,))
            scale = scale.to(S.SCALE, bitcast=True)
            b = g0 * S.PB + tl.arange(0, S.GB * S.PB)
            for d in tl.static_range(S.W):
                place = _pick(places, d)
                if place != 0:
                    to = tl.multiple_of(place.to(U8), 16)
                    tl.store(to + b, row, mask=b < S.NG * S.PB)
                    tl.store((place + S.M_SCALES).to(S.SCALE_P) + g, scale, mask=g < S.NG)
