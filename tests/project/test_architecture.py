"""ARCHITECTURE.md: the files and functions that it names exist, and a token really goes that way."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import moelink

PACKAGE = Path(moelink.__file__).parent
TEXT = (PACKAGE.parents[1] / "ARCHITECTURE.md").read_text()
ROW = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| `([\w.]+)` \|", re.M)
MOST_FILES = 10
MOST_LINES = 3000
SPLIT = {"dispatch": "receive", "combine": "gather_home"}
"""The first function of each way that runs in the peer's launch, beside the functions before it."""


def hops(phase: str) -> list[tuple[str, str]]:
    """File and function of each hop."""
    section = TEXT.split(f"### {phase.title()}\n")[1].split("\n#")[0]
    return ROW.findall(section)


@pytest.mark.quick("both ways are short")
@pytest.mark.parametrize("phase", SPLIT)
def test_the_named_functions_exist(phase: str) -> None:
    way = hops(phase)
    assert len(way) >= 9
    for file, name in way:
        body: Any = ast.parse((PACKAGE / file).read_text())
        for part in name.split("."):
            kinds = (ast.ClassDef, ast.FunctionDef)
            body = next((node for node in body.body if isinstance(node, kinds) and node.name == part), None)
            assert body is not None, f"{file} has no {name}"


def test_the_files_of_both_ways_are_read_in_an_afternoon() -> None:
    files = {file for phase in SPLIT for file, _ in hops(phase)}
    lines = sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert lines <= MOST_LINES, f"expected at most {MOST_LINES} lines, got {lines}; move special forms out of the path"


@pytest.mark.quick("both ways are short")
@pytest.mark.parametrize("phase", SPLIT)
def test_a_token_crosses_few_files_and_returns_to_none(phase: str) -> None:
    files = [file for file, _ in hops(phase)]
    assert len(files) <= MOST_FILES
    assert len(set(files)) == len(files)


class Recorder:
    """Notes, for each function of a way, the files of the package's frames when it was first called."""

    def __init__(self, way: list[tuple[str, str]]) -> None:
        self._watched = {(file, name.split(".")[-1]) for file, name in way}
        self._names = {name for _, name in self._watched}
        self.stacks: dict[tuple[str, str], list[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name not in self._names:  # called millions of times
            return
        place = (self._file(frame), frame.f_code.co_name)
        if place not in self._watched or place in self.stacks:
            return
        files: list[str] = []
        at: FrameType | None = frame
        while at is not None:
            file = self._file(at)
            if file and (not files or files[-1] != file):
                files.append(file)
            at = at.f_back
        self.stacks[place] = files[::-1]

    @staticmethod
    def _file(frame: FrameType) -> str:
        path = Path(frame.f_code.co_filename)
        return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""


def recorded(way: list[tuple[str, str]], call: Callable[[], Any]) -> tuple[dict[tuple[str, str], list[str]], Any]:
    """What was noted during ``call``, and its result."""
    recorder, before = Recorder(way), sys.getprofile()
    sys.setprofile(recorder)
    try:
        result = call()
    finally:
        sys.setprofile(before)
    return recorder.stacks, result


def test_the_chain_of_calls_is_the_one_of_the_tables() -> None:
    x, ids = torch.ones(3, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3], [1, -1]])
    sizes = dict(num_experts=4, topk=2, hidden_size=128, max_tokens_per_rank=4, dispatch_format="fp8_block128")
    with moelink.init(**sizes, transport="symmetric", device="cpu") as ep:
        y = torch.ones(ep.config.row_capacity, 128, dtype=torch.bfloat16)
        dispatch, recv = recorded(hops("dispatch"), lambda: ep.dispatch(x, ids, torch.ones(3, 2)))
        combine, _ = recorded(hops("combine"), lambda: ep.combine(y, recv))
    for phase, stacks in (("dispatch", dispatch), ("combine", combine)):
        way = hops(phase)
        split = next(i for i, (_, name) in enumerate(way) if name == SPLIT[phase])
        for i, (file, name) in enumerate(way):
            # The peer's launch takes the same way to its own role; what the sender stored comes to it over the link.
            through = way[: i + 1] if i < split else [*way[: split - 1], *way[split : i + 1]]
            assert stacks[file, name.split(".")[-1]] == [file for file, _ in through], (phase, name)
