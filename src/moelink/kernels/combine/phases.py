"""Run the home role of combine as launches of its own, one for each phase that the contract names.

``ep_wait_for_all_arrivals_kernel`` waits until the rows of all tokens have arrived.
``ep_copy_shared_expert_outputs_kernel`` copies the fused shared expert's rows to the output.
``ep_reduce_and_copy_to_output_kernel`` sums what has arrived, adds what the output holds if a shared expert is fused,
and counts the call as read. They follow the send role (``ep_combine_async_kernel``) in this order, in one stream.

Together they store the same bits as ``ep_combine_wait_kernel``. That kernel needs one launch, and reads no output: it
adds the shared expert's rows from registers. The stream orders the phases: acquires of one launch hold for the next,
and a poisoned rank sums nothing. Sums without flags (``kernels.sync.lamport_slots``) are summed while they are waited
for, so these kernels are for calls with flags: S.LAMPORT_TOKENS is 0.

Example: W = 2, tokens 0 and 1, two CTAs reduce: the first launch waits for both heads and for the flags of both tokens;
the second copies shared rows 0 and 1; CTA i of the third stores out[i] = round(row(0, i) + row(1, i) + out[i]).
"""

import triton
import triton.language as tl

from moelink.kernels.combine.arrivals import awaited_slots, wait_for_rows
from moelink.kernels.combine.finish import shared_expert_output
from moelink.kernels.combine.heads import wait_for_heads
from moelink.kernels.combine.reduce import parts_of_token, reduce_and_copy_to_output
from moelink.kernels.launch.roles import run_role
from moelink.kernels.records import Piece
from moelink.kernels.sync.credit import count_read
from moelink.kernels.sync.quiesce import wait_for_choices
from moelink.kernels.sync.signals import context_of, is_poisoned
from moelink.memory.protocol import COMBINE_RECEIVED, PHASE_COMBINE

_PHASE = tl.constexpr(PHASE_COMBINE)
_ROLE = tl.constexpr(COMBINE_RECEIVED)


@triton.jit
def wait_for_tokens(program, num_programs, peers, inputs, notes, numbers, S: tl.constexpr):
    """Wait for the rows of every ``num_programs``-th token, from ``program``; CTA 0 also for every rank's head."""
    ctx = context_of(peers, _ROLE, program, numbers, S)
    brought = tl.load(notes.received + 2 * S.WORLD_SIZE) == 0
    ok = 1 - is_poisoned(peers.record, peers.control, S)
    if (ok > 0) & brought & (program == 0):
        ok = wait_for_heads(ctx, notes, numbers.num_tokens, S)
    ok, choices = wait_for_choices(ok, (ok > 0) & brought, ctx, S)
    for token in range(program, numbers.num_tokens, num_programs):
        if ok > 0:
            slots = awaited_slots(ctx, notes, token, brought, choices, S)
            ok = wait_for_rows(ctx, inputs, slots, token, Piece(0, 1, False), numbers, S)


@triton.jit
def ep_wait_for_all_arrivals_kernel(peers, inputs, notes, numbers, S: tl.constexpr):
    """Wait until all rows have arrived. Of ``inputs`` only ``topk_ids`` are read."""
    run_role(wait_for_tokens, (peers, inputs, notes, numbers), peers.control, _ROLE, numbers.programs, S)


@triton.jit
def reduce_tokens(program, num_programs, peers, inputs, outputs, notes, numbers, S: tl.constexpr):
    """Store the results of tokens whose rows have all arrived, and count the call as read."""
    ctx = context_of(peers, _ROLE, program, numbers, S)
    brought = tl.load(notes.received + 2 * S.WORLD_SIZE) == 0
    ok = 1 - is_poisoned(peers.record, peers.control, S)
    ok, choices = wait_for_choices(ok, (ok > 0) & brought, ctx, S)
    parts = parts_of_token(numbers.num_tokens, num_programs, S)
    if ok > 0:
        for i in range(program, numbers.num_tokens * parts, num_programs):
            token = i // parts
            slots = awaited_slots(ctx, notes, token, brought, choices, S)
            piece = Piece(i % parts, parts, False)
            reduce_and_copy_to_output(ctx, inputs, slots, notes, outputs, numbers, token, piece, S)
    if not S.ALLREDUCE:
        if (ok > 0) & brought:
            count_read(ctx, _PHASE, program, num_programs, S, "relaxed")


@triton.jit
def ep_reduce_and_copy_to_output_kernel(peers, inputs, outputs, notes, numbers, S: tl.constexpr):
    """Sum the rows that have arrived. ``inputs.y`` is read in allreduce mode only."""
    arguments = (peers, inputs, outputs, notes, numbers)
    run_role(reduce_tokens, arguments, peers.control, _ROLE, numbers.programs, S)


@triton.jit
def ep_copy_shared_expert_outputs_kernel(peers, inputs, outputs, numbers, S: tl.constexpr):
    """Store each own token's row of the fused shared expert in the output; zeros where this rank has none."""
    for token in range(tl.program_id(0), numbers.num_tokens, numbers.programs):
        for c0 in range(0, S.HIDDEN_SIZE, S.BLOCK_SIZE):
            c = c0 + tl.arange(0, S.BLOCK_SIZE)
            row = shared_expert_output(inputs.y, numbers, token, c, S)
            tl.store(outputs.out + tl.cast(token, tl.int64) * S.HIDDEN_SIZE + c, row, mask=c < S.HIDDEN_SIZE)
