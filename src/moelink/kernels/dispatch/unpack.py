"""Dispatch, receiver role: messages that have arrived, copied to their rows.

Which row that is follows from the counts and a position that came with the message; CACHED: it is the one that the call
whose routing this is noted in ``rows_of_message``, and only the token must be the same.

Example: 2 local experts, whose groups begin at rows 0 and 4, and rank 1's rows in them at 2 and 4. Its message in slot
0 names expert 0, position 0: row 2, which is noted; in a later call over this routing the message in slot 0 goes there.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.padding import load_scales, note_messages, store_scales
from moelink.kernels.numeric import only
from moelink.kernels.sync.signals import I32, note_malformed
from moelink.memory.protocol import ROW_ABSENT, ROW_DROPPED

_ABSENT = tl.constexpr(ROW_ABSENT)
_DROPPED = tl.constexpr(ROW_DROPPED)


@triton.jit
def _row(values, g):
    """Row ``g`` of ``values`` [GATHER, N], none of them below -1."""
    return tl.max(tl.where((tl.arange(0, values.shape[0]) == g)[:, None], values, -1), 0)


@triton.jit
def _element(values, q):
    """Element ``q`` of ``values`` [N], none of them below -1, as a scalar."""
    return tl.max(tl.where(tl.arange(0, values.shape[0]) == q, values, -1), 0)


@triton.jit
def _load_words(mine, at, block, S: tl.constexpr):
    """Words of block ``block`` of the message numbered ``at``; anything for -1, and behind the row's end."""
    c = block * S.BLOCK + tl.arange(0, S.BLOCK)
    message = mine + S.O_MESSAGES + at.to(tl.int64) * S.MESSAGE
    return tl.load(tl.multiple_of(message.to(S.WORD_P), 16) + c, mask=only(at >= 0, c < S.NWORDS))


@triton.jit
def _noted_rows(places, mask, sizes, starts, bases, capacity, S: tl.constexpr):
    """Rows noted at ``places`` [N, RP], which of them are within ``capacity``, and for tiles of scales how far
    they are into their group and the group's first block.

    The group is the last one that starts at or before the row. What was never noted (a peer's nonsense, in the earlier
    call) is any number: nothing outside of ``capacity``, and of the group, is kept.

    Example: groups of 3 and 1 rows that start at 0 and 4: row 4 is number 0 of group 1.
    """
    row = tl.load(places, mask=mask, other=_ABSENT)
    keep = (row >= 0) & (row < capacity)
    inner = row
    block = row
    if S.SCALES == 2:
        group = tl.sum((starts[None, None, :] <= row[:, :, None]).to(tl.int32), 2) - 1
        group = tl.reshape(tl.maximum(group, 0), (places.shape[0] * S.RP,))
        inner = row - tl.reshape(tl.gather(starts, group, 0), row.shape)
        block = tl.reshape(tl.gather(bases, group, 0), row.shape)
        keep = keep & (inner >= 0) & (inner < tl.reshape(tl.gather(sizes, group, 0), row.shape))
    return row, keep, inner, block


