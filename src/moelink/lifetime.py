"""Hold a communicator beside its calls: its lanes, checks and counters, recovery, and its end."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store, distributed_c10d  # type: ignore[attr-defined]

from moelink.config import EPConfig
from moelink.control.admission import applicants
from moelink.control.exchange import Peers
from moelink.control.membership import Membership
from moelink.control.process import OfThisProcess
from moelink.errors import (
    ArgumentError,
    ConfigMismatchError,
    MembershipError,
    PeerError,
    PeerTimeoutError,
    PendingError,
    StateError,
    UnsupportedError,
)
from moelink.ops.changes import admit, mask
from moelink.ops.context import OperatorContext
from moelink.ops.lanes import Lanes
from moelink.tracing import Trace
from moelink.tracing.session import tracing
from moelink.transports.ahead import Place, Prepared, Step, prepare
from moelink.transports.base import EVERY_CALL, FastPath, Rehearsal, Traffic

if TYPE_CHECKING:
    from typing_extensions import Self


class Lifetime(OfThisProcess):
    """A communicator beside its calls, which :class:`moelink.Communicator` adds."""

    def __init__(self, lanes: Lanes, further: Sequence[Self] = (), number: int = 0) -> None:
        """``lanes``: first this one, whose number is ``number``; then those of ``further``."""
        self._lanes, self._further, self._number = lanes, tuple(further), number
        self._context = lanes.contexts[0]
        self._session = self._context.session
        self._fast_path: FastPath | None = self._session.fast_path()
        if self.config.on_failure == "mask" and not number:
            own = weakref.WeakMethod(self._mask_failed)
            for lane in (self, *self._further):
                lane._session.after_end = lambda error: (own() or _leave_it)(error)

    @classmethod
    def _over(cls, lanes: Lanes) -> Self:
        """Return the communicator of ``lanes``, all of them."""
        return cls(lanes, [cls(Lanes([lane]), number=number) for number, lane in enumerate(lanes.contexts) if number])

    @property
    def config(self) -> EPConfig:
        """The validated configuration."""
        return self._session.configs[0]

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._session.devices[0]

    def lane(self, number: int) -> Self:
        """Return lane ``number`` of ``config.lanes``: a communicator of the same ranks with memory of its own.

        Lane 0 is this communicator. Calls of one phase may be in flight in several lanes, as batches that overlap need.
        All ranks make the calls of all lanes in the same order; their waits need no order. An output belongs to its
        lane. Lanes end together: an error that poisons one poisons all, and only lane 0 is closed or recovered, with
        the others.

        Raises:
            ArgumentError: there is no such lane.
        """
        count = 1 + len(self._further)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise ArgumentError("number", f"a lane in [0, {count}), of as many as init(lanes=) says", number)
        return (self, *self._further)[number]

    def _require_lane_0(self, what: str) -> None:
        if self._number:
            raise StateError(
                f"{what}: expected the communicator that init returned, got its lane {self._number}; call {what} on "
                "lane 0, which includes all lanes"
            )

    def warmup(
        self, *, num_sms: Sequence[int] = (), calls: Rehearsal = EVERY_CALL, gradients: bool = False,
        beside: Sequence[Step] = (),
    ) -> Prepared:  # fmt: skip
        """Compile and load every kernel before the first call, for all lanes, several at a time. Nothing is launched;
        on the collective transport there is nothing to do.

        Args:
            num_sms: also for calls with these SM limits of their own.
            calls: those that will be made; default all of them.
            gradients: also for the backwards. Their communicators are made now, so it is collective then.
            beside: further launches that are prepared with these (:class:`moelink.transports.ahead.Step`), as
                :meth:`moelink.nn.MoE.warmup` has them.

        Returns:
            The names of the kernels that were compiled or read from the cache on disk, and the seconds.
        """
        size = self.config.node_size
        own = partial(self._lanes.warmup, num_sms, calls, gradients=gradients)
        if self.device.type == "cpu":  # where nothing is compiled
            own()
            return Prepared()
        return prepare([own, *beside], Place(self.config.rank % size, size))

    def check(self) -> None:
        """Synchronise and raise the first error: a peer's, CapacityError, or RoutingError since the last check."""
        self._lanes.check()

    def traffic(self) -> Traffic:
        """Return the bytes of rows and their metadata that this rank has sent to other ranks, gradients included."""
        return self._lanes.traffic()

    def trace(self) -> AbstractContextManager[Trace]:
        """Return a context that stamps when the CTAs of its calls read, wait, store and publish (docs/performance.md).

        Inside, calls run kernels that stamp; others stay as they are. Leaving it is collective: ranks align clocks and
        gather. Raises UnsupportedError where no kernels can stamp, PeerTimeoutError where a peer does not leave it.
        """
        self._session.require_open("trace")
        if self._session.masked:
            raise UnsupportedError(
                f"trace: expected all ranks in the communicator, got ranks {list(self._session.masked)} masked; admit "
                "them first"
            )
        return tracing(self._session, self._context.world)

    @property
    def dev_ptrs(self) -> Tensor:
        """Addresses of this rank's [dispatch, combine] x [send, recv, recv_count] buffers, [2, 3] int64 on the host.

        0 for a buffer that does not exist. Raises UnsupportedError on the collective transport.
        """
        return self._session.dev_ptrs()[0]

    @property
    def atomic_counters(self) -> tuple[Tensor, Tensor]:
        """Counters of the dispatch and of the combine group on the device (words: ``moelink.memory.protocol``), int64.

        Raises UnsupportedError on the collective transport.
        """
        return self._session.atomic_counters()[0]

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of these ranks, in their order: that of ``init``, or after :meth:`recover` moelink's own
        connections over gloo, for exchanges between calls; None for one rank.

        The latter serves this package's functions with a ``group``, and ``torch.distributed``'s on tensors of the CPU,
        as long as the communicator lives.
        """
        return group_of(self._context)

    def recover(self, ranks: Iterable[int]) -> Self:
        """Make a new communicator over ``ranks`` of this one, the survivors, in the same processes. Collective over
        them.

        All of them call it with the same ranks, usually after a call raised PeerTimeoutError (whose ``peer`` is the
        rank to leave out). Survivors are numbered anew in ascending order, and experts are dealt out anew over them
        (see ``config.num_local_experts``; weights have to follow). Everything else of the configuration stays. This
        communicator is closed; the outputs of its finished calls stay valid, but cannot be combined any more. How ranks
        agree, and why late writes of a rank left out do no harm: :mod:`moelink.control.recovery`, docs/faults.md.

        It may be called again: on this communicator when it raised, on the new one when another rank dies.

        Args:
            ranks: numbers in *this* communicator, this rank's included, in any order.

        Raises:
            ArgumentError: ``ranks`` is not acceptable here; nothing has changed.
            ConfigMismatchError: another rank recovers with other ranks.
            PeerTimeoutError: a rank in the list did not come in time, or (PeerLostError) is gone. If it names this
                rank, the others have gone on without it: it cannot recover any more.
            ClosedError: after :meth:`close`.
            StateError: this is a lane other than lane 0.
        """
        self._require_lane_0("recover")
        return self._over(self._lanes.recover(ranks))

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that take part in calls, ascending: all that are not masked."""
        return tuple(rank for rank in range(self.config.world_size) if rank not in self._session.masked)

    def mask(self, ranks: Iterable[int], *, experts: Sequence[int] | None = None) -> Membership:
        """Go on without ``ranks``, on this communicator and in its memory. Collective over the ranks that go on.

        All of them call it with the same ranks, between calls or after a call raised PeerTimeoutError (whose ``peer``
        is the rank to mask). Ranks keep their numbers and experts, and captured graphs and bound calls stay valid. In
        later calls a (token, slot) pair for an expert of a masked rank is dropped and adds nothing to its token's sum:
        ``recv.masked`` counts them, ``recv.weight_share()`` says how much router weight is left, and
        ``recv.rescale(out)`` divides by it. ``absent_experts`` says which experts these are. Outputs of earlier
        dispatches cannot be combined any more. A masked rank that lives is told: its calls raise RankMaskedError. It,
        or a new process in its place, may come back (:meth:`admit`). The protocol: docs/protocol.md.

        Args:
            ranks: ranks that take part, without this one.
            experts: the expert that each of the ``num_experts`` slots holds, if a placement has replicas: a mask that
                would leave one of them without a slot is refused. None: tokens of experts that are lost are dropped.

        Raises:
            ArgumentError: ``ranks`` or ``experts`` are not acceptable here; nothing has changed.
            ConfigMismatchError: another rank masks other ranks.
            PeerTimeoutError: a rank that goes on did not come in time, or (PeerLostError) is gone. If it names this
                rank, the others have gone on without it.
            UnsupportedError: symmetric memory of NVSHMEM, or of devices whose driver maps no block anew.
            ClosedError, PendingError, StateError: the communicator's state does not allow it.
        """
        self._require_lane_0("mask")
        made = mask(self._lanes, ranks, experts)
        self._changed()
        return made

    def admit(self, ranks: Iterable[int], store: Store) -> Membership:
        """Let masked ranks take part again, as new processes or the same, or spare ranks for the first time
        (``init(spare_ranks=...)``). Collective over all that take part then.

        Between two calls, the ranks that go on call it with the same ranks. In place of each a new process calls
        :func:`moelink.join` meanwhile, or the masked process, if it lives, ``admit`` with its own rank alone. They have
        ``timeout`` seconds to come. Calls wait meanwhile; :meth:`applicants` says who has come already, so that nobody
        waits for a process to start. Weights of its experts have to follow.

        Args:
            ranks: masked ranks; on a rank that was masked itself, this one alone.
            store: a store of torch's that all of them reach, and that outlives ranks: the launcher's, for example.

        Raises:
            ArgumentError: a rank is not masked; its peers raise PeerAbortedError. Nothing has changed.
            ConfigMismatchError: ranks were given differently, or a newcomer has another version or other settings;
                raised on every rank. Nothing has changed.
            PeerTimeoutError: a rank did not come in time, or (PeerLostError) is gone. Nothing has changed.
            UnsupportedError: symmetric memory of several nodes, or of devices whose driver maps no block anew.
            ClosedError, PendingError, StateError: as :meth:`mask`.
        """
        self._require_lane_0("admit")
        made = admit(self._lanes, ranks, store)
        self._changed()
        return made

    def applicants(self, store: Store) -> tuple[int, ...]:
        """Return the masked ranks that wait in ``store`` to be admitted. Not collective, and waits for none."""
        self._session.require_open("applicants")
        return applicants(store, self._session.masked)

    @property
    def absent_experts(self) -> Tensor:
        """[num_experts] bool on the device: experts of masked ranks. :meth:`mask` and :meth:`admit` write it in place,
        so that a captured graph which chooses replicas by it finds them."""
        return self._session.transport.absent_on(self.device)

    def _mask_failed(self, error: PeerTimeoutError) -> None:
        """Mask the rank that ``error`` names, and those that are found to be gone meanwhile, and raise MembershipError.

        Return if the error names no other rank, which leaves it to the caller. Ranks whose calls failed because of
        different peers propose different lists at first; each finds the other's peer gone or silent, and adds it.
        """
        lost, before, tries = {error.peer}, self._session.masked, 2 * self.config.world_size
        while error.peer not in (-1, self.config.rank, *before) and tries:
            tries -= 1
            try:
                made = self.mask(lost)
            except ConfigMismatchError:
                continue
            except PeerTimeoutError as further:
                error = further
                lost.add(further.peer)
                continue
            raise MembershipError(self.config.rank, [rank for rank in made.masked if rank not in before]) from error

    def _changed(self) -> None:
        """Forget the calls that were prepared for the ranks of before."""
        lanes: Sequence[Lifetime] = (self, *self._further)
        for ep in lanes:
            ep._fast_path = ep._session.fast_path()

    def close(self) -> None:
        """Release everything moelink made, never the caller's process groups. A second call does nothing.

        Raises:
            StateError: this is a lane other than lane 0, which closes the others with it.
        """
        self._require_lane_0("close")
        self._session.guard.require_own_process("close")
        self._lanes.close()

    def __enter__(self) -> Self:
        self._require_lane_0("close")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session.guard.is_forked:  # nothing of it is this process's to release
            return
        try:
            if error is not None:
                self._session.leave()
        finally:
            self.close()

    def __repr__(self) -> str:
        config = self.config
        state = ", closed" if self._session.closed else ""
        return (
            f"Communicator(rank={config.rank}, world_size={config.world_size}, num_experts={config.num_experts}, "
            f"topk={config.topk}, hidden_size={config.hidden_size}, max_tokens_per_rank={config.max_tokens_per_rank}, "
            f"dispatch_format={config.dispatch_format!r}, layout={config.layout!r}, mode={config.mode!r}, "
            f"transport={self._session.transport.name!r}, device='{self.device}'{state})"
        )


