"""Dispatch: messages of a small call as words that are their own signal (``kernels.small_calls``).

Source s stores its message in slot i as row (s, i) of ``tagged_messages``: word n holds bytes [4 n, 4 n + 4) of what a
message is otherwise (``Workspace.message``); what lies between its parts is never stored and never awaited. The
receiver waits for every word of the message. It knows the source's tokens, and so the form, from the counts, which it
waits for first; whether that message exists, and where its rows go, it works out while the words are on their way.

A dispatch over an earlier routing, and a call whose tokens are cut into runs, always has the other form: only
``send_one`` stores words.

Example: 4 experts on 2 ranks, hidden size 8 in bf16, top-2; in call 3 rank 0 has one token, whose ids are [3, -1]. At
rank 1 words 0 to 3 of row (0, 0) are its columns; word 4 is the token, 0; words 8 and 9 are the local ids, 12 and 13
the positions: 00000003_00000000, then 00000003_00000001, 00000003_ffffffff, then 00000003_00000000 twice.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only
from moelink.kernels.payload import place_at, ready_scales
from moelink.kernels.routes import first_of
from moelink.kernels.signals import I64, agree, clock, patience
from moelink.kernels.small_calls import words_at
from moelink.kernels.tagged import tagged, words_of

WORDS_BLOCK = tl.constexpr(2048)
"""Most payload words that a receiver reads at a time."""


@triton.jit
def rows_at(base, goes, slot, me, S: tl.constexpr):
    """Addresses [WP] of the words of messages ``slot`` [WP] in the blocks at ``base`` [WP]; 0 unless ``goes`` [WP]."""
    return tl.where(goes, base + S.O_TAGGED + (me * S.TAGGED + slot).to(tl.int64) * (S.TW * 8), 0)


@triton.jit
def store_header_words(rows, token, expert, position, owner, w, first, call, S: tl.constexpr):
    """What is small in a token's messages, whose words are at ``rows`` [WP]: as ``message.store_headers``.

    ``expert``, ``position``, ``owner``, ``w``: [KP]; ``token`` a scalar.
    """
    r = tl.arange(0, S.WP)
    k = tl.arange(0, S.KP)
    goes = rows != 0
    words = rows.to(I64)
    tl.store(words + S.M_TOKEN // 4, tagged(call, tl.zeros([S.WP], tl.int32) + token), mask=goes)
    named = goes[:, None] & (k < S.K)[None, :]
    here = owner[None, :] == r[:, None]
    local = tl.where(here, expert[None, :] - first_of(r, first, S)[:, None], -1)
    words = words[:, None] + k[None, :]
    tl.store(words + S.M_IDS // 4, tagged(call, local), mask=named)
    nothing = tl.zeros([S.WP, S.KP], tl.int32)
    tl.store(words + S.M_POSITIONS // 4, tagged(call, nothing + position[None, :]), mask=named)
    if S.WEIGHTS:
        bits = w.to(tl.int32, bitcast=True)
        tl.store(words + S.M_WEIGHTS // 4, tagged(call, nothing + bits[None, :]), mask=named)


@triton.jit
def store_piece_words(payload, scale, piece, scales, token, rows, call, S: tl.constexpr):
    """A piece in the message's format (``payload.in_format``) to the messages whose words are at ``rows`` [WP]."""
    words = words_of(payload, call)
    n = piece * words.shape[0] + tl.arange(0, words.shape[0])
    for d in tl.static_range(S.W):
        row = place_at(rows, d)
        tl.store(tl.multiple_of(row.to(I64), 16) + n, words, mask=only(row != 0, n < S.NWORDS))
    if S.SW > 0:
        if S.SOURCE == 2:
            _store_scale_words(words_of(scale, call), piece, rows, S)
        elif piece == 0:
            _store_scale_words(words_of(ready_scales(scales, token, S), call), 0, rows, S)


