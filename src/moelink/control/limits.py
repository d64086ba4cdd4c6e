"""Limits that the operating system sets for a process: open files, memory, other processes."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from moelink.errors import UnsupportedError

_OPEN_FILES = (errno.EMFILE, errno.ENFILE)
FILES, FILES_OF_A_MESH = 24, 2
"""Files that a rank opens at most to set up and to run, and for each rank of one mesh of gloo's: sockets, and on rank 0
the connections of the store."""


def require_files(world_size: int, meshes: int) -> None:
    """Refuse, before anything is opened, a process that may not open the files of a communicator.

    gloo ends the process where it may not open another socket, so there is no error to name afterwards.

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