def _leave_it(error: PeerTimeoutError) -> None:
    """Do nothing: the communicator that would mask a rank is gone."""


def peers_of(ep: Lifetime, group: ProcessGroup | None, what: str, busy: float = 0.0) -> Peers:
    """Return the ranks of ``ep``, which are those of ``group`` in the same order, for exchanges over that group.

    Args:
        ep: whose timeout and probe servers say how long a rank is waited for.
        group: the process group; None for that of ``ep``.
        what, busy: as in :class:`~moelink.control.exchange.Peers`.

    Raises:
        StateError: some ranks are masked.
    """
    if ep._session.masked:
        raise StateError(
            f"{what}: expected all ranks of the communicator present, got ranks {list(ep._session.masked)} masked; "
            "admit them, or call recover with the others, first"
        )
    return Peers(group or group_of(ep._context), ep.config.timeout, ep._session.detector, busy, what)


def group_of(context: OperatorContext) -> ProcessGroup | None:
    """Return the process group of the ranks of a communicator. torch knows the mesh of survivors from the first call
    on, as a group that no new_group made, and until the communicator is freed."""
    world, known = context.world, distributed_c10d._world
    if world.group is not None or world.control is None:
        return world.group  # type: ignore[no-any-return]
    mesh = world.control
    if mesh not in known.pg_map:
        known.pg_map[mesh] = ("gloo", world.store)
        known.pg_backend_config[mesh] = "cpu:gloo"  # type: ignore[assignment]
        known.pg_group_ranks[mesh] = {rank: rank for rank in range(world.world_size)}
        weakref.finalize(context, _forget, mesh).atexit = False
    return mesh  # type: ignore[no-any-return]


