"""The launcher's variables: incomplete, of an address that does not resolve, or of a port where nobody listens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

import moelink
from moelink.control import stores
from moelink.testing import free_port
from tests.support.fault_ranks import FIELDS

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")

PROGRAM = """
import sys
import moelink
try:
    moelink.init(num_experts=4, topk=1, hidden_size=8, max_tokens_per_rank=2, timeout=2, device="cpu")
except moelink.PeerTimeoutError as error:
    print("told:", error.peer)
sys.exit(7)
"""


def _set(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("given", "missing"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_one_variable_of_the_two_is_refused(monkeypatch: pytest.MonkeyPatch, given: str, missing: str) -> None:
    """Closes over: a communicator of one rank where the launcher has started several."""
    _set(monkeypatch, **{given: 1}, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    with pytest.raises(moelink.ConfigError, match=f"^{missing}: expected a whole number .* because {given} is set"):
        moelink.init(**FIELDS, device="cpu")


@pytest.mark.quick("the host and the others open the store in different ways")
@pytest.mark.parametrize("rank", [1, 0])
def test_an_address_that_does_not_resolve_is_the_reason_given(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    resolve = socket.getaddrinfo

    def fail(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == "no.such.host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    _set(monkeypatch, RANK=rank, WORLD_SIZE=2, MASTER_ADDR="no.such.host.invalid", MASTER_PORT=free_port())
    with pytest.raises(moelink.PeerTimeoutError, match=r"'no.such.host.invalid' does not resolve .* check MASTER_ADDR"):
        moelink.init(**FIELDS, device="cpu", timeout=1.0)


def test_a_port_where_nobody_listens_is_waited_for_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closes over: torch's client, which waits in C++ and aborts the process when the interpreter ends meanwhile."""

    def client(*_arguments: Any, **_options: Any) -> Any:
        raise AssertionError("a client of torch's waits for nobody")

    monkeypatch.setattr(dist, "TCPStore", client)
    port = free_port()
    with pytest.raises(RuntimeError, match=f"nothing answers at 127.0.0.1:{port} .*check MASTER_ADDR, MASTER_PORT"):
        stores.reach("127.0.0.1", port, time.monotonic() + 0.3, 5.0)


@pytest.mark.full("starts Python anew, because only the end of an interpreter shows it; above is the wait itself")
def test_a_program_that_exits_after_init_failed_has_its_own_status() -> None:
    """Closes over: SIGABRT, when a thread that was left in a call of torch's comes back."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stdout) == (7, "told: 0\n"), done.stderr
