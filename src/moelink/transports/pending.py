"""Calls under way: the object that a caller waits for, and a session's note of it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from moelink.errors import ClosedError, MembershipError, PeerError, StateError
from moelink.output import DispatchOutput, take_over
from moelink.transports.base import Pending, Phase
from moelink.transports.guard import Guard

T = TypeVar("T")


class Owner(Protocol):
    """The session of a call under way, as its pending operation needs it."""

    guard: Guard
    closed: bool
    identity: str

    def raise_fate(self) -> None:
        """Raise the error that has ended the communicator, if one has."""

    def unwind(self, phase: Phase, error: BaseException) -> None:
        """Bring an exception that leaves a call in order."""

    def failure_after(self, error: BaseException) -> BaseException:
        """Return the error that later waits raise after ``error``."""

    def forget(self, phase: Phase, operation: object) -> None:
        """Note that an operation is no longer pending."""


class PartlySent(Protocol):
    """A transport that says whether a call of it is partly sent."""

    partly_sent: bool


class SymmetricPending(Generic[T]):
    """A call of the symmetric transport whose send role is under way. :meth:`wait` launches the rest, once."""

    def __init__(self, transport: PartlySent, finish: Callable[[], T]) -> None:
        self._transport = transport
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None
        self.over = False

    def wait(self) -> T:
        """Return the result. On CUDA the current stream waits for it, the host does not."""
        if not self.over:
            self._transport.partly_sent = True  # first: an exception before the next line must not look like an end
            self.over = True
            finish, self._finish = self._finish, None
            self._result = finish()  # type: ignore[misc]
        return self._result  # type: ignore[return-value]


class IntoEarlier:
    """A dispatch under way into earlier ``outputs``, which are its own from its end on."""

    def __init__(self, operation: Pending[list[DispatchOutput]], outputs: Sequence[DispatchOutput | None]) -> None:
        self._operation, self._outputs = operation, outputs

    @property
    def over(self) -> bool:
        """Whether the call has ended."""
        return self._operation.over

    def wait(self) -> list[DispatchOutput]:
        """Return the outputs: the earlier ones themselves, so that none is left behind by the next reuse."""
        made = self._operation.wait()
        return [take_over(output, by) for output, by in zip(self._outputs, made, strict=True)]


class UnderWay(Generic[T]):
    """A call under way, which says so where it is taken for its result."""

    if not TYPE_CHECKING:  # a type checker takes any name if it sees __getattr__

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"{name}: expected an attribute of a call under way, got one that only its result may have; call "
                "wait(), which returns the result"
            )


class PendingOperation(UnderWay[T]):
    """A dispatch or combine under way, as ``dispatch_async`` and ``combine_async`` return it.

    Inputs must stay alive and unmodified until :meth:`wait` has returned. One that is dropped without :meth:`wait` is
    finished by the next call of its kind, which drops its result and its error.
    """

    def __init__(self, session: Owner, phase: Phase, operation: Pending[T], given: object) -> None:
        self._session, self._phase, self._operation = session, phase, operation
        self._identity = session.identity
        # Only this object refers to the tensors that hooks returned, and the call may read it on a stream of its own.
        self._given: object = given
        self._result: list[T] = []
        self._failure: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether the call has ended."""
        return self._operation.over

    def wait(self) -> T:
        """Return the result, the same as the synchronous call's. May be called again. Raises the call's error, if any.

        Raises:
            ClosedError: the communicator was closed before, with the memory that the call needs.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._result:
            return self._result[0]
        session = self._session
        if session.identity != self._identity and not session.closed:
            raise StateError(
                f"{self._phase}: expected the ranks with which it was started, got others since (mask or admit); "
                "repeat the step from its dispatch"
            )
        session.guard.enter(self._phase)
        try:
            if session.closed:
                raise ClosedError(self._phase)
            session.raise_fate()
            result = self._operation.wait()
            session.forget(self._phase, self._operation)
            self._result, self._given = [result], None
        except BaseException as error:
            try:
                session.unwind(self._phase, error)
            except MembershipError as changed:
                self._failure = changed
                raise
            if self._operation.over or isinstance(error, PeerError):  # else it may be waited for again
                self._failure = session.failure_after(error)
                session.forget(self._phase, self._operation)
            raise
        finally:
            session.guard.leave()
        return result


class PendingSingle(UnderWay[T]):
    """A dispatch or combine of one rank under way. Inputs must stay alive and unmodified until ``wait`` returns."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish = finish
        self._result: list[T] = []

    def wait(self) -> T:
        """Return the result. May be called again. Raises the call's error, if any."""
        if not self._result:
            self._result.append(self._finish())
        return self._result[0]


@dataclass(frozen=True)
class Started:
    """A pending call: the operation that finishes it, the object by which the caller does, and for errors the place in
    which it was started."""

    operation: Pending[Any]
    holder: weakref.ref[PendingOperation[Any]]
    words: str

    @classmethod
    def of(cls, operation: Pending[Any], holder: PendingOperation[Any], call: str) -> Started:
        """Return the note of a call that starts now. ``call``: words for its number."""
        return cls(operation, weakref.ref(holder), f"{call}started at {_caller()}")


def _caller() -> str:
    """Return the file and line of the innermost frame outside this package and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("moelink", "torch"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