def _forget(mesh: ProcessGroup) -> None:
    known = distributed_c10d._world
    for table in (known.pg_map, known.pg_backend_config, known.pg_group_ranks):
        table.pop(mesh, None)  # type: ignore[attr-defined]


def lanes_of(ep: Lifetime) -> Lanes:
    """Return the lanes of ``ep``. Raises StateError if it is a lane other than lane 0."""
    ep._require_lane_0("metrics")
    return ep._lanes


def require_running(ep: Lifetime) -> None:
    """Raise the error that has ended ``ep``, if one has."""
    ep._session.raise_fate()


def require_no_pending(ep: Lifetime) -> None:
    """Raise PendingError if a call of ``ep`` is under way, whose rows may travel over the same connections."""
    for lane in (ep, *ep._further):
        for phase, started in lane._session._pending.items():
            if started.holder() is not None:
                raise PendingError(
                    f"{phase}: expected no pending {phase}, got one without wait(), {started.words}; call its wait() "
                    "first"
                )


def end_outside_calls(ep: Lifetime, cause: PeerTimeoutError | None) -> PeerError:
    """End ``ep`` and tell its peers, because a collective change outside its calls has failed. Returns the error that
    all its later calls raise: one about the rank that ``cause`` names, or about this one, which was interrupted."""
    return ep._session.end(cause)
