"""Every error moelink raises, as one tree.

::

    MoelinkError
    +-- ConfigError            (ValueError)    a field of EPConfig is not acceptable
    |   +-- ConfigMismatchError                ranks disagree about a field
    +-- ArgumentError          (ValueError)    an argument of a call is not acceptable
    +-- StateError             (RuntimeError)  the call does not fit the communicator's state
    |   +-- ClosedError                        the communicator is closed
    |   +-- ExpiredRowsError                   rows in the workspace (zero_copy) are used after the next call
    |   +-- ConcurrencyError                   two threads call one communicator at the same time
    |   +-- ForkedError                        a child process uses its parent's communicator
    |   +-- ForeignHandleError                 a DispatchOutput of another communicator or rank
    |   +-- PendingError                       a second operation while one of its kind is pending
    |   +-- MembershipError                    ranks were masked, so the step has to be repeated
    +-- UnsupportedError       (RuntimeError)  this transport, device or installation cannot do it
    +-- NetworkTimeoutError    (RuntimeError)  a wait inside the network's library did not end
    +-- CapacityError          (RuntimeError)  rows did not fit ``capacity`` (they were counted and dropped)
    +-- RoutingError           (RuntimeError)  ids outside [-1, num_experts) were met on a device
    +-- PeerError              (RuntimeError)  another rank is the cause
        +-- PeerAbortedError                   a peer refused its arguments; this communicator stays usable
        +-- ProtocolError                      peers are not making the same call, or data is malformed; it has ended
        +-- PeerTimeoutError                   a peer did not arrive in time; the communicator is poisoned
            +-- PeerLeftError                  ... because an exception ended its part
            +-- PeerLostError                  ... because its process is gone
            +-- UndeliveredError               ... because what it sent over the network did not arrive
            +-- RankMaskedError                ... as its peers go on without this rank

Each class says when it is raised and how to recover. Every message says what was expected, what moelink got, and what
to do: ``<where>: expected <what>, got <what>; <what to do>``. For a refused argument or field, "expected" says what to
pass.
"""

from __future__ import annotations

from collections.abc import Sequence


class MoelinkError(Exception):
    """Base of every error raised by moelink."""


class ConfigError(MoelinkError, ValueError):
    """A configuration field has an unacceptable value. Recover: pass a value that the message expects."""

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got!r}")
        self.field, self.expected, self.got = field, expected, got


class ConfigMismatchError(ConfigError):
    """Ranks were initialised with different values of a field. Raised by ``init`` on every rank.

    Recover: give all ranks the same value. ``values`` maps each differing value to the ranks that passed it.
    """

    def __init__(self, field: str, values: dict[str, Sequence[int]]) -> None:
        parts = "; ".join(
            f"{value} on rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}" for value, r in values.items()
        )
        super().__init__(field, "the same value on every rank", parts)
        self.values = values


class ArgumentError(MoelinkError, ValueError):
    """An argument of a call is refused, before any data moves. The communicator stays usable.

    Recover: correct the argument and repeat the call on every rank (peers get :class:`PeerAbortedError`).
    """

    def __init__(self, name: str, expected: str, got: object) -> None:
        super().__init__(f"{name}: expected {expected}, got {got}")
        self.name, self.expected, self.got = name, expected, got


class StateError(MoelinkError, RuntimeError):
    """The call does not fit the state of the communicator."""


class ClosedError(StateError):
    """A call on a closed communicator. Recover: make a new one with ``moelink.init``."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: the communicator is closed; make another one with moelink.init")


class ExpiredRowsError(StateError):
    """Rows of a dispatch with ``zero_copy`` are used after their time, which the next call of the lane ends.

    Recover: use ``recv.tokens`` and ``recv.scales`` before the next dispatch or combine of the same lane, and combine
    before the next dispatch; clone what is needed for longer, or use a lane for each batch under way.
    """

    def __init__(self, what: str, expected: str, got: str) -> None:
        super().__init__(
            f"{what}: expected {expected}, got {got}, and rows with zero_copy=True stay in the workspace only until "
            "then; use them earlier, clone them, or use a lane for each batch (init(lanes=))"
        )


class ConcurrencyError(StateError):
    """A thread calls a communicator while another thread is in one of its calls. Recover: call it from one thread."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: expected one thread in the communicator at a time, got a call while another thread is in one; "
            "make all calls of a communicator from one thread"
        )


class ForkedError(StateError):
    """A child of a fork uses the communicator of its parent, whose part it cannot take. The parent's goes on.

    Recover: use the communicator in the process that made it, or start processes with ``spawn`` and call
    ``moelink.init`` in each.
    """

    def __init__(self, what: str, *, owner: int, child: int) -> None:
        super().__init__(
            f"{what}: expected the process that made the communicator ({owner}), got a child of it ({child}), which "
            "cannot take its part; use the communicator in its own process, or call moelink.init in a process started "
            "with 'spawn'"
        )


class ForeignHandleError(StateError):
    """``recv`` belongs to another communicator, or to another rank of it. Recover: pass this rank's own ``recv``.

    The same is raised if ranks were masked or admitted since its dispatch, also in a backward: repeat the step.
    """


