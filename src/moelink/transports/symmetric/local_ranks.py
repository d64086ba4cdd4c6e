"""Hold the local ranks of the symmetric transport beside their calls: turns and streams, errors, refusals, counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.control.error_record import Losses, raise_losses
from moelink.control.failure_detector import FailureDetector
from moelink.control.probe import Failure
from moelink.errors import PeerError
from moelink.kernels.launch.device import launches_overlap
from moelink.memory import SymmetricMemory
from moelink.memory.absence import poison
from moelink.memory.protocol import COMBINE_BYTES, DISPATCH_BYTES
from moelink.memory.workspace import Workspace, pointer_table
from moelink.output import DispatchOutput
from moelink.routing import mark_absent
from moelink.transports.base import EVERY_CALL, Phase, Rehearsal, Traffic
from moelink.transports.counters import Counters
from moelink.transports.symmetric.rank import Rank
from moelink.transports.symmetric.refusal import refuse_combine, refuse_dispatch
from moelink.transports.symmetric.warmup import ClockComparison, prepare_calls

T = TypeVar("T")


class LocalRanks:
    """The ranks of this process, one or all. ``configs[i]`` is a local rank, ``memories[i]`` its view of all blocks.

    Blocks start as zeros and are :attr:`Workspace.nbytes` long. In allreduce mode a rank needs only its own block. A
    rank's first call may start before its peers have made their transport, but not before their blocks exist.

    A poisoned transport raises the first error from every method except :meth:`close`.
    """

    partly_sent = False

    def __init__(
        self,
        configs: Sequence[EPConfig],
        memories: Sequence[SymmetricMemory],
        identity: str,
        detector: FailureDetector | None = None,
    ) -> None:
        self._identity = identity
        self._workspace = Workspace(configs[0])
        self._detector = detector
        devices = [memory.local.device for memory in memories]
        self._on_cpu = devices[0].type == "cpu"
        # Else ranks run one after the other, and all must have sent before any waits.
        self._overlap = launches_overlap(devices)
        self.ranks = [
            Rank(config, memory, self._workspace, detector, in_turn=not self._overlap)
            for config, memory in zip(configs, memories, strict=True)
        ]
        self._comparisons = 0
        # Tensors of calls under way must stay alive.
        self._under_way: deque[object] = deque(maxlen=2)
        self._zero_copy = configs[0].zero_copy
        self._overwrites_expired = any(rank.overwrites_expired for rank in self.ranks)

    def _load(self, calls: Sequence[T], launch: Callable[[T], None]) -> None:
        """Load what ``launch`` launches with each rank's entry of ``calls``, if ranks of this process overlap."""
        if len(self.ranks) > 1 and self._overlap:
            for rank, call in zip(self.ranks, calls, strict=True):
                with rank.launcher.preparing():
                    launch(call)

    def _turn(self, rank: Rank, *, own_stream: bool = True) -> AbstractContextManager[None]:
        """Return a context for launches of ``rank``. Several ranks that overlap have a stream each; others stay in the
        current one."""
        own_stream = (own_stream or len(self.ranks) > 1) and self._overlap
        return nullcontext() if rank.can_continue(own_stream=own_stream) else rank.launching(own_stream=own_stream)

    def _each(self, launch: Callable[[Rank], None], *, own_stream: bool = True) -> None:
        """Call ``launch`` with each rank, in its turn."""
        self._load(self.ranks, launch)
        for rank in self.ranks:
            with self._turn(rank, own_stream=own_stream):
                launch(rank)

    def _join(self) -> None:
        for rank in self.ranks:
            rank.join()
        if self._on_cpu:
            self.raise_error()

    def _count_call(self, phase: Phase) -> None:
        if self._detector is not None:
            self._detector.enter(phase)
        if self._zero_copy:
            for rank in self.ranks:
                rank.calls.begin(phase)  # type: ignore[union-attr]

    def _end_rows(self, *, own_stream: bool) -> None:
        """End rows that stay where they arrived, before a call's sending half: in debug mode by overwriting them.

        Ranks that take turns also grant their credits, because the first of them sends, and waits for those of the
        others, before the others do.
        """
        if self._overwrites_expired:
            self._each(Rank.overwrite_expired_rows, own_stream=own_stream)
        if self._zero_copy and not self._overlap:
            self._each(Rank.grant_credits)

    def raise_error(self) -> None:
        """Raise the error of the error records, without waiting. All records are read, because a refusal is told
        once."""
        for error in [rank.error() for rank in self.ranks]:
            if error is not None:
                self.partly_sent = False
                raise error

    def refuse(self, phase: Phase, *, over: DispatchOutput | None = None) -> None:
        """Tell peers that this rank refused its arguments. If all ranks are in this process, there is no peer to tell.

        If a refused dispatch brought no rows, then no rank makes a combine of these rows, or a dispatch over its
        routing. Whether it was refused is known only when it is over, so the host waits here. A combine whose ``over``
        is not known counts as one of such rows while a refusal has not been raised.

        Raises ProtocolError if an earlier call was mismatched: no rank makes another one.
        """
        for rank in self.ranks:
            rank.synchronize()
        if any(rank.errors.has_mismatch for rank in self.ranks):
            self.raise_error()
        if len(self.ranks) > 1 or any(rank.poisoned or (phase == "combine" and rank.aborted) for rank in self.ranks):
            return
        if over is not None and over.handle.routing.brought_nothing():
            return
        self.partly_sent = True
        self._count_call(phase)
        self._end_rows(own_stream=True)
        self._each(refuse_dispatch if phase == "dispatch" else refuse_combine)
        self.partly_sent = False

    def abandon(self, failure: Failure) -> PeerError:
        """Poison the local ranks and their peers, and return the error.

        Peers wait in kernels, which see their own block alone, so a kernel of this rank tells them. They ask the
        failure detector about its words, so the detector hears first: then all ranks name the same cause.
        """
        if self._detector is not None and self.ranks[0].config.mode == "alltoall":
            failure = self._detector.declare(failure)
        error = self.ranks[0].errors.of(failure)
        for rank in self.ranks:
            rank.errors.keep(error)
            rank.give_up(failure)
        return error

    def warmup(self, num_sms: Sequence[int] = (), calls: Rehearsal = EVERY_CALL, *, load: bool = True) -> None:
        """Compile and load every kernel of these calls, without launching any. Does nothing on CPUs.

        ``num_sms``: SM limits of calls, beside that of the communicator.
        """
        if self._on_cpu:
            return
        for rank in self.ranks:
            with torch.no_grad(), rank.launcher.preparing(load=load):
                for limit in (None, *num_sms):
                    prepare_calls(rank, limit, calls)

    def check(self) -> None:
        """Synchronise and raise the first error: of a peer, then rows lost to ``capacity``, then ids out of range."""
        for rank in self.ranks:
            rank.synchronize()
        self.raise_error()
        for rank in self.ranks:
            nonsense = rank.errors.malformed()
            if nonsense is not None:
                raise nonsense
        losses = [(rank.config, *rank.errors.take_losses()) for rank in self.ranks]
        raise_losses(
            Losses(c.rank, dropped, c.row_capacity, invalid, c.num_experts, c.row_bound)
            for c, dropped, invalid in losses
        )

    def counters(self) -> list[Counters]:
        """Return the counters of each local rank, by copies beside its calls on CUDA."""
        return [rank.counters() for rank in self.ranks]

    def traffic(self) -> Traffic:
        """Return the bytes of messages and rows sent to other ranks so far. Synchronises on CUDA."""
        control = [rank.control.tolist() for rank in self.ranks]
        return Traffic(
            dispatch=sum(words[DISPATCH_BYTES] for words in control),
            combine=sum(words[COMBINE_BYTES] for words in control),
        )

    def dev_ptrs(self) -> list[Tensor]:
        """Per local rank [2, 3] int64 on the host: its own [dispatch, combine] x [send, recv, recv_count] addresses."""
        return [pointer_table(self._workspace, rank.table)[:, :, rank.me].cpu() for rank in self.ranks]

    def atomic_counters(self) -> list[tuple[Tensor, Tensor]]:
        """Per local rank the counters of both groups on the device: one block (words: ``moelink.memory.protocol``)."""
        return [(rank.control, rank.control) for rank in self.ranks]

    def open_trace(self) -> None:
        """Let calls of the local ranks stamp their phases. Raises as :meth:`Rank.open_trace`."""
        for rank in self.ranks:
            rank.open_trace()

    def close_trace(self) -> list[Tensor]:
        """Let calls stamp nothing more; return each local rank's trace buffer on the host. The host waits for calls."""
        return [rank.close_trace() for rank in self.ranks]

    def compare_clocks(self) -> list[tuple[int, int]] | None:
        """Compare the ranks' clocks (:class:`ClockComparison`); with rank 0 among the local ranks the result is whole.

        Collective. Interpreted ranks stamp one counter, so there is nothing to compare.
        """
        if self._on_cpu:
            return [(0, 0)] * self._workspace.world_size
        under_way = [ClockComparison(rank, self._comparisons) for rank in self.ranks]
        self._comparisons += 1
        results = [each.result() for each in under_way]
        return None if None in results else results[0]

    def change(self, identity: str, detector: FailureDetector | None, masked: Sequence[int]) -> None:
        """Go on in new blocks, which are where the old ones were, without the ranks ``masked``."""
        self._identity, self._detector, self.partly_sent = identity, detector, False
        self._under_way.clear()
        self.begin_without(masked)
        for rank in self.ranks:
            rank.change(detector)

    def begin_without(self, masked: Sequence[int]) -> None:
        """Say that the experts of the ranks ``masked``, which the blocks know of, are absent."""
        for rank in self.ranks:
            mark_absent(rank.absent, rank.experts, masked)

    def absent_on(self, device: torch.device) -> Tensor:
        """Return which experts are on masked ranks, [num_experts] bool, as :meth:`change` keeps it."""
        return self.ranks[0].absent

    def end_at(self, peers: Sequence[int]) -> None:
        """Poison the blocks of ``peers``, which are masked, so that none of their waits lasts. For CPU ranks."""
        (rank,) = self.ranks
        for peer in peers:
            poison(rank.memory.peer(peer), rank=rank.me, missing=peer, workspace=self._workspace)

    def close(self) -> None:
        """Release the blocks, after all calls under way unless the communicator is poisoned. Safe to call twice."""
        for rank in self.ranks:
            rank.close()
        self._under_way.clear()
