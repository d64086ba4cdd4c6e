"""Planted faults, each of which a test of the quick tier must catch: ``make mutants``.

``mutants_table`` lists the faults. For each of them this program copies the repository to a temporary folder, replaces
one piece of text there, runs the one test that the row names, and prints whether the test failed, that is, whether it
caught the fault. Before that it runs all of these tests without a fault. The exit status is 1 when a fault survives,
when a text to replace is not found exactly once, or when a test does not pass without a fault.

    python -m tests.mutants.mutants [-k WORD] [--list] [-j WORKERS]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.support.paths import ROOT

PACKAGE, TESTS = "src/moelink", "tests"
OTHERS = ("testing/", "benchmarks/")
"""Folders of the other distributions."""
SECONDS = 120
"""Limit of one run of pytest with a fault. A test that runs longer has caught it: a hang fails in every tier."""

_SERVER = """
import importlib, json, os, signal, sys, time
for name in ("pytest", *sys.argv[1:]):
    importlib.import_module(name)
for line in sys.stdin:
    output, limit, arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.exit(sys.modules["pytest"].main(arguments))
    end = None if limit is None else time.monotonic() + limit
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if end is not None and time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)  # its ranks, too
            end = None
        time.sleep(0.01)
    print(os.waitstatus_to_exitcode(ended[1]), flush=True)
"""
"""Runs pytest, once a line: ``[file for its output, limit in seconds or null, arguments]``. Each run is a fork of this
process, which has imported what takes half of the time of a run."""

_IMPORTS = ("torch", "numpy")  # no plugins of pytest: it warns of those that are there before it
_DID_NOT_RUN = "it did not run"
_LEFT_OUT = (".git", ".venv*", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "build", "dist")


@dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Attributes:
        fault: what is wrong, in a few words.
        file: where, relative to ``src/moelink``, or to the root if it begins with ``testing/`` or ``benchmarks/``.
        old: text that occurs exactly once in ``file``.
        new: text that takes its place.
        test: id of the test that must fail, relative to ``tests``: ``test_config.py::test_derived_sizes``, or one
            parameter set, ``test_formats.py::test_mxfp4_scale[1.6-125]``. The quick tier must run it.
    """

    fault: str
    file: str
    old: str
    new: str
    test: str

    def path(self, root: Path) -> Path:
        """Return the path of ``file`` in the tree at ``root``."""
        return root / self.file if self.file.startswith(OTHERS) else root / PACKAGE / self.file

    def problem(self, root: Path) -> str:
        """Say why this fault cannot be planted in the tree at ``root``, or return ""."""
        path = self.path(root)
        if not path.is_file():
            return "no such file"
        found = path.read_text(encoding="utf-8").count(self.old)
        return "" if found == 1 else f"text found {found} times"


@dataclass(frozen=True)
class Outcome:
    """What a test said of a fault: ``verdict`` is "caught", "SURVIVED", or why there is no answer."""

    mutant: Mutant
    verdict: str
    seconds: float