class PendingError(StateError):
    """A second dispatch (or combine) was started while one is pending. Recover: ``.wait()`` for the first."""


class MembershipError(StateError):
    """With ``on_failure="mask"`` the ranks of a communicator have changed, because a call failed: it was not made.

    ``masked`` are the ranks that calls go on without from now, ``rank`` is this one. Every rank that goes on raises
    this once, in the call that failed there or in its next one. Recover: repeat the step from its first dispatch, on
    all of them; outputs of earlier dispatches cannot be combined any more.
    """

    def __init__(self, rank: int, masked: Sequence[int]) -> None:
        super().__init__(
            f"rank {rank}: ranks {list(masked)} are masked now: expected all ranks in this call, got none from them; "
            "repeat the step from its first dispatch, on all ranks that go on"
        )
        self.rank, self.masked = rank, tuple(masked)


class UnsupportedError(MoelinkError, RuntimeError):
    """This transport, device or installation cannot do what was asked. Recover: as the message says."""


class NetworkTimeoutError(MoelinkError, RuntimeError):
    """A wait inside NVSHMEM, which has no time limit, did not end: its start, or kernels whose puts wait in its queues.

    ``rank`` and ``node`` are those of the process that waited, ``what`` is what did not end, ``seconds`` the limit.
    Recover: NVSHMEM cannot be started again in this process, so end it and start the job again.
    """

    def __init__(self, what: str, *, rank: int, node: int, seconds: float) -> None:
        super().__init__(
            f"rank {rank} of node {node}: {what} did not end: expected its end within {seconds:g} s, got none; start "
            "the job again after a look at the network and at the rank that failed first (moelink doctor, "
            "NVSHMEM_DEBUG=INFO), or pass a larger timeout if it only takes longer"
        )
        self.what, self.rank, self.node, self.seconds = what, rank, node, seconds


_ROOM = "raise {bound} (None never drops rows), or max_tokens of a dispatch where another rank sent more,"


class CapacityError(MoelinkError, RuntimeError):
    """Rows did not fit ``capacity`` (layout "masked": ``rows_per_expert``), or the output of a dispatch with
    ``max_tokens``. They contributed zero and were counted.

    Raised by ``check()``. Recover: raise ``capacity`` (None never overflows) or ``max_tokens``, with layout "masked"
    ``rows_per_expert``, with the contract's launchers the rows of ``output_tokens``, or balance the routing.
    ``capacity`` is the value of the field called ``bound``.
    """

    def __init__(self, rank: int, dropped: int, capacity: int, *, remedy: str = _ROOM, bound: str = "capacity") -> None:
        super().__init__(
            f"rank {rank}: {dropped} rows did not fit {bound} {capacity}: expected no dropped rows, got {dropped} "
            f"since the last check; {remedy.format(bound=bound)} or balance the routing"
        )
        self.rank, self.dropped, self.capacity = rank, dropped, capacity


class RoutingError(MoelinkError, RuntimeError):
    """Expert ids on a device were outside [-1, num_experts) and acted as -1.

    Raised by ``check()``. Recover: correct the ids.
    """

    def __init__(self, rank: int, count: int, num_experts: int) -> None:
        super().__init__(
            f"rank {rank}: {count} expert ids acted as -1: expected ids in [-1, {num_experts}), got {count} outside "
            "since the last check; correct topk_ids"
        )
        self.rank, self.count = rank, count


class PeerError(MoelinkError, RuntimeError):
    """Another rank is the cause. ``rank`` is the rank that raises, ``peer`` the rank at fault.

    ``ends_communicator`` says whether all later calls of the communicator raise this error.
    """

    ends_communicator = False

    def __init__(self, message: str, *, rank: int, peer: int, phase: str, call: int) -> None:
        super().__init__(message)
        self.rank, self.peer, self.phase, self.call = rank, peer, phase, call


class PeerAbortedError(PeerError):
    """A peer refused its own arguments and said so. No data moved.

    Recover: correct the arguments on that peer, where the cause is raised, and repeat the call on every rank.
    """

    def __init__(self, *, rank: int, peer: int, phase: str, call: int) -> None:
        super().__init__(
            f"rank {rank}: rank {peer} refused its arguments in {phase} (call {call}): expected valid arguments on "
            f"every rank, got a refusal; correct them as the error on rank {peer} says, and repeat the call on every "
            "rank",
            rank=rank,
            peer=peer,
            phase=phase,
            call=call,
        )


class ProtocolError(PeerError):
    """Peers do not make the same call (a skipped call, another phase, other options), or sent malformed data.

    If calls differ, they are *mismatched*: every rank raises this error. It names ``peer``, the first rank that differs
    from most ranks, and both values, unless later calls have overwritten them; ``mismatch`` holds them
    (``control.mismatch.Mismatch``), None for malformed data. A mismatch ends the communicator: every later call on
    every rank raises it again. Recover: make every rank issue the same sequence of calls, and ``recover`` with all
    ranks, or ``close()`` and ``init`` again.

    Malformed data ends it: on the collective transport later calls raise the same error, on the symmetric one each
    ``check()`` does. Recover: ``close()`` and ``init`` again.
    """

    def __init__(
        self, message: str, *, rank: int, peer: int, phase: str, call: int, mismatch: object | None = None
    ) -> None:
        super().__init__(message, rank=rank, peer=peer, phase=phase, call=call)
        self.mismatch, self.ends_communicator = mismatch, mismatch is not None


