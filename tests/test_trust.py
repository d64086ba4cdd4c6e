"""What peers, files and other users of the machine may say or do: nothing of it runs code or leaves its place."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import moelink
from moelink.control.values import gather_values
from moelink.errors import ProtocolError
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
