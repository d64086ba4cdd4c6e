"""Exchange tensors over a caller's process group, with a deadline, and name the rank that is missing.

For a rank that does not come torch waits half an hour; for one that died it raises an error of gloo. All exchanges over
groups of callers are here: :func:`all_reduce`, :func:`all_gather` and :func:`all_to_all`.

Each exchange needs all ranks of the group, and each rank polls it until it is over. A rank learns of the others from
the probe servers of a communicator over the same ranks (``Peers.detector``, optional), and from *marks* in the store of
the group. A healthy exchange writes no mark.

===========  ==================  ===========================================================================
key          written by          value
===========  ==================  ===========================================================================
``at/r``     rank r              the number of the exchange in which it has waited for ``_MARK_SECONDS``
``failed/r`` rank r              the number of its exchange that has failed, by an error or by the deadline
``verdict``  the first to know   the rank at fault, and whether its process is gone
===========  ==================  ===========================================================================

A rank whose exchange failed writes ``failed/r`` and looks for a rank at fault: one whose process is gone or stopped, by
its probe; else the only one that has not failed; else, after the deadline and a moment, of the ranks that have not
failed the one that last waited in the earliest exchange. Why that names no innocent rank: every live rank comes to the
exchange, or is in it, and fails there by ``timeout`` after it came. A rank that waits has written its mark ``at``
before any deadline. The number of the failed exchange does not matter: numbers of two ranks differ by one if a rank
died amid its messages, and by more if one needs nothing of the other. A rank that is behind began to wait earlier, so
it has failed by then; and no mark ``failed`` is from an earlier failure, because the first one ends the group. A rank
that waits in a later exchange has come, perhaps late because of another rank. The first verdict is written by
compare-and-set and every rank reads it before it raises, so all name the same rank; a late rank reads its own number.
The verdict stays: exchanges of the group that torch has under way are undefined from then on.

A rank that lives may have long work before an exchange, such as files to read (``Peers.busy``). Then the deadline moves
on as long as every probe server says that its rank is neither gone nor stopped.

On CUDA the host does not wait for sums, which are ordered on the stream: the limits of NCCL hold (docs/faults.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from moelink.control.failure_detector import FailureDetector
from moelink.control.process import await_release
from moelink.control.stores import BoundedError, LauncherStore, bounded, peek
from moelink.errors import PeerLostError, PeerTimeoutError

T = TypeVar("T")

TIMEOUT = 60.0
"""Seconds for a rank that does not come, without a communicator's own timeout."""
BUSY = 1800.0
"""Seconds that a live rank may take before an exchange that follows long work: torch's own limit."""

_MARK_SECONDS = 0.25
_GRACE_SECONDS = 1.0
"""Seconds that a rank whose exchange failed waits for the others to fail."""
_PROBE_EVERY_SECONDS = 0.5
_STORE_SECONDS = 2.0
_PAUSE_SECONDS = 2e-4
_LATER_SECONDS = 5.0
"""Seconds after moelink when gloo gives up, so that its threads end."""


@dataclass(frozen=True)
class Peers:
    """The ranks of a process group, and the time that each has.

    Attributes:
        group: the process group; None for the default one.
        timeout: seconds until a rank that has not come is missing.
        detector: of a communicator over the same ranks, or None.
        busy: seconds that a rank may take if its probe server says that it lives; at least ``timeout``.
        what: name of the exchange in errors.
    """

    group: dist.ProcessGroup | None = None
    timeout: float = TIMEOUT
    detector: FailureDetector | None = None
    busy: float = 0.0
    what: str = "an exchange"

    @property
    def own(self) -> dist.ProcessGroup:
        """The process group, which exists."""
        group = self.group or dist.group.WORLD
        assert group is not None
        return group


