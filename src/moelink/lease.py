"""Track the lifetime of rows in place (``zero_copy``): they expire at the next call of their lane.

With ``zero_copy`` the receiver of a dispatch copies no row. ``tokens`` and ``scales`` of the output are views of the
region ``messages`` of this rank's own block (:mod:`moelink.memory.workspace`): group s, row i is message slot i of
source rank s. Rows follow one another at ``message_bytes``, a multiple of 128, so views are strided, and every row
begins on a cache line of a device. A kernel that reads rows by index, such as a gather GEMM, reads them where they are.

Who writes, who waits, and why no peer overwrites rows that are still in use:

* A peer stores messages of dispatch n + 1 only after this rank has granted credit for dispatch n
  (:mod:`moelink.kernels.sync.credit`). That is the rule for every layout; senders have no other.
* This rank grants credit for dispatch n in no launch of dispatch n. It does so at the begin of the next launch that
  sends: that of its next dispatch or combine, or of the refusal of one. A launch follows in stream order all work that
  was enqueued before, so whatever the caller enqueued between the two calls has read the rows. (Where ranks run one
  after the other, on CPUs and where they share a GPU, a receiving half would grant credit at once. With ``zero_copy``
  it does not; all local ranks grant credit before the first of them sends. Ranks of other nodes are told at once, too,
  so ``zero_copy`` is refused between nodes.)
* So rows live from their dispatch until the next call of the lane *begins*, and no sender waits for longer than with
  another layout: when dispatch and combine alternate, combine n has granted the credit for dispatch n long before
  dispatch n + 1 sends. The next call cannot overtake, because its stores wait for that credit.

Why there is no second buffer: with two, dispatch n + 1 would have to choose the one that dispatch n does not use. Only
the device knows the number of a call, as a CUDA graph may replay it, but a view has an address that the host fixes
once. A second buffer is a second lane (``init(lanes=2)``), which has a workspace, call numbers and credits of its own.

The host sees this: :class:`CallCount` counts the calls of a lane on a rank; :class:`RowsInPlace` compares. Rows
that are looked at after the next call has begun raise ExpiredRowsError, and so does a combine of the rows of a dispatch
that is not the latest: most likely its experts read rows of the later one. A combine that was refused may be repeated,
as it reads nothing but the caller's ``y``. Autograd notices too: a tensor that it saved is an older version of the
block's memory (:func:`torch.autograd.graph.increment_version`).

The host cannot see tensors that were taken from an output before, and replays of a CUDA graph, which neither end
rows nor bring new ones as far as the host knows. A reader of rows beside a graph takes the views at capture. With
MOELINK_DEBUG=1 the begin of the next call fills the rows with ones (NaN in bf16, fp32 and fp8), on the device, so in
replays, too (:mod:`moelink.kernels.dispatch.expired_rows`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moelink.errors import ExpiredRowsError

IN_PLACE = ("tokens", "scales")
"""The fields of an output that stay where they arrived."""


class CallCount:
    """Count the calls of one rank of a lane.

    Attributes:
        calls: calls of both phases, refused ones included. Each begins by granting credit, which ends rows.
        dispatches: dispatches among them.
        closed: no rows are there any more.
    """

    def __init__(self, memory: Tensor | None = None) -> None:
        """``memory``: the block that rows are views of, whose version rises when they end."""
        self.calls = self.dispatches = 0
        self.closed = False
        self._memory = memory
        self._views: dict[int, dict[str, Tensor]] = {}

    def begin(self, phase: str) -> None:
        """Begin a call of ``phase``, which ends the rows of the dispatch before."""
        self.calls += 1
        self.dispatches += phase == "dispatch"
        if self._memory is not None:
            torch.autograd.graph.increment_version(self._memory)

    def views(self, rows: int, make: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the views of up to ``rows`` rows of each source, made once. :meth:`close` empties them, because a view
        keeps a closed communicator's block mapped."""
        if rows not in self._views:
            self._views[rows] = make(rows)
        return self._views[rows]

    def close(self) -> None:
        """Let go of the block."""
        self.closed, self._memory = True, None
        for views in self._views.values():
            views.clear()


class RowsInPlace:
    """Hold tokens and scales of one dispatch for as long as they are there.

    Attributes:
        views: the tensors by field, without ``scales`` where the format has none.
    """

    __slots__ = ("_call", "_count", "_dispatch", "views")

    def __init__(self, count: CallCount, views: dict[str, Tensor]) -> None:
        self.views, self._count = views, count
        self.renew()

    def renew(self) -> None:
        """Let the rows live from now, when their dispatch has been made, until the next call."""
        self._call, self._dispatch = self._count.calls, self._count.dispatches

    @property
    def is_latest(self) -> bool:
        """Whether no later dispatch has begun."""
        return self._dispatch == self._count.dispatches and not self._count.closed

    @property
    def has_ended(self) -> bool:
        """Whether another call has begun, or the communicator is closed."""
        return self._call != self._count.calls or self._count.closed

    def field(self, name: str) -> Tensor | None:
        """Return tokens or scales.

        Raises:
            ExpiredRowsError: their time has ended.
        """
        if self.has_ended:
            got = "a closed communicator" if self._count.closed else "a look at them after it"
            raise ExpiredRowsError(f"recv.{name}", "rows to be read before the next call of their lane", got)
        return self.views.get(name)

    def require_latest(self) -> None:
        """Refuse to combine rows that a later dispatch may have overwritten.

        Raises:
            ExpiredRowsError: a later dispatch has begun.
        """
        if not self.is_latest:
            raise ExpiredRowsError("recv", "the rows of the lane's latest dispatch", "those of an earlier one")
