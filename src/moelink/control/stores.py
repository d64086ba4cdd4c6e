"""Open the stores in which ranks meet, and use a store without waiting in it.

A call of torch's store client may wait longer than its timeout if the store's host is stopped or unreachable.
:func:`bounded` makes it in a thread that can be left behind.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from moelink import env
from moelink.control.process import is_own, start_daemon
from moelink.errors import ConfigError, UnsupportedError

T = TypeVar("T")

_ABSENT = b"?"
_SMALLEST = timedelta(milliseconds=50)
_CONNECT_SECONDS, _PAUSE_SECONDS = 1.0, 0.05
"""Most seconds of one try to connect, and the pause before the next."""


class BoundedError(Exception):
    """A call did not return by its deadline."""


def bounded(call: Callable[[], T], deadline: float) -> T:
    """Return the result of ``call``, or raise its exception, by ``deadline`` of the monotonic clock.

    Raises:
        BoundedError: the call had not returned. Its thread is left behind, and ends when the call does.
    """
    results: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            results.append((True, call()))
        except BaseException as error:  # noqa: BLE001 - raised again below
            results.append((False, error))

    thread = start_daemon(run, "moelink-bounded")
    thread.join(max(deadline - time.monotonic(), 0.0))
    if not results:
        raise BoundedError
    returned, value = results[0]
    if not returned:
        raise value
    return value  # type: ignore[no-any-return]


def peek(store: Any, key: str) -> bytes:
    """Return the value of ``key``, empty if there is none. Unlike ``get`` it never waits for the key to appear."""
    value = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    return b"" if value == _ABSENT else value


def listen(host: str, backlog: int) -> socket.socket:
    """Listen on a free port of ``host``'s interface, and of no other.

    Raises:
        UnsupportedError: ``host`` is no address of this machine.
        OSError: this process has too many files open.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=backlog)
    except OSError as error:
        if is_own(error):
            raise
        raise UnsupportedError(
            f"{env.PROBE_HOST.name}: expected an address of this machine, for peers to reach it at, got {host!r} "
            f"({error}); set the variable to one that it has, or start its network"
        ) from error


def serve(host: str, timeout: float) -> Any:
    """Open a store on a free port of ``host``'s interface, and of no other. Raises UnsupportedError as ``listen``."""
    with listen(host, 1024) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def reach(host: str, port: int, deadline: float, timeout: float) -> Any:
    """Connect to a store by ``deadline``; after that its calls wait ``timeout`` seconds.

    Waits for the port in Python. torch would wait in C++, where it could not be left behind when the program ends.

    Raises:
        RuntimeError: nothing listened at the port, or ``host`` did not resolve.
    """
    _await_port(host, port, deadline)
    left = max(timedelta(seconds=deadline - time.monotonic()), _SMALLEST)
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=left)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _await_port(host: str, port: int, deadline: float) -> None:
    while True:
        try:
            left = min(max(deadline - time.monotonic(), 0.05), _CONNECT_SECONDS)
            socket.create_connection((host, port), timeout=left).close()
            return
        except OSError as error:
            if is_own(error):
                raise
            if time.monotonic() + _PAUSE_SECONDS > deadline:
                raise RuntimeError(_why_not(host, port, error)) from error
        time.sleep(_PAUSE_SECONDS)


def _why_not(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the address {host!r} does not resolve ({error.strerror}): check MASTER_ADDR"
    return f"nothing answers at {host}:{port} ({error.strerror or error}): check MASTER_ADDR, MASTER_PORT and its host"


class LauncherStore:
    """The store that torchrun's variables name: rank 0 hosts it, or (``TORCHELASTIC_USE_AGENT_STORE``) the launcher.

    Attributes:
        rank, world_size: of this process.
        host_rank: the rank that hosts the store, or -1.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Raises ConfigError for a variable that is missing, or that is not a number."""
        self.rank = _number(environ, "RANK")
        self.world_size = _number(environ, "WORLD_SIZE")
        self.port = _number(environ, "MASTER_PORT")
        self.host = environ.get("MASTER_ADDR", "")
        if not self.host:
            raise ConfigError("MASTER_ADDR", "the address of rank 0's host, in the environment", None)
        if not 0 <= self.rank < self.world_size:
            raise ConfigError("RANK", f"a number in [0, WORLD_SIZE = {self.world_size})", self.rank)
        self.host_rank = -1 if environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) else 0
        self._use_libuv = environ.get("USE_LIBUV", "1") == "1"

    @staticmethod
    def require_both(environ: Mapping[str, str] = os.environ) -> None:
        """Raise ConfigError if only one of RANK and WORLD_SIZE is set: this process is then one rank of several."""
        for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if name in environ and other not in environ:
                expected = f"a whole number in the environment, as torchrun sets it, because {name} is set"
                raise ConfigError(other, expected, None)

    @staticmethod
    def is_named(environ: Mapping[str, str] = os.environ) -> bool:
        """Return True if all variables are set. A default group that the caller made needs none of them."""
        return all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))

    def open(self, deadline: float, timeout: float) -> Any:
        """Connect, or serve on the host's rank, which shares a store that this process serves at that port.

        Raises:
            RuntimeError: nothing listened at the port by ``deadline``, or the host's name does not resolve.
        """
        if self.rank != self.host_rank:
            return reach(self.host, self.port, deadline, timeout)
        try:  # the host reaches its own store by this name
            socket.getaddrinfo(self.host, self.port)
        except OSError as error:
            raise RuntimeError(_why_not(self.host, self.port, error)) from error
        return dist.TCPStore(  # type: ignore[attr-defined]
            self.host, self.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout),
            multi_tenant=True, use_libuv=self._use_libuv,
        )  # fmt: skip

    def root_of(self, store: Any) -> Any:
        """Return the launcher's own store if ``store``, a default group's, is a prefix of it; else None."""
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore) and (store.host, store.port) == (self.host, self.port):  # type: ignore[attr-defined]
            return store
        return None


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigError(name, "a whole number in the environment, as torchrun sets it", environ.get(name)) from None
