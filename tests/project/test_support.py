"""The support of the tests: tiers, names of waiting programs, folders of any name, a faster interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
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
from tests.tiers import choose


def item(nodeid: str, *marks: pytest.MarkDecorator) -> Any:
    """As much of a pytest item as :func:`tiers.choose` looks at."""
    found = [mark.mark for mark in marks]
    return SimpleNamespace(
        nodeid=nodeid,
        iter_markers=lambda name: [mark for mark in found if mark.name == name],
        get_closest_marker=lambda name: next((mark for mark in found if mark.name == name), None),
    )


def chosen(*items: Any, arguments: tuple[str, ...] = ()) -> list[str]:
    kept, left_out = choose(items, arguments)
    assert sorted(i.nodeid for i in kept + left_out) == sorted(i.nodeid for i in items)
    return [i.nodeid for i in kept]


def test_the_quick_tier_runs_every_function_with_its_first_parameters() -> None:
    items = [item(name) for name in ("a.py::f[1]", "a.py::f[2]", "a.py::g", "b.py::f[1]", "b.py::C::f[x[0]]")]
    assert chosen(*items) == ["a.py::f[1]", "a.py::g", "b.py::f[1]", "b.py::C::f[x[0]]"]


def test_the_quick_tier_runs_what_is_marked_and_what_needs_a_gpu() -> None:
    quick, gpu = pytest.mark.quick("a planted fault"), pytest.mark.gpu
    assert chosen(item("f[1]", quick), item("f[2]", quick)) == ["f[1]", "f[2]"]
    assert chosen(item("f[1]"), item("f[2]"), item("f[3]", quick)) == ["f[1]", "f[3]"]
    assert chosen(item("f[1]", gpu), item("f[2]", gpu), item("f[3]"), item("f[4]")) == ["f[1]", "f[2]", "f[3]"]


def test_a_skipped_parameter_set_does_not_stand_for_its_function() -> None:
    skipped, runs = pytest.mark.skipif(True, reason="no GPU"), pytest.mark.skipif(False, reason="no GPU")
    assert chosen(item("f[1]", skipped), item("f[2]", runs), item("f[3]")) == ["f[1]", "f[2]"]


def test_the_command_line_may_name_parameter_sets() -> None:
    items = [item(f"tests/a.py::f[{case}]") for case in "123"]
    assert chosen(*items, arguments=("a.py::f[3]", "tests/b.py")) == ["tests/a.py::f[1]", "tests/a.py::f[3]"]
    assert chosen(items[1], arguments=("a.py::f[2]",)) == ["tests/a.py::f[2]"]


@pytest.mark.quick("both ways to leave the reason out")
@pytest.mark.parametrize("mark", [pytest.mark.quick, pytest.mark.quick(" ")], ids=["nothing", "blank"])
def test_a_mark_without_a_reason_is_refused(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(pytest.UsageError, match=r'a.py::f: expected pytest.mark.quick\("why"\)'):
        choose([item("a.py::f", mark)])


EXAMPLE = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_first(number): assert number in (0, 3)

@pytest.mark.quick("a reason")
@pytest.mark.parametrize("number", range(2))
def test_both(number): pass
"""


@pytest.mark.parametrize("workers, full, closing", [
    ("0", [], "3 passed, 3 deselected"),
    ("2", [], "3 passed, 3 deselected"),
    ("0", ["--full"], "2 failed, 4 passed"),
])  # fmt: skip
def test_pytest_reports_what_the_quick_tier_leaves_out(
    tmp_path: Path, workers: str, full: list[str], closing: str
) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "conftest.py", "tiers.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    shutil.copytree(ROOT / "tests" / "support", tmp_path / "tests" / "support")
    (tmp_path / "tests" / "test_example.py").write_text(EXAMPLE)
    done = pytest_in(tmp_path, "-n", workers, *full)
    assert closing in done.stdout.splitlines()[-1], done.stdout + done.stderr


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in ``folder``, on its own sources where it has some."""
    sources = folder / "src" if (folder / "src").is_dir() else ROOT / "src"
    paths = [str(sources), os.environ.get("PYTHONPATH", "")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env={**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip


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


def test_tests_pass_in_a_clone_with_any_name(tmp_path: Path) -> None:
    clone = tmp_path / "someone's clones" / "moelink"
    clone.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", clone)
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = pytest_in(clone, "-n", "0", "-k", "never_comes", "tests/kernels/test_protocol.py")
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
