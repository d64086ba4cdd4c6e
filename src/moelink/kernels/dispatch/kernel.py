"""Dispatch as one launch (``ep_fused_dispatch_kernel``) or two (``..._async_kernel``, ``..._wait_kernel``).

Roles go by program id: the low ids send (``kernels.dispatch.send``), the high ids receive
(``kernels.dispatch.receive``). A program waits only for other ranks' signals and for lower ids. Senders wait for
nothing that other ranks *receive* in this call, only for what their senders tell first thing, so they finish on every
rank, whatever order programs of a launch run in as long as lower ids start first: so the same kernel runs on a GPU,
where ids start in order as multiprocessors become free, and in the interpreter, where they run one after the other.

A dispatch over the routing of an earlier one (``S.CACHED``) is the same launches with other roles: ``sent``, ``routed``
(its ``received``) and ``routed_counts`` (its ``counts_out``), and what else it noted, say what would be counted
(``kernels.dispatch.send_cached``). Otherwise ``sent`` is filled in, and the two are not read.

Where another launch lays scales out (``S.LATER``, ``kernels.dispatch.scales``), ``scales_out`` gets the number of the
message that each row came with.

Why the next call cannot overtake: a sender's first store of call n + 1 comes after every destination has told that it
drained call n, which it does in its next launch, so after all programs of its receiver had read call n
(``kernels.sync.credit``). Why it needs no host: call numbers are counted in device memory by the programs of each role,
and a launch's arguments hold nothing that changes between two replays of a graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moelink.kernels.dispatch.receive import receive
from moelink.kernels.dispatch.send import send
from moelink.kernels.launch.sm_limit import take_turns
from moelink.memory.protocol import DISPATCH_RECEIVED, DISPATCH_SENT

_SENT, _RECEIVED = tl.constexpr(DISPATCH_SENT), tl.constexpr(DISPATCH_RECEIVED)
_CHANGING = (
    "me", "rank", "first", "num_local", "num_groups", "num_tokens", "tokens_per_program", "split",
    "shared_begin", "shared_end", "capacity", "scale_rows", "counts_stride", "status", "senders", "limit", "programs",
)  # fmt: skip


@triton.jit
def _both(program, programs, sending, receiving, senders, S: tl.constexpr):
    if program < senders:
        send(program, senders, *sending, S)
    else:
        receive(program - senders, programs - senders, *receiving, S)


@triton.jit(do_not_specialize=_CHANGING)
def ep_fused_dispatch_kernel(
    table, record, control, x, scales, input_scale, ids, weights, slot_of, sent, tokens_out, scales_out,
    row_offsets, expert_ids, src_info, scales_offsets, weights_out, topk_ids_out, num_recv, overflow, counts_out,
    received, rows_of_message, message_token, routed, routed_counts, me, rank, first, num_local, num_groups,
    num_tokens, tokens_per_program, split, shared_begin, shared_end, capacity, scale_rows, counts_stride, status,
    senders, limit, programs, S: tl.constexpr,
):  # fmt: skip
    """Programs [0, senders) send, the others, of ``programs``, receive."""
    sending = (
        table, record, control, x, scales, input_scale, ids, weights, slot_of, sent, routed, me, first, num_local,
        num_tokens, tokens_per_program, split, shared_begin, shared_end, status, limit,
    )  # fmt: skip
    receiving = (
        table, record, control, tokens_out, scales_out, row_offsets, expert_ids, src_info, scales_offsets, weights_out,
        topk_ids_out, num_recv, overflow, counts_out, received, rows_of_message, message_token, routed, routed_counts,
        me, rank, num_local, num_groups, shared_begin, shared_end, capacity, scale_rows, counts_stride, status, limit,
    )  # fmt: skip
    take_turns(_both, control, _SENT, programs, (sending, receiving, senders), S)


@triton.jit(do_not_specialize=_CHANGING)
def ep_dispatch_async_kernel(
    table, record, control, x, scales, input_scale, ids, weights, slot_of, sent, routed, me, first, num_local,
    num_tokens, tokens_per_program, split, shared_begin, shared_end, status, limit, programs, S: tl.constexpr,
):  # fmt: skip
    """The sender role alone."""
    sending = (
        table, record, control, x, scales, input_scale, ids, weights, slot_of, sent, routed, me, first, num_local,
        num_tokens, tokens_per_program, split, shared_begin, shared_end, status, limit,
    )  # fmt: skip
    take_turns(send, control, _SENT, programs, sending, S)


@triton.jit(do_not_specialize=_CHANGING)
def ep_dispatch_wait_kernel(
    table, record, control, tokens_out, scales_out, row_offsets, expert_ids, src_info, scales_offsets, weights_out,
    topk_ids_out, num_recv, overflow, counts_out, received, rows_of_message, message_token, routed, routed_counts, me,
    rank, num_local, num_groups, shared_begin, shared_end, capacity, scale_rows, counts_stride, status, limit,
    programs, S: tl.constexpr,
):  # fmt: skip
    """The receiver role alone."""
    receiving = (
        table, record, control, tokens_out, scales_out, row_offsets, expert_ids, src_info, scales_offsets, weights_out,
        topk_ids_out, num_recv, overflow, counts_out, received, rows_of_message, message_token, routed, routed_counts,
        me, rank, num_local, num_groups, shared_begin, shared_end, capacity, scale_rows, counts_stride, status, limit,
    )  # fmt: skip
    take_turns(receive, control, _RECEIVED, programs, receiving, S)