def all_reduce(tensor: Tensor, peers: Peers, op: Any = dist.ReduceOp.SUM) -> None:
    """Combine ``tensor`` of all ranks, in place.

    Raises:
        PeerTimeoutError: a rank did not come in time, or (PeerLostError) its process is gone. It names the rank.
    """
    if torch.compiler.is_compiling():
        dist.all_reduce(tensor, op=op, group=peers.group)  # a part of the graph: torch's own limit holds
        return
    options = distributed_c10d.AllreduceOptions()
    options.reduceOp = op
    _run(lambda: peers.own.allreduce([tensor], _limited(options, peers)), [tensor], peers)


def all_gather(mine: Tensor, peers: Peers) -> list[Tensor]:
    """Return ``mine``, of the same shape everywhere, of each rank, on the host. Raises as :func:`all_reduce`."""
    parts = [torch.empty_like(mine) for _ in range(peers.own.size())]
    options = _limited(distributed_c10d.AllgatherOptions(), peers)  # type: ignore[attr-defined]
    _run(lambda: peers.own.allgather([parts], [mine], options), [*parts, mine], peers, on_host=True)
    return [part.cpu() for part in parts]


def all_to_all(received: Tensor, sent: Tensor, counts: Sequence[int], to: Sequence[int], peers: Peers) -> None:
    """Send ``to[r]`` leading elements of ``sent`` to rank r, receive ``counts[r]``. Raises as :func:`all_reduce`."""
    options = _limited(distributed_c10d.AllToAllOptions(), peers)
    _run(lambda: peers.own.alltoall_base(received, sent, list(counts), list(to), options), [received, sent], peers)


def _limited(options: Any, peers: Peers) -> Any:
    options.timeout = timedelta(seconds=max(peers.timeout, peers.busy) + _LATER_SECONDS)
    return options


def _run(start: Callable[[], Any], lent: list[Tensor], peers: Peers, *, on_host: bool = False) -> None:
    """Start an exchange and wait for it."""
    begin = time.monotonic()
    board = _Board(peers)
    try:
        work = start()
        if on_host or lent[0].device.type == "cpu":
            _wait(work, board, begin)
        work.wait()
        del work  # it holds the tensors
    except RuntimeError as error:
        if isinstance(error, PeerTimeoutError):
            raise
        raise board.find_fault(begin + peers.timeout, late=False) from error
    await_release(lent)


def _wait(work: Any, board: _Board, begin: float) -> None:
    """Return when ``work`` is over, or raise PeerTimeoutError."""
    peers = board.peers
    marked, alive, look = False, begin, begin + _PROBE_EVERY_SECONDS
    while not work.is_completed():
        now = time.monotonic()
        if now > alive + peers.timeout:
            raise board.find_fault(now, late=True)
        if not marked and now > begin + min(_MARK_SECONDS, peers.timeout / 2):
            marked = True
            with suppress(_SilentError):
                board.mark("at")
        if marked and now > look:
            look = now + _PROBE_EVERY_SECONDS
            with suppress(_SilentError):
                board.raise_verdict()
            if peers.busy and peers.detector is not None and board.all_live() and now < begin + peers.busy:
                alive = now
        time.sleep(_PAUSE_SECONDS if now < begin + 1 else 10 * _PAUSE_SECONDS)


class _SilentError(Exception):
    """The store does not answer. Its host may be stopped for a while; until the deadline that is no fault."""


