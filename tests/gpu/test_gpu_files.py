"""The run of the GPU tests by file: its order and what it reports, without GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from tests.gpu import gpu_files
from tests.gpu.gpu_files import File, run_all
from tests.support.paths import ROOT

LIST = """
import json, sys
from tests.gpu.gpu_files import files_of
print(json.dumps([[file.name, file.alone] for file in files_of(sys.argv[1:])]))
"""


@dataclass(frozen=True)
class Script(File):
    """A file that appends its name to ``order``, prints ``text`` and ends with ``status``."""

    order: str = ""
    text: str = ""
    status: int = 0

    def command(self, compiled):
        note = f"with open({self.order!r}, 'a') as order: order.write('{self.name} {compiled}\\n')"
        return [sys.executable, "-c", f"{note}\nprint({self.text!r}); exit({self.status})"]


def listed(*names):
    """Names of the files, and whether they run alone, as a process lists them that runs no tests."""
    command = [sys.executable, "-c", LIST, *names]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return [tuple(each) for each in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.full("collects all GPU tests in a new process; needed before a run on GPUs")
def test_only_files_with_gpu_tests_run_and_long_ones_begin():
    names = ("turns", "startup", "vllm", "moe")
    found = listed("formats/test_formats.py", *(f"gpu/test_{name}_gpu.py" for name in names))
    assert found[:2] == [("gpu/test_moe_gpu.py", False), ("gpu/test_vllm_gpu.py", False)]
    assert sorted(found[2:]) == [("gpu/test_startup_gpu.py", True), ("gpu/test_turns_gpu.py", False)]


def test_long_files_are_files():
    assert all((gpu_files.TESTS / name).is_file() for name in gpu_files.LONG)


@pytest.fixture
def script(tmp_path):
    """A function that makes a :class:`Script`, and one that returns what ran, in order."""
    order = tmp_path / "order"

    def make(name, **fields):
        return Script(f"{name}.py", order=str(order), **fields)

    return make, lambda: order.read_text().splitlines()


def test_a_file_runs_when_its_kernels_are_compiled(script, tmp_path, monkeypatch, capsys):
    make, order = script
    compiled, lines = [], []

    def compile_in_turn(groups):
        for number, tasks in enumerate(groups):
            compiled.append(tasks)
            yield number, None
            lines.append(order())

    monkeypatch.setattr(gpu_files, "compile_in_turn", compile_in_turn)
    monkeypatch.setattr(gpu_files.ThreadPoolExecutor, "submit", lambda pool, fn, *args: now(fn, *args))
    files = [
        make("a", tasks=("x",), alone=True),
        make("b", tasks=("x", "y"), text="1 passed in 2.5s\nlate\n"),
        make("c"),
    ]
    outcomes = run_all(files, tmp_path, workers=1)
    assert compiled == [("x",), ("x", "y")]
    assert lines == [["c.py True"], ["c.py True", "b.py True"]]
    assert order() == ["c.py True", "b.py True", "a.py True"]
    assert {outcome.name: outcome.closing for outcome in outcomes} == {
        "a.py": "printed nothing", "b.py": "1 passed in 2.5s", "c.py": "printed nothing",
    }  # fmt: skip
    assert (tmp_path / "b.txt").read_text().startswith("1 passed in 2.5s\nlate")
    assert "b.py" in capsys.readouterr().out


@pytest.mark.parametrize("alone", [False, True])
def test_a_kernel_that_cannot_be_compiled_is_left_to_its_file(script, tmp_path, monkeypatch, capsys, alone):
    make, order = script
    error = RuntimeError("Kernel(x): no such word")
    monkeypatch.setattr(gpu_files, "compile_in_turn", lambda groups: [(0, error), (1, None)])
    files = [make("a", tasks=("x",), status=1, alone=alone), make("b", tasks=("y",), alone=True)]
    outcome, other = run_all(files, tmp_path, workers=1)
    assert order() == ["a.py False", "b.py True"]
    assert other.passed
    assert not outcome.passed
    assert "FAILED (1)" in str(outcome)
    assert "no such word" in capsys.readouterr().out


def test_what_goes_wrong_beside_the_files_is_raised(script, tmp_path, monkeypatch):
    make, _ = script
    monkeypatch.setattr(gpu_files, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_all([make("a")], tmp_path, workers=1)


@pytest.mark.quick("each takes milliseconds")
@pytest.mark.parametrize(("status", "passed"), [(0, True), (5, True), (1, False), (2, False)])
def test_a_file_without_tests_has_not_failed(script, tmp_path, status, passed):
    make, _ = script
    assert gpu_files.run(make("a", status=status), tmp_path, True, 1).passed is passed


class Threads(File):
    """A file that prints how many threads it may have."""

    def command(self, compiled):
        return [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]


def test_files_share_the_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_files.os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for workers, threads in ((3, "2"), (8, "1")):
        assert [outcome.closing for outcome in run_all([Threads("a.py")], tmp_path, workers)] == [threads]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run_all([Threads("a.py")], tmp_path, 3)[0].closing == "5"


def test_commands():
    assert File("test_x.py").command(True)[1:] == [
        "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(gpu_files.TESTS / "test_x.py"), "--compiled",
    ]  # fmt: skip
    assert "--compiled" not in File("test_x.py").command(False)


def now(function, *args):
    """A future of what ``function`` returns, which runs at once."""
    end = Future()
    end.set_result(function(*args))
    return end
