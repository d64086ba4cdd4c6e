"""Run the GPU tests file by file, several files at a time.

    python gpu_files.py                     # all of them, as ``make gpu-test`` does
    python gpu_files.py --workers 2 test_symmetric_gpu.py test_lanes.py

The kernels of all files are compiled by all processors at once, file by file. A file runs as soon as its own kernels
are compiled; one whose tests name none (marker ``kernels``) runs at once. If each file compiled for itself, it would
start as many processes again, and several such files together need more memory than a machine has. Files with tests
that are marked ``alone`` come last, one at a time, when nothing is compiled any more.

It prints a line for each file as it ends: status, seconds, and pytest's closing line. Logs are files of a folder. The
exit status is 1 when a file failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.gpu_compile import Task, ahead, compile_in_turn, gpu_tests
from tests.support.paths import ROOT

TESTS = ROOT / "tests"
LONG = (
    "gpu/test_moe_graphs_gpu.py", "gpu/test_moe_gpu.py", "gpu/test_transformers_gpu.py", "gpu/test_vllm_gpu.py",
    "gpu/test_matrix_gpu.py", "gpu/test_nodes_gpu.py", "gpu/test_symmetric_gpu.py",
)  # fmt: skip
"""Files that take minutes: they begin before the others, so that none of them is alone at the end."""
LIMIT = 1200.0
"""Seconds after which a file is given up."""
CLOSING = re.compile(r"\b(passed|failed|skipped|deselected|errors?|no tests ran)\b.* in [\d.]+s")


@dataclass(frozen=True)
class File:
    """A file of GPU tests.

    Attributes:
        name: of the file, relative to ``tests``.
        tasks: what its tests launch, to be compiled before; skipped tests launch nothing.
        alone: nothing else may run beside it.
    """

    name: str
    tasks: tuple[Task, ...] = ()
    alone: bool = False

    def command(self, compiled: bool) -> list[str]:
        """What runs it. ``compiled``: its kernels are in the cache already."""
        start = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        return [sys.executable, *start, str(TESTS / self.name), *["--compiled"] * compiled]


@dataclass(frozen=True)
class Outcome:
    """How a file ended: its exit status, the seconds it took, and pytest's closing line, or else its last line."""

    name: str
    status: int
    seconds: float
    closing: str

    @property
    def passed(self) -> bool:
        """Whether no test failed. A file that was skipped as a whole has none."""
        return self.status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)

    def __str__(self) -> str:
        word = "passed" if self.passed else f"FAILED ({self.status})"
        return f"{word:12} {self.seconds:5.0f} s  {self.name:34} {self.closing}"


def files_of(names: Sequence[str]) -> list[File]:
    """The files among ``names`` that have GPU tests, long ones first; without names, of all files."""
    found: dict[str, list[Any]] = {}
    for item in gpu_tests([str(TESTS / name) for name in names] or [str(TESTS)]):
        found.setdefault(item.path.relative_to(TESTS).as_posix(), []).append(item)
    files = [
        File(name, tuple(ahead(items)), any(item.get_closest_marker("alone") for item in items))
        for name, items in found.items()
    ]
    return sorted(files, key=lambda file: LONG.index(file.name) if file.name in LONG else len(LONG))


def run(file: File, logs: Path, compiled: bool, threads: int) -> Outcome:
    """Run ``file``; what it prints goes to a file of ``logs``.

    ``threads``: of its process, for what torch computes on the CPU, unless the environment says how many.
    """
    began = time.monotonic()
    log = logs / (file.name.removesuffix(".py").replace("/", "-") + ".txt")
    env = {"OMP_NUM_THREADS": str(threads), **os.environ}
    with log.open("w") as stream:
        try:
            command = file.command(compiled)
            done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, timeout=LIMIT, env=env)
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = -1
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["printed nothing"]
    closing = next((line for line in reversed(lines) if CLOSING.search(line)), lines[-1])
    return Outcome(file.name, status, time.monotonic() - began, closing)


def run_all(files: Sequence[File], logs: Path, workers: int) -> list[Outcome]:
    """Compile, and run ``files``, up to ``workers`` at a time. Prints each outcome as it comes.

    A file of which a kernel cannot be compiled compiles it again, and fails.
    """
    outcomes: list[Outcome] = []
    # With a thread for every processor in each of them, files that share these mostly wait for threads.
    threads = max(1, len(os.sched_getaffinity(0)) // workers)

    def note(file: File, compiled: bool) -> None:
        outcome = run(file, logs, compiled, threads)
        outcomes.append(outcome)
        print(outcome, flush=True)

    named = [file for file in files if file.tasks]
    compiled = dict.fromkeys((file.name for file in files), True)
    with ThreadPoolExecutor(workers) as pool:
        ends = [pool.submit(note, file, True) for file in files if not file.tasks and not file.alone]
        for number, error in compile_in_turn([file.tasks for file in named]):
            file = named[number]
            if error is not None:
                print(error, flush=True)
                compiled[file.name] = False
            if not file.alone:
                ends.append(pool.submit(note, file, compiled[file.name]))
    for end in ends:
        end.result()
    for file in files:
        if file.alone:
            note(file, compiled[file.name])
    return outcomes


def main() -> None:
    """See the docstring of the module."""
    parser = argparse.ArgumentParser(description="GPU tests, file by file, several files at a time.")
    parser.add_argument("names", nargs="*", help="files of tests/; without any, all")
    parser.add_argument("--workers", type=int, default=4, help="files at a time (%(default)s)")
    parser.add_argument("--logs", type=Path, help="folder of the logs; a new one by default")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("expected a CUDA device, got none: run this on a GPU machine")
    logs = options.logs or Path(tempfile.mkdtemp(prefix="gpu-tests-"))
    logs.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(files_of(options.names), logs, options.workers)
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} files passed; logs are in {logs}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