class _Board:
    """The marks of one exchange."""

    def __init__(self, peers: Peers) -> None:
        group = peers.own
        self.peers, self.rank, self.world_size = peers, group.rank(), group.size()
        self._told = False
        self._number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        self._store = distributed_c10d._get_process_group_store(group)

    def mark(self, kind: str) -> None:
        self._ask(lambda: self._store.set(f"moelink/{kind}/{self.rank}", str(self._number)))

    def raise_verdict(self) -> None:
        text = self._ask(lambda: peek(self._store, "moelink/verdict")).decode()
        if text:
            peer, lost = (int(part) for part in text.split())
            raise self.error(peer, lost=bool(lost))

    def all_live(self) -> bool:
        """Return whether every probe server answers that its rank is neither gone nor stopped."""
        return all(result.call is not None for result in self._probe().values())

    def find_fault(self, deadline: float, *, late: bool) -> PeerTimeoutError:
        """Return the error to raise: the verdict of the first rank that knew, or this rank's own."""
        begin = time.monotonic()
        try:
            while True:
                now = time.monotonic()
                settled = now > begin + _GRACE_SECONDS
                over = now > max(begin, deadline) + _GRACE_SECONDS
                try:
                    self._agree(settled=settled, over=over)
                except _SilentError:
                    self._blame_host(over=over)
                time.sleep(0.02)
        except PeerTimeoutError as error:
            return error

    def _agree(self, *, settled: bool, over: bool) -> None:
        """Raise the verdict, if there is one, or if this rank can write it."""
        if not self._told:
            self.mark("failed")
            self._told = True
        self.raise_verdict()
        found = self._at_fault(settled=settled, over=over)
        if found is not None:
            verdict = "{} {:d}".format(*found)
            self._ask(lambda: self._store.compare_set("moelink/verdict", "", verdict))
            self.raise_verdict()

    def _at_fault(self, *, settled: bool, over: bool) -> tuple[int, bool] | None:
        """Return the rank at fault and whether its process is gone; None as long as it is not known."""
        results = self._probe() if self.peers.detector is not None else {}
        for wanted in ("lost", "stopped"):
            for rank, result in results.items():
                if getattr(result, wanted) and (wanted == "lost" or settled):
                    return rank, wanted == "lost"
        unheard = {r: self._read("at", r) for r in range(self.world_size) if self._read("failed", r) < 0}
        unheard = {rank: at for rank, at in unheard.items() if at <= self._number}
        if not unheard:
            return (-1, False) if settled else None
        if over or (settled and len(unheard) == 1):
            return min(unheard, key=lambda rank: (unheard[rank], rank)), False
        return None

    def _read(self, kind: str, rank: int) -> int:
        text = self._ask(lambda: peek(self._store, f"moelink/{kind}/{rank}"))
        return int(text) if text else -1

    def _probe(self) -> dict[int, Any]:
        assert self.peers.detector is not None
        return self.peers.detector.probe()

    def _ask(self, call: Callable[[], T]) -> T:
        """Make a call of the store. Raises PeerTimeoutError if its host is gone, _SilentError if it is silent."""
        try:
            return bounded(call, time.monotonic() + _STORE_SECONDS)
        except BoundedError:
            raise _SilentError from None
        except RuntimeError:
            self._blame_known()
            raise self.error(self._host(), lost=True) from None

    def _blame_host(self, *, over: bool) -> None:
        """Raise the error of a rank that is gone or stopped, which may be the silent store's host; ``over``: of that
        host in any case."""
        self._blame_known()
        if over:
            raise self.error(self._host(), lost=False)

    def _blame_known(self) -> None:
        if self.peers.detector is not None:
            for rank, result in self._probe().items():
                if result.lost or result.stopped:
                    raise self.error(rank, lost=result.lost)

    def _host(self) -> int:
        """Return the rank whose process hosts the store, -1 if none does or it is not known."""
        if not LauncherStore.is_named():
            return -1
        launcher = LauncherStore()
        ranks = dist.get_process_group_ranks(self.peers.own)
        known = launcher.root_of(self._store) is not None and launcher.host_rank in ranks
        return ranks.index(launcher.host_rank) if known else -1

    def error(self, peer: int, *, lost: bool) -> PeerTimeoutError:
        """Return the error that this rank raises about ``peer``."""
        kind = PeerLostError if lost and peer != self.rank else PeerTimeoutError
        detail = "this rank itself came late" if peer == self.rank else "its process is gone" if lost else ""
        return kind(
            rank=self.rank, peer=peer, phase=self.peers.what, call=0, expected=0, got=None, detail=detail
        )  # fmt: skip