@triton.jit
def _store_scale_words(words, piece, rows, S: tl.constexpr):
    n = piece * words.shape[0] + tl.arange(0, words.shape[0])
    for d in tl.static_range(S.W):
        row = place_at(rows, d)
        to = (row + S.M_SCALES * 2).to(I64)
        tl.store(to + n, words, mask=only(row != 0, n < S.SW * S.SCALE.primitive_bitwidth // 32))


@triton.jit
def payload_words(at, block, valid, S: tl.constexpr):
    """Block ``block`` of the payload words of the message whose words are at ``at``, and which of them there are."""
    n = block * WORDS_BLOCK + tl.arange(0, WORDS_BLOCK)
    mask = only(valid, n < S.NWORDS)
    return tl.load(at + n, mask=mask, other=0, volatile=True), mask


@triton.jit
def look(mine, source, slot, valid, S: tl.constexpr):
    """The words of message ``slot`` of ``source`` as they are now, and which of them there are; nothing unless
    ``valid``: what is small [4, P, KP or RP] (token, ids, positions, weights, all of them in [:, 0]), scales as they
    leave, payload's first block of columns. All of them have S.THREADS elements or more (``signals``).
    """
    at = words_at(mine, source, slot, S)
    words, there = payload_words(at, 0, valid, S)
    Q: tl.constexpr = S.KP if S.RANK_LAYOUT else S.RP
    i = tl.arange(0, 4)[:, None, None]
    p = tl.arange(0, S.THREADS // (4 * Q) if S.THREADS > 4 * Q else 1)[None, :, None]
    q = tl.arange(0, Q)[None, None, :]
    begin = tl.where(i == 0, S.M_TOKEN // 4, tl.where(i == 1, S.M_IDS // 4, S.M_POSITIONS // 4))
    begin = tl.where(i == 3, S.M_WEIGHTS // 4, begin)
    named = only(valid, (p == 0) & (i < (4 if S.WEIGHTS else 3)) & ((q < S.K) | (i == 0)))
    header = tl.load(at + (begin + tl.where(i == 0, 0, q) + p * 0), mask=named, other=0, volatile=True)
    scales = words
    scaled = there
    if S.SW > 0:
        wide: tl.constexpr = S.SWP // 4 if S.SCALES == 2 else S.SWP
        c = tl.arange(0, wide if wide > S.THREADS else S.THREADS)
        each: tl.constexpr = 4 if S.SCALES == 2 else 32 // S.SCALE.primitive_bitwidth
        scaled = only(valid, c < S.SW // (4 if S.SCALES == 2 else 1))
        scales = tl.load(
            at + S.M_SCALES // 4 + (c if S.SCALES == 2 else c // each), mask=scaled, other=0, volatile=True
        )  # fmt: skip
    return header, named, scales, scaled, words, there


@triton.jit
def _all_here(header, named, scales, scaled, words, there, call, S: tl.constexpr):
    """1 if all those words are of ``call``, else 2; all threads agree."""
    call = call & 0x7FFFFFFF
    late = tl.max((there & ((words >> 32) != call)).to(tl.int32), 0)
    small = (named & ((header >> 32) != call)).to(tl.int32)
    late += tl.max(tl.reshape(small, (small.shape[0] * small.shape[1] * small.shape[2],)), 0)
    if S.SW > 0:
        late += tl.max((scaled & ((scales >> 32) != call)).to(tl.int32), 0)
    return tl.where(agree(1 - tl.minimum(late, 1)) > 0, 1, 2)


@triton.jit
def wait_for_words(mine, source, slot, header, named, scales, scaled, words, there, call, limit, S: tl.constexpr):
    """Wait until all words that :func:`look` looks at are of ``call``; what it saw first is given. Returns (arrived,
    header, scales, words): arrived as in ``signals.wait_all``."""
    looks: tl.constexpr = 16 if S.CLOCK == "ptx" else 1
    state = _all_here(header, named, scales, scaled, words, there, call, S)
    if state == 2:
        start = clock(S.CLOCK)
        tries = state
        while state == 2:
            header, named, scales, scaled, words, there = look(mine, source, slot, state > 0, S)
            state = _all_here(header, named, scales, scaled, words, there, call, S)
            tries += 1
            if (state == 2) & (tries % looks == 0):
                state = patience((mine + S.O_POISON).to(I64), start, limit, S.CLOCK)
    return state, header, scales, words


@triton.jit
def wait_for_payload(mine, at, block, words, there, call, limit, S: tl.constexpr):
    """The same for block ``block`` of the payload alone, of the message whose words are at ``at``."""
    looks: tl.constexpr = 16 if S.CLOCK == "ptx" else 1
    late = tl.max((there & ((words >> 32) != (call & 0x7FFFFFFF))).to(tl.int32), 0)
    state = tl.where(agree(1 - late) > 0, 1, 2)
    if state == 2:
        start = clock(S.CLOCK)
        tries = state
        while state == 2:
            words, there = payload_words(at, block, late >= 0, S)
            late = tl.max((there & ((words >> 32) != (call & 0x7FFFFFFF))).to(tl.int32), 0)
            state = tl.where(agree(1 - late) > 0, 1, 2)
            tries += 1
            if (state == 2) & (tries % looks == 0):
                state = patience((mine + S.O_POISON).to(I64), start, limit, S.CLOCK)
    return state, words


@triton.jit
def parts_of(header, S: tl.constexpr):
    """Of ``header``: the token [1], local ids, positions and weights [1, KP or RP], as messages have them."""
    values = tl.sum((header & 0xFFFFFFFF).to(tl.int32), 1)
    i = tl.arange(0, 4)[:, None]
    q = tl.arange(0, header.shape[2])
    token = tl.zeros([1], tl.int32) + tl.max(tl.sum(tl.where(i == 0, values, 0), 0), 0)
    local = tl.where(q < S.K, tl.sum(tl.where(i == 1, values, 0), 0), -1)
    position = tl.sum(tl.where(i == 2, values, 0), 0)
    w = position
    if S.WEIGHTS:
        bits = tl.sum(tl.where(i == 3, values, 0), 0)
        w = tl.where(q < S.K, bits.to(tl.float32, bitcast=True), 1.0)
    return token, local[None, :], position[None, :], w[None, :]


@triton.jit
def scales_of(words, S: tl.constexpr):
    """The scales in ``words``, as ``padding.load_scales`` gives them."""
    values = (words & 0xFFFFFFFF).to(tl.int32)
    if S.SCALES == 2:
        return values
    else:
        bits: tl.constexpr = S.SCALE.primitive_bitwidth
        return (values >> (tl.arange(0, words.shape[0]) % (32 // bits) * bits)).to(S.SCALE)