@triton.jit
def place_headers(
    control, source, at, valid, token, local, position, w, base, sizes, starts, bases, src_info, weights_out,
    topk_ids_out, rows_of_message, message_token, me, rank, num_local, shared_begin, shared_end, capacity,
    S: tl.constexpr,
):  # fmt: skip
    """Where the rows of messages go that are numbered ``at`` [N], those that are ``valid``; what is small in them goes
    there, and is noted for combine.

    ``token`` [N]; ``local``, ``w`` [N, KP or RP] and ``position`` [N, RP] are local ids (-1: none), router weights and
    positions as they came. ``base``, ``sizes``: as in :func:`place_group`. Returns the rows [N, RP], -1 for none, and
    for tiles of scales how far each is into its group and the group's first block.
    """
    label = rank if S.ALLREDUCE else source
    q = tl.arange(0, S.RP)
    every = valid[:, None] & (q >= 0)[None, :]
    if S.CACHED:
        strange = token != tl.load(message_token + at, mask=valid, other=0)
    else:
        strange = (token < 0) | (token >= S.T)
    shape: tl.constexpr = (valid.shape[0], S.RP)
    if S.RANK_LAYOUT:
        k = tl.arange(0, S.KP)
        if S.CACHED:
            start = tl.load(rows_of_message + at, mask=valid & (strange == 0), other=_ABSENT)
            fits = (start >= 0) & (start < capacity)
            row = start[:, None] + q[None, :]
            keep = every & fits[:, None]
        else:
            start = base + at - source * S.T
            row = start[:, None] + q[None, :]
            keep = every & (row < capacity)
            tl.store(rows_of_message + at[:, None] + q[None, :], tl.where(keep, row, _DROPPED), mask=every)
        info = src_info + row * 3
        tl.store(info + 2, tl.zeros(shape, tl.int32) - 1, mask=keep)
        named = valid[:, None] & (k < S.K)[None, :]
        known = (local >= -1) & (local < num_local)
        note_malformed(control, source, named & (strange[:, None] | (known == 0)))
        local = tl.where(known, local, -1)
        here = named & (fits if S.CACHED else start < capacity)[:, None]
        cell = start.to(tl.int64)[:, None] * S.K + k[None, :]
        tl.store(topk_ids_out + cell, local, mask=here)
        if S.WEIGHTS:
            tl.store(weights_out + cell, tl.where(local >= 0, w, 0.0), mask=here)
        inner = row
        block = row
    else:
        mask = valid[:, None] & (q < S.K)[None, :]
        if S.CACHED:
            note_malformed(control, source, valid & strange)
            valid = valid & (strange == 0)
            row, keep, inner, block = _noted_rows(
                rows_of_message + at.to(tl.int64)[:, None] * S.K + q[None, :], mask & valid[:, None], sizes, starts,
                bases, capacity, S,
            )  # fmt: skip
        else:
            named = (local >= 0) & (local < num_local)
            e = tl.reshape(tl.where(named, local, 0), (valid.shape[0] * S.RP,))
            row = tl.reshape(tl.gather(base, e, 0), shape) + position
            placed = named & (position >= 0) & (position < tl.reshape(tl.gather(sizes, e, 0), shape))
            known = placed | (local == -1)
            note_malformed(control, source, mask & (strange[:, None] | (known == 0)))
            keep = placed & (row < capacity)
            tl.store(
                rows_of_message + at.to(tl.int64)[:, None] * S.K + q[None, :],
                tl.where(keep, row, tl.where(named, _DROPPED, _ABSENT)), mask=mask,
            )  # fmt: skip
            inner = row - tl.reshape(tl.gather(starts, e, 0), shape)
            block = tl.reshape(tl.gather(bases, e, 0), shape)
        if S.SHARED:
            own = valid & (token >= shared_begin) & (token < shared_end)
            own = own[:, None] & (q == S.K)[None, :] & (tl.zeros(shape, tl.int32) + source == me)
            number_own = tl.broadcast_to((token - shared_begin)[:, None], shape)
            row = tl.where(own, number_own, row)
            keep = keep | (own & (row < capacity))
            inner = tl.where(own, row, inner)
            block = tl.where(own, 0, block)
        info = src_info + row * 3
        tl.store(info + 2, tl.broadcast_to(tl.where(q < S.K, q, -1)[None, :], shape), mask=keep)
        if S.WEIGHTS:
            tl.store(weights_out + row, w, mask=keep)
    tl.store(info, tl.zeros(shape, tl.int32) + label, mask=keep)
    tl.store(info + 1, tl.broadcast_to(token[:, None], shape), mask=keep)
    if not S.CACHED:
        tl.store(message_token + at, token, mask=valid)
    return tl.where(keep, row, -1), inner, block


