"""Read what a rank's kernels count, beside its calls, from any thread: totals, the latest dispatch, and waits.

Nothing is counted for this: kernels need these words themselves (:mod:`moelink.memory.protocol`). Those of ``counts``
and ``combine_head`` hold the number of their call, so a look shows whether they belong together, and which ranks have
not yet entered the call that this rank is in. Replays of CUDA graphs write the same words.

On CUDA a look is three small copies on a stream of its own, which waits for no other and for which none waits. Only the
thread that looks waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelink.config import EPConfig
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
_LL_CALL, _LL_VALUE = 0x7FFFFFFF, 0xFFFFFFFF
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
_READ = ("counts", "combine_head", "control")
"""Regions, in the order of a look: if a call is not over by its end, it was not when the ranks' words were read."""


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Let this thread use the device while another one captures a CUDA graph, whose capture it would else end."""
    if torch.version.hip is None:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    else:
        exchange = ctypes.CDLL("libamdhip64.so").hipThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class CounterReader:
    """Reads the counters of a rank, whose ``block`` of ``workspace`` is alive, by one thread at a time."""

    def __init__(self, config: EPConfig, workspace: Workspace, block: Tensor, me: int) -> None:
        """``me``: the rank's place among those that exchange."""
        self._words = COUNT_HEADER + config.num_local_experts
        self._me, self._bytes, self._device = me, workspace.nbytes, block.device
        self._parts = {name: workspace.regions[name].view(block) for name in _READ}
        self._latest: LatestDispatch | None = None
        if self._device.type == "cuda":
            with _beside_captures():
                self._stream = torch.cuda.Stream(self._device)
                self._host = {
                    name: torch.empty_like(t, device="cpu", pin_memory=True) for name, t in self._parts.items()
                }

    def read(self, taken: tuple[int, int], poisoned: bool) -> Counters:
        """Return the counters as they are now.

        Args:
            taken: the losses that checks have taken from the words: dropped rows, ids out of range.
            poisoned: as the result says it.
        """
        words = self._look()
        control = words["control"].tolist()
        done = {
            "dispatch": control[DISPATCH_RECEIVED] >> CALL_SHIFT,
            "combine": control[COMBINE_RECEIVED] >> CALL_SHIFT,
        }
        counts = words["counts"][:, : self._words]
        here = counts[:, 0] >> 32 != MASKED_CALL
        calls, values = counts >> 32 & _LL_CALL, counts & _LL_VALUE
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
                "dispatch": _late(calls[:, 0], self._me, done["dispatch"] & _LL_CALL),
                "combine": _late(words["combine_head"], self._me, done["combine"]),
            },
            workspace_bytes=self._bytes,
            poisoned=poisoned,
        )

    def _look(self) -> dict[str, Any]:
        if self._device.type != "cuda":
            return {name: part.numpy().copy() for name, part in self._parts.items()}
        with _beside_captures(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for name, part in self._parts.items():
                self._host[name].copy_(part, non_blocking=True)
            self._stream.synchronize()
        return {name: host.numpy() for name, host in self._host.items()}


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
