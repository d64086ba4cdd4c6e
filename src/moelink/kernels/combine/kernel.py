"""Combine as one launch (``ep_fused_combine_kernel``) or two (``..._async_kernel``, ``..._wait_kernel``).

Low program ids have the expert role (``kernels.combine.send``), high ids the home role (``kernels.combine.reduce``). As
in dispatch, senders wait only for the previous call to be drained, which peers tell as they begin a call, and so finish
whatever else the peers do; the home role waits only for other ranks. Compile without fused multiply-add: products are
rounded before they are added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moelink.kernels.combine.reduce import gather_home
from moelink.kernels.combine.send import send_tokens_back
from moelink.kernels.launch.sm_limit import take_turns
from moelink.memory.protocol import COMBINE_RECEIVED, COMBINE_SENT

_SENT, _RECEIVED = tl.constexpr(COMBINE_SENT), tl.constexpr(COMBINE_RECEIVED)
_CHANGING = (
    "me", "first", "num_local", "num_tokens", "y_rows", "shared_begin", "shared_end", "slot_begin", "spread",
    "status", "senders", "limit", "programs",
)  # fmt: skip


@triton.jit
def _both(program, programs, sending, gathering, senders, S: tl.constexpr):
    if program < senders:
        send_tokens_back(program, senders, *sending, S)
    else:
        gather_home(program - senders, programs - senders, *gathering, S)


@triton.jit(do_not_specialize=_CHANGING)
def ep_fused_combine_kernel(
    table, record, control, y, row_weights, home_weights, ids, slot_of, rows_of_message, message_token, received, out,
    shared, epilogue, epilogue_tensors, me, first, num_local, num_tokens, y_rows, shared_begin, shared_end,
    slot_begin, spread, status, senders, limit, programs, S: tl.constexpr,
):  # fmt: skip
    """Programs [0, senders) send rows back, the others, of ``programs``, gather them."""
    sending = (
        table, record, control, y, row_weights, rows_of_message, message_token, received, me, y_rows, slot_begin,
        spread, status, limit,
    )  # fmt: skip
    gathering = (
        table, record, control, y, row_weights, home_weights, ids, slot_of, rows_of_message, received, out, shared,
        epilogue, epilogue_tensors, me, first, num_local, num_tokens, y_rows, shared_begin, shared_end, slot_begin,
        status, limit,
    )  # fmt: skip
    take_turns(_both, control, _SENT, programs, (sending, gathering, senders), S)


@triton.jit(do_not_specialize=_CHANGING)
def ep_combine_async_kernel(
    table, record, control, y, row_weights, rows_of_message, message_token, received, me, y_rows, slot_begin, spread,
    status, limit, programs, S: tl.constexpr,
):  # fmt: skip
    """The expert role alone."""
    sending = (
        table, record, control, y, row_weights, rows_of_message, message_token, received, me, y_rows, slot_begin,
        spread, status, limit,
    )  # fmt: skip
    take_turns(send_tokens_back, control, _SENT, programs, sending, S)


@triton.jit(do_not_specialize=_CHANGING)
def ep_combine_wait_kernel(
    table, record, control, y, row_weights, home_weights, ids, slot_of, rows_of_message, received, out, shared,
    epilogue, epilogue_tensors, me, first, num_local, num_tokens, y_rows, shared_begin, shared_end, slot_begin,
    status, limit, programs, S: tl.constexpr,
):  # fmt: skip
    """The home role alone."""
    gathering = (
        table, record, control, y, row_weights, home_weights, ids, slot_of, rows_of_message, received, out, shared,
        epilogue, epilogue_tensors, me, first, num_local, num_tokens, y_rows, shared_begin, shared_end, slot_begin,
        status, limit,
    )  # fmt: skip
    take_turns(gather_home, control, _RECEIVED, programs, gathering, S)
