"""Keep to the limits of one process: files that it may open, threads and tensors that outlive a call, pickles."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from moelink.errors import UnsupportedError

T = TypeVar("T", bound="OfThisProcess")

_OPEN_FILES = (errno.EMFILE, errno.ENFILE)
FILES, FILES_OF_A_MESH = 24, 2
"""Files that a rank opens at most to set up and to run, and for each rank of one mesh of gloo's: sockets, and on rank 0
the connections of the store."""
EXIT_SECONDS = 2.0
"""Most seconds that the end of the program waits for a thread of :func:`start_daemon`."""
_LETTING_GO_SECONDS = 0.5
_PAUSE_SECONDS = 1e-3


class OfThisProcess:
    """An object that belongs to one process, as its memory and its peers do: its copies are the object itself."""

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        """Return this object: a copied layer communicates with the same ranks, by the same memory."""
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"copy or pickle: expected an object without peers, got a {type(self).__name__}, which is this process's; "
            "use it as it is, or make it again in another process, and load the model from its state_dict there"
        )


def require_files(world_size: int, meshes: int) -> None:
    """Refuse a process that may not open the files of a communicator, before any is opened.

    gloo ends the process when it may not open another socket, so no error could be raised afterwards.

    Raises:
        UnsupportedError: this process may open too few more.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_OF_A_MESH * meshes * world_size
    try:
        left = limit - len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if not is_own(error):
            return  # not Linux
        left = 0
    if limit != resource.RLIM_INFINITY and left < needed:
        raise UnsupportedError(
            f"init: expected that this process may open {needed} more files, got {max(left, 0)} up to its limit of "
            f"{limit}; raise the limit of open files (ulimit -n), or close some"
        )


def is_own(error: OSError) -> bool:
    """Return True if ``error`` says that this process has too many files open, and nothing about the other side."""
    return error.errno in _OPEN_FILES


@contextmanager
def naming_refusals() -> Iterator[None]:
    """Raise UnsupportedError, which says what to do, for an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise UnsupportedError(
            f"init: expected what a communicator needs of the operating system, got {error}; raise the limit that it "
            "met (ulimit -a lists them), or free memory"
        ) from error


def start_daemon(run: Callable[[], None], name: str) -> threading.Thread:
    """Start ``run`` in a thread that does not keep the process alive, and return the thread.

    A thread that is in C++ when the interpreter ends aborts the process when it comes back, so ``sys.exit(7)`` after a
    failed ``init`` would end by SIGABRT. The end of the program waits for the thread, at most ``EXIT_SECONDS``: calls
    of torch here have a timeout, which has mostly passed by then.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    weakref.finalize(thread, _join, weakref.ref(thread))
    thread.start()
    return thread


def _join(thread: weakref.ref[threading.Thread]) -> None:
    """Wait for ``thread`` at the end of the program. One that has been collected has ended."""
    left = thread()
    if left is not None:
        left.join(EXIT_SECONDS)


def await_release(tensors: Iterable[Tensor], seconds: float = _LETTING_GO_SECONDS) -> None:
    """Wait until gloo's threads have released the CPU tensors of exchanges that are over, at most ``seconds``.

    They do so a moment after the exchange. A gloo thread that frees a tensor of Python's while the interpreter exits
    aborts the process ("terminate called without an active exception", pytorch/pytorch#179291).
    """
    lent = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    deadline = time.monotonic() + seconds
    while any(tensor._use_count() > 1 for tensor in lent) and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(_PAUSE_SECONDS)