class Workplace:
    """A copy of the tree at ``root``, in which one test run at a time plants a fault.

    Args:
        root: the tree.
        folder: where the copy goes; it does not exist yet.
        imports: modules that all runs share (``_SERVER``).
    """

    def __init__(self, root: Path, folder: Path, imports: Sequence[str]) -> None:
        self.root = folder / "a copy"  # with a space, as users' folders may have
        shutil.copytree(root, self.root, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        paths = [str(self.root / "src"), str(self.root), *filter(None, [env.get("PYTHONPATH")])]
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *imports], cwd=self.root, env={**env, "PYTHONPATH": os.pathsep.join(paths)},
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def close(self) -> None:
        """End the process that starts the runs."""
        self._server.communicate()

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Replace the text of ``mutant`` for as long as the context lasts."""
        path = mutant.path(self.root)
        # Python would take compiled code for that of a source of the same size and second.
        compiled = Path(importlib.util.cache_from_source(str(path)))
        right = path.read_text(encoding="utf-8")
        compiled.unlink(missing_ok=True)
        path.write_text(right.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            yield
        finally:
            compiled.unlink(missing_ok=True)
            path.write_text(right, encoding="utf-8")

    def pytest(self, *arguments: str, limit: float | None = None) -> tuple[int, str]:
        """Run pytest with ``arguments``. Return its exit status, which is negative if a signal ended it, as one does
        after ``limit`` seconds, and what it printed."""
        output = self.root / "output.txt"
        order = (str(output), limit, ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments])
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return status, output.read_text(encoding="utf-8", errors="replace")

    def judge(self, mutant: Mutant) -> Outcome:
        """Run the test of ``mutant`` with the fault in place."""
        began = time.monotonic()
        with self.planted(mutant):
            status, _ = self.pytest("-x", "--tb=no", f"{TESTS}/{mutant.test}", limit=SECONDS)
        verdict = {0: "SURVIVED", 1: "caught"}.get(status, f"pytest ended with {status}")
        if status < 0:  # by a signal: it ran for too long, or interpreted kernels went to addresses that are none
            verdict = "caught"
        return Outcome(mutant, verdict, time.monotonic() - began)

    def failures(self, tests: Sequence[str]) -> dict[str, str]:
        """Run ``tests`` without a fault. Return those that did not pass, and why; "" stands for pytest itself."""
        report = self.root / "report.xml"
        report.unlink(missing_ok=True)
        ids = [f"{TESTS}/{test}" for test in tests]
        _, output = self.pytest("--tb=short", f"--junitxml={report}", *ids)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
        failures = {test: why for test in tests if (why := _why_not_passed(test, cases))}
        if _DID_NOT_RUN in failures.values():
            failures[""] = f"pytest printed:\n{output[-2000:]}"
        return failures


def _why_not_passed(test: str, cases: Sequence[ElementTree.Element]) -> str:
    """Say what the report has against ``test``; "" when all that it stands for passed."""
    file, *classes, function = test.split("::")
    place = ".".join([TESTS, *Path(file).with_suffix("").parts, *classes])
    mine = [
        case
        for case in cases
        if case.get("classname") == place and function in (case.get("name"), str(case.get("name")).partition("[")[0])
    ]
    if not mine:
        return _DID_NOT_RUN
    against = [child for case in mine for child in case if child.tag in ("failure", "error", "skipped")]
    return "\n".join(f"{child.tag}: {child.get('message')}\n{child.text or ''}" for child in against)


def run(mutants: Sequence[Mutant], root: Path = ROOT, workers: int = 2, imports: Sequence[str] = _IMPORTS) -> int:
    """Plant each fault of the tree at ``root`` and print the table. Return the exit status.

    ``imports``: modules outside of the tree that its tests import.
    """
    began = time.monotonic()
    wrong = 0
    for mutant in mutants:
        if problem := mutant.problem(root):
            print(f"{mutant.file}: {problem}: {mutant.old!r} ({mutant.fault})")
            wrong += 1
    if wrong:
        return 1
    tests = list(dict.fromkeys(mutant.test for mutant in mutants))
    workers = max(1, min(workers, len(tests)))
    printing = threading.Lock()
    widths = [max(len(getattr(mutant, name)) for mutant in mutants) for name in ("fault", "file")]
    with _workplaces(workers, root, imports) as free, ThreadPoolExecutor(workers) as pool:

        def without_a_fault(number: int) -> int:
            with _one_of(free) as place:
                failures = place.failures(tests[number::workers])
            with printing:
                for test, why in failures.items():
                    print(f"{test} does not pass without a fault: {why}" if test else why)
            return len(failures)

        def judge(mutant: Mutant) -> bool:
            with _one_of(free) as place:
                outcome = place.judge(mutant)
            where = f"{mutant.fault:{widths[0]}}  {mutant.file:{widths[1]}}"
            with printing:
                print(f"{outcome.verdict:8}  {outcome.seconds:5.1f} s  {where}  {mutant.test}", flush=True)
            return outcome.verdict == "caught"

        if sum(pool.map(without_a_fault, range(workers))):
            return 1
        print(f"{len(tests)} tests pass without a fault, {time.monotonic() - began:.0f} s", flush=True)
        caught = sum(pool.map(judge, mutants))
    print(f"{caught} of {len(mutants)} faults caught in {time.monotonic() - began:.0f} s")
    return 0 if caught == len(mutants) else 1


@contextmanager
def _workplaces(count: int, root: Path, imports: Sequence[str]) -> Iterator[queue.SimpleQueue[Workplace]]:
    """Make ``count`` workplaces in a temporary folder; the queue holds those that are free."""
    free: queue.SimpleQueue[Workplace] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        made: list[Workplace] = []
        try:
            for number in range(count):
                made.append(Workplace(root, Path(folder) / str(number), imports))
                free.put(made[-1])
            yield free
        finally:
            for place in made:
                place.close()


@contextmanager
def _one_of(free: queue.SimpleQueue[Workplace]) -> Iterator[Workplace]:
    place = free.get()
    try:
        yield place
    finally:
        free.put(place)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from tests.mutants.mutants_table import MUTANTS

    parser = argparse.ArgumentParser(description="Plant faults and run the tests that must catch them.")
    parser.add_argument("-k", metavar="WORD", default="", help="only rows in which this word occurs")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("-j", metavar="WORKERS", type=int, default=2, help="faults planted at a time (default: 2)")
    options = parser.parse_args(arguments)
    mutants = [m for m in MUTANTS if options.k.lower() in f"{m.fault} {m.file} {m.test}".lower()]
    if not mutants:
        parser.error(f"expected a word of some row, got {options.k!r}; --list prints all rows")
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}: {mutant.fault}; {mutant.test}")
        return 0
    return run(mutants, workers=options.j)


if __name__ == "__main__":
    # The table imports this module by its name.
    from tests.mutants.mutants import main as main_of_module

    sys.exit(main_of_module())
