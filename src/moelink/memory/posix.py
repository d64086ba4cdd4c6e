"""Allocate symmetric memory between processes of one machine, on CPUs: one shared mapping per rank.

Each rank's block is a file of the shared-memory file system **without a lasting name**: it is made with ``O_TMPFILE``
(or, on kernels without that, with ``O_EXCL``, mode 0600 and a random name that the next call unlinks), and peers open
it as ``/proc/<pid>/fd/<n>``. So a killed rank leaves no file behind, and no process finds a block by guessing a name.
Two alternatives were rejected: a name that is unlinked after all ranks have mapped the block stays behind if a rank is
killed before that; and blocks of ``memfd_create`` count against no file system's limit, so a size beyond memory would
end in the kernel's out-of-memory killer instead of ENOSPC.

Opening ``/proc/<pid>/fd/<n>`` needs the same user and the same PID namespace. Yama's ``ptrace_scope`` does not matter
(it restricts attaching, not reading); a process that made itself undumpable (``prctl``, file capabilities) is refused
by the kernel, and the error here says so.

A file has the block, zeros up to the next page, and one page with a random token. A peer maps a file only if owner,
mode, link count, size, device, inode and token are as the owner's record says: a forged record cannot make it map
another user's file, or the block of another communicator.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import Tensor

from moelink.arith import align_up
from moelink.errors import ArgumentError, UnsupportedError
from moelink.memory.blocks import Renewal, SymmetricMemory
from moelink.memory.setup import MACHINE, NUMBER, Exchange, Schema, machine_id, refuse_other_places, set_up

DIRECTORY = "/dev/shm"
"""The file system that holds the blocks; its size (in containers often 64 MiB) limits them."""

_PAGE = 4096
_MODE = 0o600
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
"""Of Linux; the module mmap has no names for them before Python 3.13."""
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_SCHEMA: Schema = {
    "nbytes": NUMBER, "machine": MACHINE, "namespace": NUMBER, "pid": NUMBER, "fd": NUMBER, "device": NUMBER,
    "inode": NUMBER, "token": re.compile(r"[0-9a-f]{32}"),
}  # fmt: skip


class PosixMemory(SymmetricMemory):
    """Blocks of shared memory of the processes of one machine: page aligned, ``pointers`` on the CPU."""

    @classmethod
    def create(
        cls,
        nbytes: int,
        *,
        rank: int,
        world_size: int,
        exchange: Exchange,
        members: Sequence[int] | None = None,
        fill: Callable[[Tensor], None] = lambda block: None,
    ) -> PosixMemory:
        """Make this rank's block and map those of all ranks. Collective: every rank calls it, with the same ``nbytes``.

        Args:
            nbytes: bytes of each block, at least 1.
            rank: this rank.
            world_size: number of ranks.
            exchange: bounded all-gather of byte strings, called exactly twice on every rank, also on failure.
            members: the ranks that take part, if not all. In the place of another's block comes one that no other rank
                maps (:func:`_sink`).
            fill: writes what the own block begins with, before any peer maps it; else zeros.

        Raises:
            ArgumentError: ``nbytes`` is not positive.
            ConfigMismatchError: ranks passed different ``nbytes``.
            UnsupportedError: too little shared memory, other machine, container or user; on all ranks, naming the one.
            ProtocolError: a peer's record is malformed.
            Exception: of ``exchange``, when a rank does not answer.
        """
        ranks = range(world_size) if members is None else members
        with _offered(nbytes, fill, rank, ranks, exchange) as files:
            blocks = [
                _view(files[r], nbytes, f"the shared memory of rank {r}") if r in files else _sink(nbytes)
                for r in range(world_size)
            ]
        return cls(rank, blocks)

    def renew(self, members: Sequence[int], exchange: Exchange, fill: Callable[[Tensor], None]) -> Renewal:
        """Prepare new files for ``members``, to be mapped where the old ones are.

        A rank that is not a member keeps its mappings of the old files, in which its late stores end. Stores *to* it go
        to memory of this process alone. So no kernel needs another address, and no captured graph or bound call either.
        """
        with _offered(self.nbytes, fill, self.rank, members, exchange) as files:
            return _NewFiles(self, {rank: os.dup(fd) for rank, fd in files.items()})


class _NewFiles:
    """The files of a new generation (:class:`moelink.memory.blocks.Renewal`)."""

    def __init__(self, memory: PosixMemory, files: dict[int, int]) -> None:
        self._memory, self._files = memory, files

    def commit(self) -> None:
        """Map them over the old ones. The kernel replaces a mapping in one step."""
        for rank in range(self._memory.world_size):
            _map_over(self._memory.peer(rank), self._files.get(rank))
        self.discard()

    def discard(self) -> None:
        """Close the descriptors."""
        while self._files:
            os.close(self._files.popitem()[1])


@contextmanager
def _offered(
    nbytes: int, fill: Callable[[Tensor], None], rank: int, members: Sequence[int], exchange: Exchange
) -> Iterator[dict[int, int]]:
    """Make this rank's file and open those of all ``members``: descriptors by rank, open within the block.

    All members have opened all files, or all raise.
    """
    with ExitStack() as descriptors:

        def hold(fd: int) -> int:
            descriptors.callback(os.close, fd)
            return fd

        def prepare() -> dict[str, str]:
            if nbytes < 1:
                raise ArgumentError("nbytes", "at least 1", nbytes)
            machine = machine_id()
            fd = hold(_allocate(nbytes))
            fill(_view(fd, nbytes, "this rank's shared memory"))
            token, status = secrets.token_bytes(16), os.fstat(fd)
            os.pwrite(fd, token, _file_bytes(nbytes) - _PAGE)
            values = (nbytes, machine, pid_namespace(), os.getpid(), fd, status.st_dev, status.st_ino, token.hex())
            return dict(zip(_SCHEMA, map(str, values), strict=True))

        def accept(peers: list[dict[str, str]]) -> dict[int, int]:
            refuse_other_places(peers)
            return {peer: hold(_open(peer, fields)) for peer, fields in zip(members, peers, strict=True)}

        yield set_up(
            exchange, kind="posix", rank=rank, world_size=len(members), schema=_SCHEMA, prepare=prepare, accept=accept,
            members=members,
        )  # fmt: skip


def _sink(nbytes: int) -> Tensor:
    """Return memory in which stores to a rank that takes no part end. Only pages that are touched take memory."""
    fd = os.memfd_create("moelink-sink", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return _view(fd, nbytes, "memory in place of a masked rank's")
    finally:
        os.close(fd)


def _map_over(block: Tensor, fd: int | None) -> None:
    """Map the file ``fd`` at the address of ``block``; None: memory of this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    flags, file = (own, -1) if fd is None else (mmap.MAP_SHARED, fd)
    at = block.data_ptr()
    got = libc.mmap(at, block.numel(), mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, file, 0)
    if got != at:  # the kernel has no room for another mapping: the old one may be gone
        error = ctypes.get_errno()
        raise OSError(error, f"expected to map a block again, got this error: {os.strerror(error)}")


