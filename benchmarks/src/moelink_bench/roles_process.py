"""Processes that answer cases of roles, a line of JSON each: how they are started, asked and ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import moelink
from moelink_bench.roles_worker import Case


def environment_of(source: Path, device: str, cache: Path | None = None) -> dict[str, str]:
    """Return the environment of a process that measures the package in the folder ``source``.

    ``cache``: where Triton keeps compiled kernels, or None for its default. On a CPU kernels are interpreted.
    """
    return {
        **os.environ, "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")])),
        **({} if cache is None else {"TRITON_CACHE_DIR": str(cache)}),
        **({"TRITON_INTERPRET": "1"} if device == "cpu" else {}),
    }  # fmt: skip


def own_source() -> Path:
    """Return the folder that the running package is imported from."""
    return Path(moelink.__file__).resolve().parents[1]


class Worker:
    """A process that runs ``script`` and measures what it is asked for.

    Attributes:
        name: in error messages.
        device: "cuda:N" or "cpu".
        environment: of the process.
    """

    def __init__(self, name: str, script: str, device: str, environment: Mapping[str, str]) -> None:
        self.name, self.script, self.device, self.environment = name, script, device, dict(environment)
        self.process: subprocess.Popen[str] | None = None

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, self.script, "--device", self.device, *arguments],
            env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def compile(self, cases: Sequence[Case], processes: int) -> subprocess.Popen[str]:
        """Start to compile what ``cases`` launch."""
        process = self._start("--compile", str(processes))
        assert process.stdin is not None
        process.stdin.write("".join(json.dumps(asdict(case)) + "\n" for case in cases))
        process.stdin.close()
        return process

    def start(self, timeout: float) -> dict[str, Any]:
        """Start the process that measures. Returns what it says about itself."""
        self.process = self._start()
        return self._read(timeout)

    def ask(self, case: Case, *, check: bool, timeout: float) -> dict[str, Any]:
        """What the process gives for ``case``.

        Raises:
            RuntimeError: it ended, or did not answer within ``timeout`` seconds and was killed.
        """
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"case": asdict(case), "check": check}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(f"{self.name}: the process that measures ended; its last words are above") from error
        return self._read(timeout)

    def _read(self, timeout: float) -> dict[str, Any]:
        """The next answer: one line, and never more than one is on its way."""
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(timeout, 1.0))
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.process.kill()
            why = "ended" if ready else f"did not answer within {timeout:.0f} s"
            raise RuntimeError(f"{self.name}: the process that measures {why}; its last words are above")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            end_process(self.process)
            self.process = None


def end_process(process: subprocess.Popen[str]) -> None:
    """Wait until ``process`` has ended, and close its pipes."""
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            pipe.close()


def compile_all(workers: Sequence[Worker], cases: Sequence[Case], limit: float) -> None:
    """Compile for all ``workers`` at once, with an equal part of the processors each, for at most ``limit`` seconds."""
    processes = max(1, min(24, len(os.sched_getaffinity(0)) // len(workers)))
    started = [worker.compile(cases, processes) for worker in workers]
    end = time.monotonic() + limit
    for worker, process in zip(workers, started, strict=True):
        try:
            process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile
            sys.stderr.write(f"{worker.name}: not all was compiled within {limit:.0f} s; measuring compiles the rest\n")
        end_process(process)
