"""What the README shows is so; and the package stands alone."""

from __future__ import annotations

import ast
import doctest
import os
import re
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

import moelink_testing

HERE = Path(moelink_testing.__file__).parent
README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
CODE = [code for language, code in BLOCKS if language == "python"]
TALK, CONFTEST, *COMPILED = CODE


def failure_of(folder: Path, code: str) -> str:
    """Run ``code`` as a script; return the last line of its traceback, "" where it has none."""
    folder.mkdir()
    (folder / "talk.py").write_text(code)
    try:
        runpy.run_path(str(folder / "talk.py"), run_name="__main__")
    except moelink_testing.FailedSchedule as error:
        return traceback.format_exception_only(error)[-1].strip()
    return ""


def test_the_dropped_release_of_the_readme_is_caught(tmp_path):
    """With the line that the page shows. With the release nothing fails; without the exchange it is a deadlock."""
    (shown,) = (text for language, text in BLOCKS if language == "text")
    assert failure_of(tmp_path / "dropped", TALK) == shown.strip()
    assert failure_of(tmp_path / "right", TALK.replace('sem="relaxed"', 'sem="release"')) == ""
    (line,) = (line for line in TALK.splitlines() if "tl.atomic_xchg" in line)
    (waiting,) = re.findall(r"`(waiting: .*?)`", README)
    assert failure_of(tmp_path / "dead", TALK.replace(line, "    pass")).endswith(waiting)


def test_the_lines_that_catch_it_are_ten():
    lines = [line for line in TALK[TALK.index("def make_ranks") :].splitlines() if line.strip()]
    assert len(lines) <= 10


def test_the_examples_of_schedules_are_right(tmp_path, monkeypatch):
    (tmp_path / "talk.py").write_text(TALK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "talk", raising=False)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    finder = doctest.DocTestFinder()
    examples = [
        example
        for function in (moelink_testing.run_ranks, moelink_testing.explore_schedules)
        for example in finder.find(function, globs={**vars(moelink_testing), "torch": torch})
    ]
    said: list[str] = []
    for example in examples:
        runner.run(example, out=said.append)
    assert runner.summarize(verbose=False) == (0, 6), "".join(said)


COMPILED_EXAMPLES = """
import doctest
for function in lowered, prints:
    doctest.run_docstring_examples(function, {"lowered": lowered, "prints": prints})
"""


def test_the_other_code_of_the_readme_and_the_examples_of_forms_run(tmp_path):
    """What compiles in a process where kernels are not interpreted; the rest in this one."""
    (tmp_path / "talk.py").write_text(TALK)
    (tmp_path / "script.py").write_text("\n".join([*COMPILED, COMPILED_EXAMPLES]))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[0-9a-f]{16} send\n[0-9a-f]{16} receive\n", done.stdout), done.stdout
    assert len(COMPILED) == 2
    exec(compile(CONFTEST, "conftest.py", "exec"), {})


@pytest.mark.parametrize("path", sorted(HERE.rglob("*.py")), ids=lambda path: path.name)
@pytest.mark.quick("a file takes a millisecond")
def test_nothing_but_triton_numpy_and_greenlet_is_imported(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {name.partition(".")[0] for name in names}
    assert found - sys.stdlib_module_names <= {"triton", "numpy", "greenlet", "moelink_testing"}


def test_public_names_are_documented():
    for name in moelink_testing.__all__:
        assert getattr(moelink_testing, name).__doc__, name
    table = re.findall(r"^\| `(\w+)\(", README, re.MULTILINE)
    assert set(table) < set(moelink_testing.__all__)
    assert len(table) == 4
