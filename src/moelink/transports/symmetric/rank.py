"""Hold one rank of the symmetric transport: its block, its launches and streams, and its error record."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.control.error_record import ErrorRecord
from moelink.control.failure_detector import FailureDetector
from moelink.control.probe import Failure
from moelink.env import DEBUG
from moelink.errors import ConfigError, MoelinkError, StateError
from moelink.kernels.dispatch.expired_rows import ep_overwrite_expired_rows_kernel
from moelink.kernels.launch.constants import combine_spec, dispatch_spec
from moelink.kernels.launch.device import clock_ticks, sm_limit_of
from moelink.kernels.launch.grid import sm_count
from moelink.kernels.launch.launcher import CompiledKernel, Launcher
from moelink.kernels.records import CreditNumbers, GiveUpNumbers, Peers
from moelink.kernels.sync.credit import ep_grant_credits_kernel
from moelink.kernels.sync.signals import ep_give_up_kernel
from moelink.lease import CallCount
from moelink.memory import SymmetricMemory, connect
from moelink.memory.choices import choices_in
from moelink.memory.nodes.watchdog import wait_for_device
from moelink.memory.protocol import ABORT_RECORD, PHASES, RECORD_WORDS
from moelink.memory.workspace import Workspace
from moelink.routing import ExpertMap, absent_experts
from moelink.tracing.device.buffer import TraceBuffer, require_traceable
from moelink.transports.counters import Counters
from moelink.transports.symmetric.counters import CounterReader
from moelink.transports.symmetric.notes import NotesLayout

P = TypeVar("P")


def _guard(rank: Rank) -> AbstractContextManager[None]:
    """Return a context in which, in debug mode, interpreted kernels may touch only the regions of the blocks, their
    arguments, and the memory whose addresses their words hold."""
    if not DEBUG.is_on():
        return nullcontext()
    from moelink.memory.bounds import AccessRange, guard_accesses, region_ranges

    network = rank.network
    ranges = region_ranges(rank.workspace.regions, rank.memory)
    ranges = [r for r in ranges if r.rank is None or network.table[r.rank] != 0]
    ranges += [AccessRange("network", None, t.data_ptr(), t.nbytes) for t in network.tensors]
    if rank.trace is not None:
        ranges.append(AccessRange("trace", None, rank.trace.words.data_ptr(), rank.trace.words.nbytes))
    return guard_accesses(ranges)


def give_up(launcher: Launcher, workspace: Workspace, failure: Failure, *, me: int, timeout: float) -> None:
    """Poison rank ``me``, whose ``launcher`` this is, and its peers, without waiting for pending work.

    ``timeout``: seconds within which the launch ends between nodes.
    """
    device = launcher.peers.control.device
    spec = combine_spec(workspace, device, row_weights=False, home_weights=False)
    kernel = launcher.kernel(ep_give_up_kernel, 1, S=spec)
    numbers = GiveUpNumbers(
        me=me, peer=failure.peer, phase=PHASES.index(failure.phase), call=failure.call,
        expected=failure.expected, got=failure.got, programs=1,
    )  # fmt: skip
    if device.type == "cpu":
        launcher.launch(kernel, lambda _: (), numbers)
        return
    beside = torch.cuda.Stream(device)  # launches of the call may wait on the others
    with torch.cuda.device(device), torch.cuda.stream(beside):
        launcher.launch(kernel, lambda _: (), numbers)
    if workspace.inter_node_ranks:  # the error record of this rank is written before the puts to other nodes
        wait_for_device(beside.query, lambda: True, timeout)
    else:
        beside.synchronize()


class SmBudget:
    """The SMs that the communicators of one device may occupy together.

    Two communicators, or two lanes of one, can be in flight at the same time (on streams of their own) only if the CTAs
    of both fit the device. If they do not, the waiting CTAs of one could keep out the senders of the other, on every
    rank in turn. A communicator with an SM limit (``num_sms``) takes part in this budget, each of its lanes for itself.
    One without a limit uses the whole device, and the caller's stream runs it after the others; so it has one lane.

    A device belongs to the whole process, and so does its budget. This is the only registry of the package that is not
    reached from a communicator. It keeps nothing alive.
    """

    def __init__(self) -> None:
        self._holders: weakref.WeakKeyDictionary[object, tuple[torch.device, int]] = weakref.WeakKeyDictionary()

    def claim(
        self, holder: object, device: torch.device, num_sms: int | None, *, available: int, lanes: int = 1
    ) -> None:
        """Promise ``num_sms`` of the ``available`` SMs of ``device`` to ``holder`` until it is released.

        ``lanes``: of the communicator whose first lane ``holder`` is. The others claim as much later, each for itself,
        but all must fit now.

        Raises:
            ConfigError: ``num_sms`` is more than the device has, or than other open communicators leave, or is None
                where several lanes run at the same time.

        Example: with 132 available and 100 claimed, a claim of 40 is refused and one of 32 accepted; with 2 lanes, one
        of 32 is refused and one of 16 accepted.
        """
        if num_sms is None:
            if lanes > 1:
                raise ConfigError(
                    "num_sms", f"at most {available // lanes} with lanes={lanes}, which share the SMs of {device}", None
                )
            return
        taken = sum(count for place, count in self._holders.values() if place == device)
        if lanes * num_sms + taken > available:
            raise ConfigError(
                "num_sms",
                f"at most {(available - taken) // lanes} ({available} on {device}, {taken} held by open communicators"
                + (f", {lanes} lanes)" if lanes > 1 else ")"),
                num_sms,
            )
        self._holders[holder] = (device, num_sms)

    def release(self, holder: object) -> None:
        """Give back the claim of ``holder``, if it has one."""
        self._holders.pop(holder, None)


SM_BUDGET = SmBudget()


class Rank:
    """One local rank: the common arguments of its launches, and their streams.

    ``in_turn``: launches of this rank and of others of this process run one after the other, as on CPUs they always do.
    """

    def __init__(
        self,
        config: EPConfig,
        memory: SymmetricMemory,
        workspace: Workspace,
        detector: FailureDetector | None = None,
        *,
        in_turn: bool = False,
    ) -> None:
        self.config, self.memory, self.workspace = config, memory, workspace
        self.device = memory.local.device
        self._in_turn = in_turn or self.device.type == "cpu"
        self.me = 0 if config.mode == "allreduce" else config.rank
        self.weight_dtype, self.notes = config.weight_dtype, NotesLayout.of(workspace)
        self.experts = ExpertMap(config.num_experts, config.world_size)
        self.first_expert = self.experts.first(config.rank)
        self.absent = absent_experts(config.num_experts, self.device)
        self.network = connect(memory, workspace, self.me)
        self.table = self.network.table
        if config.mode == "allreduce" and memory.world_size > 1:
            # A copy: the alignment of a slice would depend on the rank, and the compiled kernel on the alignment.
            self.table = memory.pointers[config.rank : config.rank + 1].clone()
        self.nothing_at = self.table.data_ptr()
        self.control = workspace.regions["control"].view(memory.local)
        # The kernels write it; the host reads it at every call without synchronising.
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")
        self._words = memoryview(self.record.numpy())  # type: ignore[arg-type]
        self.errors = self._new_errors(detector)
        # For the latest dispatch only: the scale kernel reads it before the next dispatch begins
        # (``kernels.dispatch.scales``).
        self.message_of_row = torch.empty(config.row_capacity, dtype=torch.int32, device=self.device)
        self.nothing = torch.zeros(2 * (workspace.world_size + 1), dtype=torch.int32, device=self.device)
        self.limit = clock_ticks(config.timeout, self.device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        available = sm_count(self.device)
        if self.device.type == "cuda":
            lanes = config.lanes if config.mode == "alltoall" else 1  # nothing waits in the other mode
            SM_BUDGET.claim(self, self.device, config.num_sms, available=available, lanes=lanes)
        self.launcher = Launcher(
            Peers(self.table, self.record, self.control), self.device, network=self.network,
            num_sms=sm_limit_of(config, self.device), available=available,
            guard=partial(_guard, self),
        )  # fmt: skip
        self.trace: TraceBuffer | None = None
        # The end of rows in place. In debug mode it also overwrites them.
        self.calls = CallCount(memory.local) if config.zero_copy else None
        self.overwrites_expired = DEBUG.is_on() and config.zero_copy
        self._plans: dict[Any, Any] = {}
        self._reader: CounterReader | None = None
        self._latest: torch.cuda.Stream | None = None
        self._latest_handle, self._index = -1, self.device.index
        self._forked = False

    def _new_errors(self, detector: FailureDetector | None) -> ErrorRecord:
        return ErrorRecord(
            self.record, self.control, rank=self.config.rank, me=self.me, world_size=self.workspace.world_size,
            detector=detector, ranks_per_node=self.workspace.node_size if self.workspace.inter_node_ranks else None,
            choices=partial(choices_in, self.memory.local, self.workspace),
        )  # fmt: skip

    def change(self, detector: FailureDetector | None) -> None:
        """Go on in the new blocks, which are where the old ones were."""
        self.record.zero_()
        taken, self.errors = self.errors.taken, self._new_errors(detector)
        self.errors.taken = taken
        self._reader = None
        if self.calls is not None:
            self.calls.begin("dispatch")

    def plan(self, make: Callable[..., P], **kind: Any) -> P:
        """Return the launch plan ``make(self, **kind)``, made at the first call. Each number of tokens has a few kinds.

        ``kind`` comes in the same order each time.
        """
        key = (make, self.trace is not None, *kind.values())
        if key not in self._plans:
            self._plans[key] = make(self, **kind)
        return self._plans[key]  # type: ignore[no-any-return]

    def open_trace(self) -> None:
        """Let calls stamp their phases, from the next one on.

        Raises:
            UnsupportedError: kernels cannot be traced here.
            StateError: a trace is open.
        """
        require_traceable(self.config, self.workspace, self.device)
        if self.trace is not None:
            raise StateError("trace: expected no open trace, got one; leave its `with` block first")
        self.trace = TraceBuffer(self.workspace.world_size, self.control)

    def close_trace(self) -> Tensor:
        """Let calls stamp nothing more, and return the trace buffer on the host. The host waits for calls."""
        assert self.trace is not None
        self.synchronize()
        trace, self.trace = self.trace, None
        return trace.close()

    def in_form(self, spec: Any) -> Any:
        """Return the launch constants ``spec`` of this rank's kernels, which stamp while a trace is open."""
        return spec if self.trace is None else self.trace.in_form(spec)

    def within(self, num_sms: int | None) -> tuple[EPConfig, Workspace, Callable[..., CompiledKernel]]:
        """Return the parts of a call's launch plan: its settings, its workspace, and the function that prepares
        kernels.

        ``num_sms``: the SM limit of the call, or None for that of the communicator. The workspace has the same layout.
        """
        if num_sms is None:
            return self.config, self.workspace, self.launcher.kernel
        config = dataclasses.replace(self.config, num_sms=num_sms)
        return config, Workspace(config), partial(self.launcher.kernel, num_sms=sm_limit_of(config, self.device))

    def launching(self, *, own_stream: bool) -> AbstractContextManager[None]:
        """Return a context for launches after all earlier calls. On CUDA it sets the device and the stream.

        ``own_stream``: on this rank's own stream, forked from the current one, so that the caller's next launches
        run beside it until :meth:`join`. If false, on the current stream, unless calls are still under way on the own
        one.
        """
        return nullcontext() if self.can_continue(own_stream=own_stream) else self._ordered(own_stream=own_stream)

    def can_continue(self, *, own_stream: bool) -> bool:
        """Return whether :meth:`launching` has nothing to do."""
        return self.stream is None or not (own_stream or self.stream_to_go_on() < 0)

    def stream_to_go_on(self) -> int:
        """Return the handle of the current stream (on a CPU 0) if its launches follow all earlier calls, else -1.

        It is -1 where calls are still under way on the own stream, and where the caller uses another stream than at the
        call before, or another device than this rank's: then :meth:`launching` has something to do.
        """
        if self.stream is None:
            return 0
        handle = self.launcher.current_stream()
        moved = handle != self._latest_handle or torch.cuda.current_device() != self._index
        return -1 if moved or self._forked else handle

    @contextmanager
    def _ordered(self, *, own_stream: bool) -> Iterator[None]:
        """Do the work of :meth:`launching` where streams must wait for one another or the device must change."""
        assert self.stream is not None
        with nullcontext() if torch.cuda.current_device() == self.device.index else torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            if self._latest is not None and self._latest != current and not torch.cuda.is_current_stream_capturing():
                current.wait_stream(self._latest)
            self._latest, self._latest_handle = current, current.cuda_stream
            if not own_stream and not self._forked:
                yield
                return
            self._forked = True
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                yield

    def join(self) -> None:
        """On CUDA: make the current stream continue after this rank's own. The host does not wait."""
        if self.stream is not None and self._forked:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            self._latest, self._latest_handle, self._forked = current, current.cuda_stream, False

    def has_received(self) -> None:
        """Grant credits after a receiving half if ranks take turns, unless rows are in place until the next call."""
        if self.calls is None:
            self.grant_credits()

    def grant_credits(self) -> None:
        """Grant credits without a sending half, where ranks take turns.

        The next call's sending half also grants them. But there a sender would wait for a launch that comes after it.
        """
        if not self._in_turn or self.config.mode == "allreduce":
            return
        spec = combine_spec(self.workspace, self.device, row_weights=False, home_weights=False)
        kernel = self.launcher.kernel(ep_grant_credits_kernel, 1, S=spec)
        self.launcher.launch(kernel, lambda _: (), CreditNumbers(self.me, 1))

    def rows_in_place(self, rows: int) -> dict[str, Tensor]:
        """Return views of the tokens and scales of up to ``rows`` messages of each source, by field of an output."""
        assert self.calls is not None
        return self.calls.views(rows, self._views_of)

    def _views_of(self, rows: int) -> dict[str, Tensor]:
        """Make these views."""
        fmt, message, views = self.config.format, self.workspace.message, {}
        with torch.inference_mode(False):  # later calls, in any mode, return the same views
            messages = self.workspace.regions["messages"].view(self.memory.local)[:, :rows]
            for field, part, dtype in (("tokens", "payload", fmt.payload_dtype), ("scales", "scales", fmt.scale_dtype)):
                if dtype is not None:
                    region = message[part]
                    views[field] = messages[:, :, region.offset : region.end].view(dtype)
        return views

    def overwriting(self) -> tuple[Any, ...]:
        """Return the arguments of the launch that overwrites rows which the launch after it ends."""
        spec = dispatch_spec(
            self.workspace, self.device, input_dtype=self.config.format.payload_dtype, quantized=True, weights=False
        )
        kernel = self.launcher.kernel(ep_overwrite_expired_rows_kernel, sm_count(self.device), S=spec)
        return kernel, lambda _: (), CreditNumbers(self.me, kernel.programs)

    def overwrite_expired_rows(self) -> None:
        """Overwrite the rows of the dispatch before, if they have not ended yet. The launch after this one ends them.

        In debug mode, where rows stay where they arrived; else do nothing.
        """
        if self.overwrites_expired:
            self.launcher.launch(*self.overwriting())

    def give_up(self, failure: Failure) -> None:
        """Poison this rank and its peers without waiting for pending work."""
        if self.config.mode != "allreduce":  # there nobody waits, and the table has one rank
            give_up(self.launcher, self.workspace, failure, me=self.me, timeout=self.config.timeout)

    def close(self) -> None:
        """Release the block, after all calls under way unless the communicator is poisoned."""
        if not self.poisoned and not self.workspace.inter_node_ranks:  # between nodes the memory waits, with a limit
            self.synchronize()
        SM_BUDGET.release(self)
        self._reader = None
        try:
            self.network.close()
        finally:
            self.memory.close()
            # A reference to the block from here would keep it mapped for as long as the communicator lives.
            self.control, self.table = self.nothing.long(), self.memory.pointers
            self.errors.control, self.errors.choices = self.control, None
            self.launcher.forget()
            self._plans = {}
            if self.calls is not None:
                self.calls.close()

    def synchronize(self) -> None:
        """Make the host wait for this rank's kernels, and on CUDA for the current stream, on which graphs may replay
        more of them: a captured call has noted the stream of the capture.

        Between nodes, where a put may wait inside NVSHMEM for ever, it waits only for the timeout once a failure is
        known.

        Raises:
            PeerTimeoutError: a peer has reported a failure, and this rank's kernels did not end after that.
        """
        for stream in self._streams():
            if not self.workspace.inter_node_ranks:
                stream.synchronize()
            elif not wait_for_device(stream.query, self._has_failed, self.config.timeout) and not self.poisoned:
                reported = self.errors.reported
                assert reported is not None
                raise reported.with_traceback(None)

    def _streams(self) -> list[torch.cuda.Stream]:
        """Return the streams that may have kernels of this rank; one may come twice."""
        streams = [stream for stream in (self.stream, self._latest) if stream is not None]
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                if not torch.cuda.is_current_stream_capturing():
                    streams.append(torch.cuda.current_stream())
        return streams

    def _has_failed(self) -> bool:
        """Return whether a failure is known, here or at a peer that reported it."""
        return self.poisoned or self.errors.reported is not None

    def counters(self) -> Counters:
        """Return the counters of this rank, for one thread at a time, beside its calls."""
        if self._reader is None:
            self._reader = CounterReader(self.config, self.workspace, self.memory.local, self.me)
        return self._reader.read(self.errors.taken, self.poisoned)

    @property
    def poisoned(self) -> bool:
        """Whether a wait of this communicator has expired, here or at a peer that said so."""
        return self._words[0] != 0

    @property
    def aborted(self) -> bool:
        """Whether a peer refused a call and this rank has not raised that yet."""
        return self._words[ABORT_RECORD] != 0

    def has_error(self) -> bool:
        """Return whether :meth:`error` would return one, in less time."""
        words = self._words
        return bool(words[0] or words[ABORT_RECORD] or self.network.failure is not None)

    def error(self) -> MoelinkError | None:
        """Return the error to raise, or None.

        First the error of a stopped network; else that of the error record: the first expired wait, or (once) a
        refusal.
        """
        if self.network.failure is not None:
            return self.network.failure.with_traceback(None)
        return self.errors.error()
