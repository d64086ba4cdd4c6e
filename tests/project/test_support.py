"""The support of the tests: names of waiting programs, folders of any name, a faster interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from moelink.testing import run_ranks
from tests.support import fast_interpreter, interleaving, rank_server
from tests.support.interleaving import Deadlock, Scheduler, place_of
from tests.support.paths import ROOT
from tests.support.processes import run_pytest


def test_a_frame_is_a_kernels_if_its_file_is_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clone's folder may be called moelink as well, and then everything is below a folder of that name."""
    package = tmp_path / "moelink" / "src" / "moelink"
    monkeypatch.setattr(interleaving, "_PACKAGE", f"{package}{os.sep}")
    frames: list[Any] = []

    def function(path: Path, name: str, calls: str) -> Any:
        scope: dict[str, Any] = {"stop": lambda: frames.append(sys._getframe())}
        exec(compile(f"def {name}(inner=None): {calls}", str(path), "exec"), scope)
        return scope[name]

    support = function(tmp_path / "moelink" / "tests" / "interleaving.py", "pause", "stop()")
    checking = function(package / "kernels" / "signals.py", "check_timeout", "inner()")
    waiting = function(package / "kernels" / "signals.py", "wait_all", "inner()")
    waiting(lambda: checking(support))
    support()
    assert [place_of(frame) for frame in frames] == ["wait_all:1", ""]


def test_a_deadlock_names_the_programs_that_wait() -> None:
    scheduler = Scheduler(0, patience=3)

    def forever() -> None:
        while True:
            scheduler.pause(False)

    with pytest.raises(Deadlock, match="waiting: rank0 ; rank1 "):
        scheduler.run([forever, forever])


@pytest.mark.full("runs pytest in a copy; a clone of another name is what CI runs")
def test_tests_pass_in_a_clone_with_any_name(tmp_path: Path) -> None:
    clone = tmp_path / "someone's clones" / "moelink"
    clone.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", clone)
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = run_pytest(clone, "-n", "0", "-k", "never_comes", "tests/kernels/test_protocol.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout.splitlines()[-1]


@triton.jit
def add_first(x, out, n: tl.constexpr):
    """out[i] = x[i] + x[0], in a function that others call."""
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i) + tl.load(x))


@triton.jit
def add_first_twice(x, out, n: tl.constexpr):
    add_first(x, out, n)
    add_first(out, out, n)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_ranks_have_loaded_what_the_server_names() -> None:
    assert run_ranks(rank_server.missing, 2) == [[], []]


def test_processes_that_load_triton_get_the_faster_interpreter() -> None:
    look = "'tests.support.fast_interpreter' in sys.modules"
    code = f"import sys; first = {look}; import triton; print(first, {look})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_interpreter_is_faster_and_computes_the_same() -> None:
    patches = []
    original = interpreter._patch_lang.__globals__["_patch"]

    def counted(fn: Any) -> Any:
        patches.append(fn.__name__)
        return original(fn)

    x, out = torch.arange(3, 7, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    before = {name: getattr(tl, name) for name in ("load", "range", "arange")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(interpreter._patch_lang.__globals__, "_patch", counted)
        for _ in range(2):
            add_first_twice[(1,)](x, out, 4)
    assert out.tolist() == [12, 13, 14, 15]
    assert patches == ["add_first_twice"] * 2
    assert before == {name: getattr(tl, name) for name in before}, "what a launch patches it restores"
    for dtype in (tl.int1, tl.bfloat16, tl.float8e4nv, tl.block_type(tl.int64, [4]), tl.pointer_type(tl.int8)):
        assert interpreter._get_np_dtype(dtype) == fast_interpreter._numpy_dtype_of(dtype)
    block = tl.block_type(tl.float32, [2, 4])
    assert (str(block), block.shape.type.types) == ("<['2', '4'], fp32>", [tl.constexpr_type(2), tl.constexpr_type(4)])