def _file_bytes(nbytes: int) -> int:
    """Return the bytes of the block, rounded up to pages, and of the page of the token."""
    return align_up(nbytes, _PAGE) + _PAGE


def _allocate(nbytes: int) -> int:
    """Make a file without a name for a block of ``nbytes`` zeros, all reserved. Returns the descriptor."""
    size = _file_bytes(nbytes)
    flags = os.O_RDWR | os.O_CLOEXEC
    fd = -1
    try:
        try:
            fd = os.open(DIRECTORY, flags | os.O_TMPFILE, _MODE)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            name = f"{DIRECTORY}/moelink-{secrets.token_hex(16)}"
            fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE)
            os.unlink(name)
        os.fchmod(fd, _MODE)  # the umask may have taken bits away
        space = os.fstatvfs(fd)
        if size > space.f_bavail * space.f_frsize:  # posix_fallocate would fill the whole file system to find out
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, size)  # ftruncate would succeed, and the first touch end the process with SIGBUS
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise UnsupportedError(
                f"shared memory: expected {size} free bytes in {DIRECTORY} for a block, got {_free_bytes()}; enlarge "
                "it (containers: --shm-size), lower max_tokens_per_rank, or use transport='collective'"
            ) from error
        raise UnsupportedError(
            f"shared memory: expected a new file in {DIRECTORY}, got this error: {error}; use transport='collective'"
        ) from error
    return fd


def _free_bytes() -> int:
    with suppress(OSError):
        space = os.statvfs(DIRECTORY)
        return space.f_bavail * space.f_frsize
    return 0


def _view(fd: int, nbytes: int, what: str) -> Tensor:
    """Map the first ``nbytes`` of a file: [nbytes] uint8."""
    try:
        # torch maps by path and silently grows a file that is too short: the size was checked before.
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise UnsupportedError(
            f"expected to map {what}, got this error: {error}; use transport='collective'"
        ) from error


def _open(peer: int, fields: Mapping[str, str]) -> int:
    """Open and check the file that rank ``peer`` described; return the descriptor."""
    if fields["namespace"] != str(pid_namespace()):
        raise UnsupportedError(
            f"rank {peer} runs in another container: expected one PID namespace, got {fields['namespace']} on rank "
            f"{peer} and {pid_namespace()} here; start all ranks in one container, or use transport='collective'"
        )
    path = f"/proc/{fields['pid']}/fd/{fields['fd']}"
    try:
        # Looked at first, because opening a device or a pipe would already do something.
        _check(peer, os.stat(path), fields)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise UnsupportedError(
            f"the shared memory of rank {peer} (process {fields['pid']}) cannot be opened: expected a live process of "
            f"this user, got {error.strerror}; start all ranks as one user, with an interpreter without file "
            "capabilities"
        ) from error
    try:
        _check(peer, os.fstat(fd), fields)
        if os.pread(fd, 16, _file_bytes(int(fields["nbytes"])) - _PAGE).hex() != fields["token"]:
            raise UnsupportedError(
                f"the shared memory of rank {peer} is refused: expected the token of its record, got another one; "
                "start the ranks again"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(peer: int, status: os.stat_result, fields: Mapping[str, str]) -> None:
    """Raise UnsupportedError unless ``status`` is of the file that ``fields`` describe, open to its owner alone."""
    checks = {
        "kind of file": (stat.S_ISREG(status.st_mode), True),
        "owner": (status.st_uid, os.geteuid()),
        "mode": (oct(stat.S_IMODE(status.st_mode)), oct(_MODE)),
        "link count": (status.st_nlink, 0),
        "size": (status.st_size, _file_bytes(int(fields["nbytes"]))),
        "device": (status.st_dev, int(fields["device"])),
        "inode": (status.st_ino, int(fields["inode"])),
    }
    for name, (got, expected) in checks.items():
        if got != expected:
            raise UnsupportedError(
                f"the shared memory of rank {peer} is refused: expected {name} {expected}, got {got}; start the ranks "
                "again"
            )


def pid_namespace() -> int:
    """Return the number of this process's PID namespace, 0 if the kernel does not say."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0
