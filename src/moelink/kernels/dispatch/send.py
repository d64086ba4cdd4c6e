"""Dispatch, sender role: what each program of the sending half does.

One program counts (``kernels.dispatch.counts``), the others move rows. None of them waits for anything of this call
from another rank: they wait only until every destination has *drained the previous call* (``kernels.sync.credit``),
after which its staging may be overwritten, and for lower programs. That is why any sequence of calls is safe with one
buffer.

Tokens are cut in one of two ways. Few of them: one token a program (``kernels.dispatch.send_one``), or several programs
a token, each of which serves every ``split``-th rank. Many: ``tokens_per_program`` consecutive tokens each
(``kernels.dispatch.send_run``). Where each counts what is before its tokens the counting program is the first one;
where they share what they counted it is the last one, as a program waits for lower ones only.

Who writes what, at destination d, in row ``me`` of each region:

* a row program, for every token that goes to d: the message in the token's slot, then ``message_flag[slot] = call``,
  a few tokens at a time.
* the counting program: if counts were shared ``firsts`` and a fence; then ``counts``, words that are their own signal
  (``kernels.sync.ll_words``): status, totals, rows per local expert of d.

``message_flag`` is a release after the stores it speaks for (``signals.publish``). All programs together
count the call as sent; a later call of this rank starts after it in stream order.

A dispatch over an earlier one's routing counts nothing: ``kernels.dispatch.send_cached``.

Order without a sort: a message's slot at d is the number of earlier tokens of this rank with any id on d, and a pair's
*position* the number of earlier pairs (token, then slot) of this rank with the same expert.

Example: 4 experts on 2 ranks, topk 2, rank 0's ids [[0, 3], [1, 0], [-1, 2]]. Destination 0 gets tokens 0, 1 in slots
0, 1 with local ids [0, -1], [1, 0] and positions [0, 0], [0, 1] (token 1's expert 0 is the second pair of expert 0);
destination 1 gets tokens 0, 2 in slots 0, 1 with local ids [-1, 1], [-1, 0]. Counts: [2, 1] for rank 0, [1, 1] for
rank 1.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.counts import send_counts
from moelink.kernels.dispatch.send_cached import send_again
from moelink.kernels.dispatch.send_one import send_one
from moelink.kernels.dispatch.send_run import send_run
from moelink.kernels.sync.credit import glance, tell_drained
from moelink.kernels.sync.signals import calls_made, count_arrival
from moelink.memory.protocol import DISPATCH_SENT, PHASE_DISPATCH

_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_SENT)


@triton.jit
def send(
    program, num_programs, table, record, control, x, scales, input_scale, ids, weights, slot_of, sent, routed, me,
    first, num_local, num_tokens, tokens_per_program, split, shared_begin, shared_end, status, limit, S: tl.constexpr,
):  # fmt: skip
    """Program ``program`` of the sender role."""
    if S.CACHED:
        send_again(
            table, record, control, x, scales, input_scale, ids, weights, slot_of, sent, routed, me, first, num_local,
            num_tokens, tokens_per_program, split, program, num_programs, limit, S,
        )  # fmt: skip
    else:
        _send_anew(
            table, record, control, x, scales, input_scale, ids, weights, slot_of, sent, me, first, num_local,
            num_tokens, tokens_per_program, split, shared_begin, shared_end, status, program, num_programs, limit, S,
        )  # fmt: skip


@triton.jit
def _send_anew(
    table, record, control, x, scales, input_scale, ids, weights, slot_of, sent, me, first, num_local, num_tokens,
    tokens_per_program, split, shared_begin, shared_end, status, program, num_programs, limit, S: tl.constexpr,
):  # fmt: skip
    call = calls_made(control, _ROLE) + 1
    drained = glance(control, _PHASE, call, S)
    few = tokens_per_program <= 1
    # Each program counts for itself; then the counting program is the first one, as it waits for nobody.
    alone = few | (num_tokens <= S.ALONE)
    counting = tl.where(alone, 0, num_programs - 1)
    if program == 0:
        tell_drained(table, control, me, S)
    if program == counting:
        ok = send_counts(
            table, record, control, ids, sent, me, first, num_local, num_tokens, alone, shared_begin, shared_end,
            status, num_programs - 1, drained, call, limit, S,
        )  # fmt: skip
    elif few:
        ok = send_one(
            table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local, num_tokens,
            split, shared_begin, shared_end, program - 1, drained, call, limit, S,
        )  # fmt: skip
    else:
        ok = send_run(
            table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local, num_tokens,
            tokens_per_program, shared_begin, shared_end, program - alone.to(tl.int32), drained, call, limit, S,
        )  # fmt: skip
    if ok > 0:
        count_arrival(control, _ROLE, program, num_programs, "relaxed")
