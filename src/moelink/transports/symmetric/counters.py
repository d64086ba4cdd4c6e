"""Read what a rank's kernels count, beside its calls, from any thread: totals, the latest dispatch, and waits.

Nothing is counted for this: kernels need these words themselves (:mod:`moelink.memory.protocol`). Those of ``counts``
and ``combine_head`` hold the number of their call, so a look shows whether they belong together, and which ranks have
not yet entered the call that this rank is in. Replays of CUDA graphs write the same words.

On CUDA a look is three small copies beside all streams (:class:`~moelink.memory.choices.BlockReader`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from moelink.config import EPConfig
from moelink.memory.choices import LL_CALL, LL_VALUE, BlockReader
from moelink.memory.protocol import (
    ANY_CALL,
    CALL_SHIFT,
    COMBINE_BYTES,
    COMBINE_RECEIVED,
    COUNT_HEADER,
    DISPATCH_BYTES,
    DISPATCH_RECEIVED,
    INVALID_IDS,
    MASKED_CALL,
    OVERFLOW,
)
from moelink.memory.workspace import Workspace
from moelink.transports.counters import Counters, LatestDispatch

_MESSAGES, _TOKENS, _ORIGIN = 1, 2, 6
"""Words of a row of ``counts`` (``protocol.COUNT_HEADER``)."""
_READ = ("counts", "combine_head", "control")
"""Regions, in the order of a look: if a call is not over by its end, it was not when the ranks' words were read."""


class CounterReader:
    """Reads the counters of a rank, whose ``block`` of ``workspace`` is alive, by one thread at a time."""

    def __init__(self, config: EPConfig, workspace: Workspace, block: Tensor, me: int) -> None:
        """``me``: the rank's place among those that exchange."""
        self._words = COUNT_HEADER + config.num_local_experts
        self._me, self._bytes = me, workspace.nbytes
        self._reader = BlockReader({name: workspace.regions[name].view(block) for name in _READ})
        self._latest: LatestDispatch | None = None

    def read(self, taken: tuple[int, int], poisoned: bool) -> Counters:
        """Return the counters as they are now.

        Args:
            taken: the losses that checks have taken from the words: dropped rows, ids out of range.
            poisoned: as the result says it.
        """
        words = self._reader.look()
        control = words["control"].tolist()
        done = {
            "dispatch": control[DISPATCH_RECEIVED] >> CALL_SHIFT,
            "combine": control[COMBINE_RECEIVED] >> CALL_SHIFT,
        }
        counts = words["counts"][:, : self._words]
        here = counts[:, 0] >> 32 != MASKED_CALL
        calls, values = counts >> 32 & LL_CALL, counts & LL_VALUE
        calls[~here] = values[~here] = 0
        now = calls[self._me, 0]
        if (calls[here] == now).all() and now:  # else some belong to the call before; the earlier one is kept
            counted = not values[:, _ORIGIN].any()
            self._latest = LatestDispatch(
                tokens=int(values[self._me, _TOKENS]),
                messages=tuple(values[:, _MESSAGES].tolist()),
                rows=tuple(values[:, COUNT_HEADER:].sum(0).tolist()) if counted else None,
            )
        return Counters(
            calls=done,
            sent={"dispatch": control[DISPATCH_BYTES], "combine": control[COMBINE_BYTES]},
            dropped=taken[0] + control[OVERFLOW],
            invalid=taken[1] + control[INVALID_IDS],
            latest=self._latest,
            awaited={
                "dispatch": _late(calls[:, 0], self._me, done["dispatch"] & LL_CALL),
                "combine": _late(words["combine_head"], self._me, done["combine"]),
            },
            workspace_bytes=self._bytes,
            poisoned=poisoned,
        )


def _late(entered: Any, me: int, done: int) -> tuple[bool, ...]:
    """Return of each rank whether this rank awaits it: is in a call that is not over and that the other has not
    entered.

    Args:
        entered: [world_size] int64, the call that each rank has entered. Ranks that never enter one here are at 0.
        me: this rank.
        done: the last call that is over here.

    >>> _late(np.array([7, 6, 7, 0]), 0, 6)
    (False, True, False, False)
    >>> _late(np.array([7, 6, 7, 0]), 0, 7)
    (False, False, False, False)
    """
    own = entered[me]
    late: np.ndarray[Any, Any] = (entered != own) & (entered > 0) & (entered < ANY_CALL) & (own != done)
    return tuple(late.tolist())
