"""Sum rows where they lie: rows of a rank's own tokens in ``y``, in allreduce mode and where own rows stay.

An own row is the sum of the rows that a token filled at experts of its own home rank. Elsewhere it travels like any
other: the expert role stores it in the rank's own block and signals it, and the home role waits for it. In allreduce
mode nothing travels: a token has no other rows. Where own rows *stay* (S.OWN_ROWS_STAY: two ranks with many tokens,
``kernels.launch.own_rows``), the expert role sends to the other rank only, and the home role awaits that rank's row
alone: its flag, or with layout "rank" the row itself (``kernels.sync.lamport_slots``). Own rows are loaded before that
wait where there are no flags.

Who writes and who waits: own rows have no signal. Their inputs are complete before the launch of the home role begins:
``y``, the row weights, and the notes of dispatch, of which ``slot_of`` has a token's message slot at its own rank, and
``rows_of_message`` the rows of that message. In a split call the caller must not change these until ``wait`` has
returned. In split calls of the contract all rows travel, because their sender does not know whether the phases follow,
which do not get ``y`` (``kernels.combine.phases``).

Why the next call cannot overtake: own rows are stored nowhere, and nothing is held for them: the workspace has no
Lamport slots for a rank's own rows where these come without flags (``Workspace.lamport_ranks``).

Why calls of all forms may follow each other, and why ranks need not choose alike: only the rank itself would store and
load own rows. Where they stay, a call leaves its flags for itself as they are; a call after it in which own rows travel
raises them to its own, higher number. No rank counts itself among the ranks that refuse or are mismatched.

Sums: an own row that stays is rounded to the row's dtype as if it travelled. Of two rows the order does not matter: +0
plus one plus the other is the same sum either way.

Example: three slots; token 0 of rank 0 filled there rows [0, -1, 1] of ``y``, with weights 0.5 and 1; y[0] = 2 and
y[1] = 2**-8. The own row in bf16 is round(1 + 2**-8) = 1. Rank 1 sends 2**-8, and home stores round(2**-8 + 1) = 1.
With an own row that is not rounded it would store 1 + 2**-7.

Example of rows: 5 tokens per rank at most and three slots; a token of rank 1 has message slot 0 there. Its own rows are
numbered in words 15, 16 and 17 of ``rows_of_message``, those of message (1, 0).
"""

import triton
import triton.language as tl

from moelink.kernels.combine.arrivals import find_own_rows
from moelink.kernels.combine.send import weighted_row
from moelink.kernels.numeric import round_to


@triton.jit
def remote_slots(slots, me, S: tl.constexpr):
    """Return a token's message slots [ranks] without the one at this rank itself, if own rows stay."""
    if S.OWN_ROWS_STAY:
        return tl.where(tl.arange(0, S.WORLD_SIZE_POW2) == me, -1, slots)
    else:
        return slots


@triton.jit
def sum_own_rows(inputs, notes, slots, me, token, c, numbers, S: tl.constexpr):
    """Return the own row of a token at columns ``c`` in S.SUM_DTYPE, as it would have travelled; 0 if it travels."""
    if S.ALLREDUCE or S.OWN_ROWS_STAY:
        tl.static_assert(S.WORLD_SIZE <= 2 and S.SENDS_SUMS and S.ENCODE_FN is None)
        rows, there = find_own_rows(notes, slots, me, S)
        y_rows = tl.where(there, numbers.y_rows, 0)
        weights = inputs.home_weights + token * S.TOPK
        total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
        step: tl.constexpr = own_rows_at_a_time(S.ALLREDUCE, S.SLOTS_PER_MESSAGE)
        for first in range(0, S.SLOTS_PER_MESSAGE, step):
            for k in tl.static_range(step):
                row = tl.load(rows + first + k)
                total += weighted_row(inputs.y, y_rows, inputs.row_weights, weights + first + k, row, c, S)
        if S.OWN_ROWS_STAY:
            total = round_to(total, S.ROW_DTYPE, S.NATIVE_CASTS).to(S.SUM_DTYPE)
        return total
    else:
        return 0


@triton.constexpr_function
def own_rows_at_a_time(allreduce, slots):
    """Return how many of ``slots`` own rows are summed at a time: all in allreduce mode, else up to 4, because
    registers also hold a row that came."""
    return slots if allreduce else 4 if slots % 4 == 0 else 2 if slots % 2 == 0 else 1


@triton.jit
def with_own_row(total, own, S: tl.constexpr):
    """Return the sum ``total`` of rows that came together with ``own``, from :func:`sum_own_rows`."""
    if S.ALLREDUCE:
        return own
    elif S.OWN_ROWS_STAY:
        return total + own
    else:
        return total