class PeerTimeoutError(PeerError):
    """A peer did not arrive within ``timeout``. The communicator is poisoned: every later call raises this error.

    ``peer`` is -1 when it is not known which one. ``expected`` and ``got`` are its progress: the call number it had to
    reach and the one it had reached (None when it did not answer). ``node`` is the node of ``peer`` (ranks ``node *
    ranks_per_node`` and those that follow), None where there is one node or it is not known. Recover: ``close()`` and
    ``init`` again, or ``recover(ranks)`` over the survivors.
    """

    ends_communicator = True

    def __init__(
        self, *, rank: int, peer: int, phase: str, call: int, expected: int, got: int | None, detail: str = "",
        node: int | None = None,
    ) -> None:  # fmt: skip
        who = _named(peer, node)
        where = f"{phase} (call {call})" if call > 0 else phase
        wanted = f"call {expected}" if call > 0 else "it within the timeout"
        reached = f"call {got}" if got is not None else "no answer" if call > 0 else "nothing"
        because = f" ({detail})" if detail else ""
        text = f"rank {rank}: {who} did not arrive in {where}: expected {wanted}, got {reached}{because}; "
        super().__init__(text + self._advice(rank, peer, phase), rank=rank, peer=peer, phase=phase, call=call)
        self.expected, self.got, self.node = expected, got, node

    @staticmethod
    def _advice(rank: int, peer: int, phase: str) -> str:
        """What to do, by the phase in which ``peer`` did not arrive."""
        if phase == "init":
            return "start every rank, check that each reaches the others, and init again"
        if phase in ("recover", "mask", "admit"):
            return f"call {phase} with the same ranks on all of them, or leave out the rank that is missing"
        if peer < 0 or peer == rank:
            return "close and init again"
        return f"close and init again, or recover without rank {peer}"


def _named(peer: int, node: int | None) -> str:
    """Return how a message calls ``peer``."""
    if peer < 0:
        return "a rank"
    return f"rank {peer}" if node is None else f"rank {peer} of node {node}"


class PeerLeftError(PeerTimeoutError):
    """An exception has ended a rank's part: it left the ``with`` block, or entered a call that had begun.

    Its peers raise this at once, and so does the rank itself in later calls. Recover as from PeerTimeoutError; a rank
    that was only interrupted may take part in ``recover``.
    """

    def __init__(
        self, *, rank: int, peer: int, phase: str, call: int, interrupted: bool, node: int | None = None
    ) -> None:
        got = f"an exception that entered its {phase} (call {call})" if interrupted else "an exception there"
        left = f"has left the communicator: its {phase} (call {call}) was interrupted"
        text = (
            f"rank {rank}: {_named(peer, node)} {left if interrupted else 'left the communicator'}: expected it to end "
            f"each call, and its `with` block without an exception, got {got}; {self._advice(rank, peer, phase)}"
        )
        PeerError.__init__(self, text, rank=rank, peer=peer, phase=phase, call=call)
        self.expected, self.got, self.node, self.interrupted = call, None, node, interrupted


class PeerLostError(PeerTimeoutError):
    """A peer's process is gone: it refuses connections to its probe server. Recover as from PeerTimeoutError."""


class UndeliveredError(PeerTimeoutError):
    """A peer of another node lives and has entered the call, but what it sent over the network did not arrive.

    A link is cut, a network card or switch lost what it carried, or the peer's kernels do not run. Recover as from
    PeerTimeoutError, once the network between the two nodes is in order.
    """

    def __init__(self, *, rank: int, peer: int, phase: str, call: int, expected: int, node: int | None = None) -> None:
        text = (
            f"rank {rank}: what {_named(peer, node)} sent in {phase} (call {call}) did not arrive over the network: "
            f"expected its signal of call {expected}, got none although it has entered that call; check the network of "
            f"its node and whether its kernels run (moelink doctor), then {self._advice(rank, peer, phase)}"
        )
        PeerError.__init__(self, text, rank=rank, peer=peer, phase=phase, call=call)
        self.expected, self.got, self.node = expected, None, node


class RankMaskedError(PeerTimeoutError):
    """Peers have masked this rank: they go on without it. ``by`` is one of them, ``call`` its last call before that.

    ``peer`` is this rank itself. Recover: ``admit([rank], store)``, on this rank and on those that go on.
    """

    def __init__(self, *, rank: int, by: int, phase: str, call: int) -> None:
        text = (
            f"rank {rank}: rank {rank} itself is masked: expected it in all calls, got none from it by the time that "
            f"rank {by} masked it, after call {call} there; call admit([{rank}], store) here and on those that go on"
        )
        PeerError.__init__(self, text, rank=rank, peer=rank, phase=phase, call=call)
        self.expected, self.got, self.node, self.by = call, None, None, by