@triton.jit
def store_rows(words, c, places, tokens_out, S: tl.constexpr):
    """Words ``c`` of a row, which are ``words``, to the rows ``places`` [RP], -1 for none.

    They are the first to leave the second-level cache: most of them are driven out by experts' weights before they are
    read, and messages are read from there.
    """
    present = (places >= 0).to(tl.int32)
    nth = tl.cumsum(present, 0) - present
    for n in range(0, tl.sum(present, 0)):  # of a message's rows few are here: its other experts are elsewhere
        place = tl.max(tl.where((present > 0) & (nth == n), places, 0), 0)
        to = tokens_out.to(S.WORD_P, bitcast=True) + place.to(tl.int64) * S.NWORDS
        tl.store(to + c, words, mask=c < S.NWORDS, cache_modifier=".cs")


@triton.jit
def place_group(
    control, mine, source, slot, valid, base, sizes, starts, bases, tokens_out, scales_out, src_info, weights_out,
    topk_ids_out, rows_of_message, message_token, me, rank, num_local, shared_begin, shared_end, capacity, scale_rows,
    S: tl.constexpr,
):  # fmt: skip
    """Copy messages ``slot`` [GATHER] of ``source``, those that are ``valid``, to their rows, and note for combine
    where they are.

    ``base`` [LOOK]: first row of this source in each expert's group; ``sizes`` [LOOK]: its rows there. Layout "rank":
    ``base`` is the first row of this source. CACHED: ``base`` is not used, ``sizes`` are all sources' rows, and what is
    noted is read. What is small is read for all of them at once, and each one's payload and scales while the one before
    is stored: what loads leave out stays undefined, as anything that was moved in would wait for them.
    """
    at = source * S.T + slot
    number = tl.where(valid, at, -1)
    words = _load_words(mine, _element(number, 0), 0, S)
    scales = number
    stores_scales: tl.constexpr = S.SW > 0 and not S.LATER
    if stores_scales:
        scales = load_scales(mine, _element(number, 0), S)
    message = mine + S.O_MESSAGES + at.to(tl.int64) * S.MESSAGE
    token = tl.load((message + S.M_TOKEN).to(I32), mask=valid)
    q = tl.arange(0, S.KP if S.RANK_LAYOUT else S.RP)
    mask = valid[:, None] & (q < S.K)[None, :]
    local = tl.zeros(mask.shape, tl.int32)
    position = local
    w = local
    if S.RANK_LAYOUT or not S.CACHED:
        local = tl.load((message + S.M_IDS).to(I32)[:, None] + q[None, :], mask=mask)
    if not (S.RANK_LAYOUT or S.CACHED):
        position = tl.load((message + S.M_POSITIONS).to(I32)[:, None] + q[None, :], mask=mask)
    if S.WEIGHTS:  # the fused shared expert's row counts whole
        w = tl.where(mask, tl.load((message + S.M_WEIGHTS).to(S.WEIGHT_P)[:, None] + q[None, :], mask=mask), 1.0)
    if not (S.RANK_LAYOUT or S.CACHED):
        local = tl.where(mask, local, -1)
    to_rows, inner, block = place_headers(
        control, source, at, valid, token, local, position, w, base, sizes, starts, bases, src_info, weights_out,
        topk_ids_out, rows_of_message, message_token, me, rank, num_local, shared_begin, shared_end, capacity, S,
    )  # fmt: skip
    if S.LATER:
        note_messages(scales_out, to_rows, at, S)
    blocks: tl.constexpr = (S.NWORDS + S.BLOCK - 1) // S.BLOCK
    for j in tl.static_range(S.GATHER * blocks):
        following = words
        following_scales = scales
        if j + 1 < S.GATHER * blocks:
            behind = _element(number, (j + 1) // blocks)
            following = _load_words(mine, behind, (j + 1) % blocks, S)
            if stores_scales and (j + 1) % blocks == 0:
                following_scales = load_scales(mine, behind, S)
        c = j % blocks * S.BLOCK + tl.arange(0, S.BLOCK)
        places = _row(to_rows, j // blocks)
        store_rows(words, c, places, tokens_out, S)
        if stores_scales and j % blocks == 0:
            store_scales(
                scales, places, _row(inner, j // blocks), _row(block, j // blocks), scales_out, scale_rows, S
            )  # fmt: skip
        words = following
        scales = following_scales
