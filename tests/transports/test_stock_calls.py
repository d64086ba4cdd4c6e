"""Calls in Triton's interpreter as users have it. The faster one of the tests replaces parts of it, and loses checks.

In the quick tier each format has a process for its calls, and in the full one each call has one.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest

import moelink
from moelink.formats.registry import BUILTIN
from tests.support.cases import FORMATS
from tests.support.commands import run_python
from tests.support.programs import Program, server
from tests.transports import stock_calls
from tests.transports.stock_calls import CALLS, FORMS, LAYOUTS, TRANSPORTS, check_stock

SOURCES = sorted(Path(moelink.__file__).parent.rglob("*.py"))


def is_jitted(node: ast.AST) -> bool:
    """Return True for a function with the decorator ``triton.jit``, with or without options."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else ()
    names = [ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in decorators]
    return bool({"jit", "triton.jit"}.intersection(names))


def sees_the_language(tree: ast.Module) -> bool:
    """Return True for a module that imports ``triton.language`` under a name of its own, outside functions and ifs."""
    imported = [alias for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    return any(alias.name == "triton.language" and alias.asname is not None for alias in imported)


def test_every_module_with_kernels_imports_the_language() -> None:
    """The interpreter looks for it among the globals of each function that it calls, used there or not."""
    trees = {path: ast.parse(text) for path in SOURCES if "jit" in (text := path.read_text())}
    kernels = {path: tree for path, tree in trees.items() if any(is_jitted(node) for node in ast.walk(tree))}
    assert len(kernels) > 40
    assert [str(path) for path, tree in kernels.items() if not sees_the_language(tree)] == []


def program(folder: Path, number: int, *command: str) -> Program:
    """A program whose output goes to files of ``folder``."""
    return Program(
        list(command), dict(os.environ), str(folder), str(folder / f"out{number}"), str(folder / f"err{number}")
    )


def failures(folder: Path, *programs: list[str]) -> dict[str, str]:
    """Make calls, those of each list in a process of its own, and return what went wrong with each that failed."""
    started = [program(folder, at, stock_calls.__file__, *names) for at, names in enumerate(programs)]
    statuses = server().run(started, timeout=240.0, at_once=2)
    found: dict[str, str] = {}
    for names, each, status in zip(programs, started, statuses, strict=True):
        answers = [json.loads(line) for line in Path(each.out).read_text().splitlines() if line.startswith("{")]
        done = {answer["call"]: answer["failure"] for answer in answers}
        end = f"expected an answer, got exit status {status}\n{Path(each.err).read_text()}"
        found |= {name: done.get(name) or end for name in names if done.get(name) != "" or status != 0}
    return found


def check(folder: Path, *programs: list[str]) -> None:
    found = failures(folder, *programs)
    assert not found, "\n".join(f"{name}:\n{why}" for name, why in found.items())


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled where there is a GPU"
)


@interpreted
def test_each_format_and_transport(tmp_path: Path) -> None:
    """Once each, in three processes. Every layout is there, and the formats with scales in tiles come by expert."""
    layout_of = {fmt: LAYOUTS[at % len(LAYOUTS)] for at, fmt in enumerate(FORMATS)} | {
        "nvfp4": "expert",
        "mxfp8": "masked",
    }
    assert set(layout_of.values()) == set(LAYOUTS)
    calls = [[f"{fmt}-{layout}-{transport}" for transport in TRANSPORTS] for fmt, layout in layout_of.items()]
    check(tmp_path, *[sum(calls[first::3], []) for first in range(3)])


@interpreted
@pytest.mark.full("test_each_format_and_transport makes some of these calls")
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_layout_and_transport(fmt: str, tmp_path: Path) -> None:
    check(tmp_path, [f"{fmt}-{layout}-{transport}" for layout in LAYOUTS for transport in TRANSPORTS])


KINDS = {"some launchers": [["fp8_block128-launchers"], ["nvfp4-launchers"]]}
KINDS |= {transport: [["-".join(form)] for form in FORMS if form[2] == transport] for transport in TRANSPORTS}
KINDS |= {kind: [[name] for name in CALLS if kind in name.split("-")] for kind in ("launchers", "options")}


@pytest.mark.full("test_each_format_and_transport makes some of these calls")
@interpreted
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", KINDS)
def test_each_call_in_a_process_of_its_own(kind: str, tmp_path: Path) -> None:
    check(tmp_path, *KINDS[kind])


def test_every_format_has_calls() -> None:
    assert set(FORMATS) == set(BUILTIN)
    assert {name for names in KINDS.values() for (name,) in names} == set(CALLS)


@interpreted
def test_failures_have_names(tmp_path: Path) -> None:
    found = failures(tmp_path, ["no-such-call", "bf16-rank-collective"])
    assert list(found) == ["no-such-call"]
    assert "KeyError: 'no-such-call'" in found["no-such-call"]


@interpreted
def test_the_faster_interpreter_is_told_from_the_stock_one() -> None:
    with pytest.raises(AssertionError, match=r"got those of moelink_testing in place of some: .*'_patch_once'"):
        check_stock()


SCRIPT = """
import os, sys
from pathlib import Path
loaded = [name for name in ("moelink_testing", "tests", "moelink.kernels") if name in sys.modules]
print(__name__, Path.cwd().name, Path(sys.argv[0]).name, *sys.argv[1:], loaded, "torch" in sys.modules)
print(any(Path(path, "conftest.py").exists() for path in sys.path), sys.path[0] == str(Path(__file__).parent))
print(os.environ.get("OF_THE_PROGRAM"), "PYTEST_CURRENT_TEST" in os.environ, file=sys.stderr)
sys.exit(3)
"""


def test_a_program_finds_nothing_of_the_tests(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python("script.py", "more", folder=tmp_path, environment={"OF_THE_PROGRAM": "yes"})
    assert done.stdout == f"__main__ {tmp_path.name} script.py more [] True\nFalse True\n"
    assert (done.returncode, done.stderr) == (3, "yes False\n")


HANGS = """
import fcntl, subprocess
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
subprocess.run(["sleep", "600"], stdout=lock)
"""


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    (tmp_path / "dies.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    programs = [program(tmp_path, at, name) for at, name in enumerate(["hangs.py", "dies.py"])]
    assert server().run(programs, timeout=3.0, at_once=2) == [None, -9]
    with (tmp_path / "lock").open() as lock:  # of the program and its child, until both have ended
        fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("hangs.py", folder=tmp_path, timeout=0.5)
