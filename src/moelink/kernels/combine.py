"""Combine as one launch (``ep_fused_combine_kernel``) or two (``..._async_kernel``, ``..._wait_kernel``).

Low program ids have the expert role (``kernels.send_back``), high ids the home role (``kernels.reduce``). As in
dispatch, senders wait only for the previous call to be drained, which peers tell as they begin a call, and so finish
whatever else the peers do; the home role waits only for other ranks. Compile without fused multiply-add: products are
rounded before they are added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moelink.kernels.reduce import gather_home
from moelink.kernels.send_back import send_tokens_back

_CHANGING = (
    "me", "first", "num_local", "num_tokens", "y_rows", "shared_begin", "shared_end", "slot_begin", "spread",
    "status", "senders", "limit",
)  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING)
def ep_fused_combine_kernel(
    table, record, control, y, row_weights, home_weights, ids, slot_of, rows_of_message, message_token, received, out,
    shared, epilogue, epilogue_tensors, me, first, num_local, num_tokens, y_rows, shared_begin, shared_end,
    slot_begin, spread, status, senders, limit, S: tl.constexpr,
):  # fmt: skip
    """Programs [0, senders) send rows back, the others gather them."""
    program = tl.program_id(0)
    if program < senders:
        send_tokens_back(
            table, record, control, y, row_weights, rows_of_message, message_token, received, me, y_rows, slot_begin,
            spread, status, program, senders, limit, S,
        )  # fmt: skip
    else:
        gather_home(
            table, record, control, y, row_weights, home_weights, ids, slot_of, rows_of_message, received, out,
            shared, epilogue, epilogue_tensors, me, first, num_local, num_tokens, y_rows, shared_begin, shared_end,
            slot_begin, status, program - senders, tl.num_programs(0) - senders, limit, S,
        )  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING)
def ep_combine_async_kernel(
    table, record, control, y, row_weights, rows_of_message, message_token, received, me, y_rows, slot_begin, spread,
    status, limit, S: tl.constexpr,
):  # fmt: skip
    """The expert role alone."""
    send_tokens_back(
        table, record, control, y, row_weights, rows_of_message, message_token, received, me, y_rows, slot_begin,
        spread, status, tl.program_id(0), tl.num_programs(0), limit, S,
    )  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING)
def ep_combine_wait_kernel(
    table, record, control, y, row_weights, home_weights, ids, slot_of, rows_of_message, received, out, shared,
    epilogue, epilogue_tensors, me, first, num_local, num_tokens, y_rows, shared_begin, shared_end, slot_begin,
    status, limit, S: tl.constexpr,
):  # fmt: skip
    """The home role alone."""
    gather_home(
        table, record, control, y, row_weights, home_weights, ids, slot_of, rows_of_message, received, out, shared,
        epilogue, epilogue_tensors, me, first, num_local, num_tokens, y_rows, shared_begin, shared_end, slot_begin,
        status, tl.program_id(0), tl.num_programs(0), limit, S,
    )  # fmt: skip
