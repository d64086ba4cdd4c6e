"""Dispatch, receiver role: messages that come as words which are their own signal (``kernels.tagged_messages``).

A program has looked at its first message before it works out where rows go, so that one latency hides behind the other.

Example: the message of ``kernels.tagged_messages`` goes to row 0, where src_info becomes [0, 0, 0]: rank, token, slot.
"""

import triton
import triton.language as tl

from moelink.kernels.padding import store_scales
from moelink.kernels.place import place_headers, store_rows
from moelink.kernels.signals import note_malformed, settle
from moelink.kernels.small_calls import words_at
from moelink.kernels.tagged_messages import (
    WORDS_BLOCK,
    look,
    parts_of,
    payload_words,
    scales_of,
    wait_for_payload,
    wait_for_words,
)
from moelink.protocol import PHASE_DISPATCH

_PHASE = tl.constexpr(PHASE_DISPATCH)


@triton.jit
def place_words(
    table, record, control, mine, source, lane, lanes, count, header, named, scales, scaled, words, there, base, own,
    starts, bases, tokens_out, scales_out, src_info, weights_out, topk_ids_out, rows_of_message, message_token, me,
    rank, num_local, shared_begin, shared_end, capacity, scale_rows, call, limit, S: tl.constexpr,
):  # fmt: skip
    """The ``lane``-th of ``lanes`` shares of the ``count`` messages of ``source``: wait for them and place them.

    ``header`` to ``there``: what ``look`` saw of the first of them. ``base``, ``own`` [LP]: as in ``place_group``.
    """
    one = tl.zeros([1], tl.int32)
    note_malformed(control, source, one + count > S.TAGGED)
    ok = tl.full([], 1, tl.int32)
    for slot in range(lane, tl.minimum(count, S.TAGGED), lanes):
        if ok > 0:
            ok, header, scales, words = wait_for_words(
                mine, source, slot, header, named, scales, scaled, words, there, call, limit, S
            )  # fmt: skip
            if ok > 0:
                token, local, position, w = parts_of(header, S)
                to_rows, inner, block = place_headers(
                    control, source, one + source * S.T + slot, one == 0, token, local, position, w, base, own, starts,
                    bases, src_info, weights_out, topk_ids_out, rows_of_message, message_token, me, rank, num_local,
                    shared_begin, shared_end, capacity, S,
                )  # fmt: skip
                places = tl.max(to_rows, 0)
                if S.SW > 0:
                    store_scales(
                        scales_of(scales, S), places, tl.max(inner, 0), tl.max(block, 0), scales_out, scale_rows, S
                    )  # fmt: skip
                at = words_at(mine, source, slot, S)
                blocks: tl.constexpr = (S.NWORDS + WORDS_BLOCK - 1) // WORDS_BLOCK
                for j in tl.static_range(blocks):
                    following, follows = words, there
                    if j + 1 < blocks:
                        following, follows = payload_words(at, j + 1, ok > 0, S)
                    if ok > 0:
                        c = j * WORDS_BLOCK + tl.arange(0, WORDS_BLOCK)
                        store_rows((words & 0xFFFFFFFF).to(S.WORD_P.element_ty), c, places, tokens_out, S)
                        if j + 1 < blocks:
                            ok, words = wait_for_payload(mine, at, j + 1, following, follows, call, limit, S)
            settle(ok, table, record, control, me, source, _PHASE, call, call, call - 1, S)
            more = (ok > 0) & (slot + lanes < tl.minimum(count, S.TAGGED))
            header, named, scales, scaled, words, there = look(mine, source, slot + lanes, more, S)
    return ok
