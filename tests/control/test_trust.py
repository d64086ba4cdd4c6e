"""What peers, files and other users of the machine may say or do: nothing of it runs code or leaves its place."""

from __future__ import annotations

import ast
import encodings.idna  # noqa: F401 - sockets load it, and the other user may not read where Python lies
import json
import os
import pickle
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moelink
from moelink.control.probe import Address
from moelink.control.values import gather_values
from moelink.errors import ProtocolError, UnsupportedError
from moelink.memory import posix
from moelink.testing import run_ranks

_UNPICKLERS = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
_EVALUATORS = {"eval", "exec", "compile", "__import__"}
_OBJECT_CALLS = re.compile(r"(gather|scatter|broadcast|send|recv)_object|recv_pyobj")


def unsafe_readers(source: str) -> set[str]:
    """What in ``source`` could run code that came as data: unpickling, object collectives, evaluation."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found |= {name for name in names if name.split(".")[0] in _UNPICKLERS}
            found |= {name for name in names if re.search(_OBJECT_CALLS, name)}
        elif isinstance(node, ast.Attribute) and re.search(_OBJECT_CALLS, node.attr):
            found.add(node.attr)
        elif isinstance(node, ast.Call):
            called, words = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in _EVALUATORS:
                found.add(called)
            if called == "torch.load" and words.get("weights_only") != "True":
                found.add(called)
            if called in ("np.load", "numpy.load") and words.get("allow_pickle") != "False":
                found.add(called)
    return found


def test_nothing_in_the_package_unpickles_what_a_peer_or_a_file_holds() -> None:
    """``pickle`` is in testing alone (a parent and its own children)."""
    root = Path(moelink.__file__).parent
    users = {str(path.relative_to(root)): unsafe_readers(path.read_text()) for path in root.rglob("*.py")}
    assert {path: words for path, words in users.items() if words} == {"testing.py": {"pickle"}}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from torch.distributed import all_gather_object",
        "dist.all_gather_object(told, mine)",
        "dist.broadcast_object_list(box)",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
    ],
)
def test_the_search_for_unsafe_readers_finds(source: str) -> None:
    assert unsafe_readers(source)


def gather_what_is_no_json(rank: int, world_size: int) -> list[object]:
    dist.init_process_group("gloo")
    try:
        mine = [None, {"a": [1, 2.5, b"\x00\xff"]}, "text"][rank]
        answers: list[object] = gather_values(mine)
        with pytest.raises(TypeError, match="JSON or bytes, got set"):
            gather_values({1, 2})
        # Rank 1 sends a pickle where its text should be; the sizes are those of an honest peer.
        sent = pickle.dumps(print) if rank == 1 else b"1"
        with pytest.raises(ProtocolError, match="from rank 1 in an exchange of values, got a malformed one"):
            gather_raw(sent)
        return answers
    finally:
        dist.destroy_process_group()


def gather_raw(text: bytes) -> list[object]:
    """``gather_values`` of a rank that sends ``text`` as it is."""
    with mock.patch("moelink.control.values.json.dumps", return_value=mock.Mock(encode=lambda: text)):
        return gather_values(None)


def test_values_of_peers_are_json() -> None:
    for answers in run_ranks(gather_what_is_no_json, 3):
        assert answers == [None, {"a": [1, 2.5, b"\x00\xff"]}, "text"]


# --- another user of the machine --------------------------------------------------------------------------------------

STRANGER = 65534
"""The user "nobody"."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def stranger(act: Callable[[], object]) -> Iterator[object]:
    """What ``act`` returns in a process of another user, which lives until the block ends."""
    answer, told = os.pipe()
    end, leave = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(leave)
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            try:
                said = json.dumps(act())
            except Exception as error:  # noqa: BLE001 - a forked process has nobody else to tell
                said = json.dumps(repr(error))
            os.write(told, said.encode())
            os.read(end, 1)
        finally:
            os._exit(0)
    os.close(told)
    os.close(end)
    try:
        yield json.loads(os.read(answer, 1 << 16))
    finally:
        os.close(leave)
        os.close(answer)
        os.waitpid(child, 0)


def open_to_strangers(pids: list[int], addresses: list[Address]) -> list[str]:
    """What of the processes ``pids`` this process can read, and which of the probe servers answer it."""
    found = []
    paths = [Path("/proc", str(pid), what) for pid in pids for what in ("fd", "map_files", "mem", "environ")]
    paths += [Path("/proc", str(pid), "fd", str(fd)) for pid in pids for fd in range(256)]
    paths += [path for path in Path("/dev/shm").iterdir() if path.name.startswith("moelink")]
    for path in paths:
        with suppress(OSError):
            if path.is_dir():
                os.listdir(path)
            else:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            found.append(str(path))
    for address in addresses:
        for kind in (b"?", b"r"):
            with suppress(OSError), socket.create_connection((address.host, address.port), timeout=2) as connection:
                connection.sendall(bytes(16) + kind)
                if connection.recv(1):
                    found.append(f"the probe server at port {address.port}")
    return found


def spied_upon(rank: int, world_size: int, transport: str) -> list[str]:
    sizes = {"num_experts": 2, "topk": 1, "hidden_size": 16, "max_tokens_per_rank": 2}
    with moelink.init(**sizes, transport=transport, device="cpu") as ep:
        x, ids = torch.ones(2, 16, dtype=torch.bfloat16), torch.tensor([[0], [1]])
        recv = ep.dispatch(x, ids)
        pids = gather_values(os.getpid())
        found: list[str] = []
        if rank == 0:
            detector = ep._session.detector
            assert detector is not None
            with stranger(lambda: open_to_strangers(pids, list(detector.addresses))) as seen:
                assert isinstance(seen, list), seen
                found = seen
            assert open_to_strangers(pids, []), "the owner can read all of it"
        assert torch.equal(ep.combine(recv.tokens, recv), x)
    return found


@needs_root
@pytest.mark.quick("each transport has servers and memory of its own")
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_another_user_reads_nothing_of_the_ranks(transport: str) -> None:
    assert run_ranks(spied_upon, 2, transport)[0] == []


@needs_root
def test_the_memory_of_another_user_is_refused() -> None:
    """Even by root, who could open it: a peer of another user is none."""

    def allocate() -> dict[str, int]:
        fd = posix._allocate(100)
        os.pwrite(fd, bytes(16), posix._file_bytes(100) - 4096)
        status = os.fstat(fd)
        return {"pid": os.getpid(), "fd": fd, "device": status.st_dev, "inode": status.st_ino}

    with stranger(allocate) as block:
        assert isinstance(block, dict), block
        record = {**block, "nbytes": 100, "namespace": posix.pid_namespace(), "token": bytes(16).hex()}
        with pytest.raises(UnsupportedError, match=f"memory of rank 1 is refused: expected owner 0, got {STRANGER}"):
            posix._open(1, {name: str(value) for name, value in record.items()})
