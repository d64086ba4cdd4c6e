"""Add rows of a rank's own tokens where they are read: combine of two ranks with many tokens (S.OWN_ROWS_STAY).

An own row is the sum of the rows that a token filled at experts of its own home rank. Elsewhere it travels like any
other: the expert role stores it in the rank's own block, and the home role loads it again. Where own rows stay, the
expert role sends to the other rank only, and the home role computes them from ``y`` in registers. With layout "rank" it
loads one row for that. ``kernels.launch.own_rows`` chooses the form.

Who writes and who waits: own rows have no signal, because nothing that this launch stores goes into them. ``y``, the
row weights and the notes of dispatch are complete before the launch begins, for its expert role reads them, too. The
notes say which rows of ``y`` are those of a token: ``slot_of`` has its message slot at its own rank, and
``rows_of_message`` the rows of that message. The home role awaits the other rank's row alone: its flag, or with few
tokens of layout "rank" the row itself (``kernels.sync.lamport_slots``), and then it reads the own row before it waits.

Only a fused launch has this form. It reads ``y`` in both roles, so ``y`` need not last longer than before: the stream
of the launch holds its memory, and a captured graph its address, as they do for the expert role. Between the two
launches of a split call a caller may write to ``y``, and the last phase of the contract has no ``y`` at all. They keep
the other form.

Why calls of both forms may follow each other, and why ranks need not choose alike: only the rank itself stores and
loads own rows. A fused call leaves its flags for itself as they are. A split call after it raises these flags to its
own call number, which is higher. Without flags, a fused call leaves the rank's Lamport slots for itself as they are,
which is clear: a split call clears the slots that it reads, and home clears all of them after a refused call. Lanes
have blocks of their own. As for refused calls: the ranks that learn of one wait for rows at the ranks that refuse
(``quiesce.wait_until_sent``), and for rows of ranks that combine another dispatch (``quiesce.end_waits_for_strays``).
No rank counts itself among these. Credits and heads do not change.

Sums: an own row is rounded to the row's dtype as if it travelled. Of two rows the order does not matter: +0 plus one
plus the other is the same sum either way.

Example: three slots; token 0 of rank 0 filled there rows [0, -1, 1] of ``y``, with weights 0.5 and 1; y[0] = 2 and
y[1] = 2**-8. The own row in bf16 is round(1 + 2**-8) = 1. Rank 1 sends 2**-8, and home stores round(2**-8 + 1) = 1.
With an own row that is not rounded it would store 1 + 2**-7.
"""

import triton
import triton.language as tl

from moelink.kernels.combine.send import weighted_row
from moelink.kernels.numeric import round_to


@triton.jit
def others_slots(slots, me, S: tl.constexpr):
    """Return a token's message slots [ranks] without the one at this rank itself."""
    return tl.where(tl.arange(0, S.WORLD_SIZE_POW2) == me, -1, slots)


@triton.jit
def own_rows(notes, slots, me, y_rows, S: tl.constexpr):
    """Return where the S.SLOTS_PER_MESSAGE row numbers are that a token with message ``slots`` [ranks] filled on its
    own rank, and how many rows of ``y`` they may name: ``y_rows``, or 0 if there are none."""
    tl.static_assert(S.WORLD_SIZE == 2 and S.SENDS_SUMS and S.ENCODE_FN is None)
    slot = tl.max(tl.where(tl.arange(0, S.WORLD_SIZE_POW2) == me, slots, -1), 0)
    at = (me * S.MAX_TOKENS + tl.maximum(slot, 0)).to(tl.int64) * S.SLOTS_PER_MESSAGE
    return notes.rows_of_message + at, tl.where(slot >= 0, y_rows, 0)


@triton.jit
def own_sum(inputs, y_rows, rows, c, S: tl.constexpr):
    """Return the own row of a token at columns ``c``, as it would have travelled. ``rows``: of
    :func:`own_rows`."""
    total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
    step: tl.constexpr = 4 if S.SLOTS_PER_MESSAGE % 4 == 0 else 2 if S.SLOTS_PER_MESSAGE % 2 == 0 else 1
    for first in range(0, S.SLOTS_PER_MESSAGE, step):
        for k in tl.static_range(step):
            total += weighted_row(inputs.y, y_rows, inputs.row_weights, inputs.row_weights, rows, first + k, c, S)
    return round_to(total, S.ROW_DTYPE, S.NATIVE_CASTS)
