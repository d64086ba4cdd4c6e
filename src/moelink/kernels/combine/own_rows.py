"""Sum a rank's own rows in place: combine of two ranks with many tokens (S.OWN_ROWS_STAY).

An own row is the sum of the rows that a token filled at experts of its own home rank. Elsewhere it travels like any
other: the expert role stores it in the rank's own block and signals it, and the home role waits for it. Where own rows
*stay*, the expert role sends to the other rank only, and the home role computes own rows from ``y``, in registers. It
awaits the other rank's row alone: its flag, or with layout "rank" the row itself (``kernels.sync.lamport_slots``). With
layout "rank" an own row is one load, so there the home role begins it before it waits.

``kernels.launch.own_rows`` chooses, for a fused launch and for the two launches of a split call alike. In split calls
of the contract all rows travel: their sender does not know whether the phases follow, which do not get ``y``
(``kernels.combine.phases``).

Who writes and who waits: own rows have no signal. Their inputs are complete before the launch of the home role begins:
``y``, the row weights, and the notes of dispatch, of which ``slot_of`` has a token's message slot at its own rank, and
``rows_of_message`` the rows of that message. In a split call the caller must not change these until ``wait`` has
returned. By then the home role is launched, on the stream on which the expert role ran, and later launches of the
caller follow it. So both roles read the same values.

Why the next call cannot overtake: own rows are stored nowhere, so no call can overwrite them or take them for its own.
Nothing is held for them either: the workspace has no Lamport slots for a rank's own rows where these come without flags
(``Workspace.lamport_ranks``).

Why calls of all forms may follow each other, and why ranks need not choose alike: only the rank itself would store and
load own rows. Where they stay, a call leaves its flags for itself as they are. A call after it in which own rows travel
raises these flags to its own call number, which is higher. Lanes have blocks of their own. As for refused calls: the
ranks that learn of one wait for rows at the ranks that refuse (``quiesce.wait_until_sent``), and for rows of ranks that
combine another dispatch (``quiesce.end_waits_for_mismatched``). No rank counts itself among these. Credits and heads do
not change.

The number of an own row is prefetched one or two parts of results ahead (:func:`find_own_rows`), because it takes two
loads, one after the other. It is read only if dispatch was complete: if not, the notes name no row.

Sums: an own row is rounded to the row's dtype as if it travelled. Of two rows the order does not matter: +0 plus one
plus the other is the same sum either way.

Example: three slots; token 0 of rank 0 filled there rows [0, -1, 1] of ``y``, with weights 0.5 and 1; y[0] = 2 and
y[1] = 2**-8. The own row in bf16 is round(1 + 2**-8) = 1. Rank 1 sends 2**-8, and home stores round(2**-8 + 1) = 1.
With an own row that is not rounded it would store 1 + 2**-7.

Example of these numbers: 5 tokens per rank at most; a token of rank 1 has message slot 0 there, and that message row 9
of ``y``. They are named by 5, the number of message (1, 0); with one row a message by 9.
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
def find_own_rows(notes, slots, me, exists, S: tl.constexpr):
    """Look up what names the own rows of a token with message ``slots`` [ranks]: the number of its message, or where a
    message has one row, that row of ``y``. Less than 0 for none, and if the token does not exist."""
    tl.static_assert(S.WORLD_SIZE == 2 and S.SENDS_SUMS and S.ENCODE_FN is None)
    slot = tl.max(tl.where(tl.arange(0, S.WORLD_SIZE_POW2) == me, slots, -1), 0)
    message = tl.where(exists & (slot >= 0), me * S.MAX_TOKENS + slot, -1)
    if S.SLOTS_PER_MESSAGE == 1:
        return tl.load(notes.rows_of_message + message, mask=message >= 0, other=-1)
    else:
        return message


@triton.jit
def own_sum(inputs, notes, y_rows, own, c, S: tl.constexpr):
    """Return the own row of a token at columns ``c``, as it would have travelled. ``own``: from
    :func:`find_own_rows`."""
    total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
    weights = inputs.row_weights
    if S.SLOTS_PER_MESSAGE == 1:
        total += weighted_row(inputs.y, y_rows, weights, weights, own, c, S)
    else:
        rows = notes.rows_of_message + tl.maximum(own, 0).to(tl.int64) * S.SLOTS_PER_MESSAGE
        y_rows = tl.where(own >= 0, y_rows, 0)
        step: tl.constexpr = 4 if S.SLOTS_PER_MESSAGE % 4 == 0 else 2 if S.SLOTS_PER_MESSAGE % 2 == 0 else 1
        for first in range(0, S.SLOTS_PER_MESSAGE, step):
            for k in tl.static_range(step):
                total += weighted_row(inputs.y, y_rows, weights, weights, tl.load(rows + first + k), c, S)
    return round_to(total, S.ROW_DTYPE, S.NATIVE_CASTS)
