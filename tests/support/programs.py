"""Run Python programs in processes that nothing of the tests has changed, with Triton as users have it.

A program that Python starts from nothing loads torch and moelink for three to six seconds of processor time. One from
here is a fork of a process that has them. Kernels are not among what it has, nor is anything that tests import: each
program loads kernels for itself, and finds its own folder on its module search path, as if Python had started it.

    python tests/support/programs.py

reads orders from its standard input, one a line, and answers each with a line: the exit statuses of its programs, null
for one that was killed at the deadline. Triton decides as it is loaded whether it interprets, so a server has the
``TRITON_INTERPRET`` that programs will have, whether they find it in their environment or set it before they import
kernels: :func:`server` that of this process, :func:`compiler` none.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

PRELOADED = (
    "torch",
    "torch.distributed",
    "moelink.initialize",
    "moelink.nn",
    "moelink.transports.collective.transport",
)
"""What most programs import, and what takes long. Kernels are left out: the interpreter changes their modules when it
first runs them, which could hide what is wrong with them."""

FORBIDDEN = ("moelink.kernels", "moelink_testing", "tests")
"""What a program must not find loaded."""


@dataclass(frozen=True)
class Program:
    """One process.

    Attributes:
        command: a script or ``-m module``, and its arguments, as ``python`` takes them.
        environment: all of its variables.
        folder: its working folder.
        out: the file or terminal for its standard output.
        err: that for its standard error.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    out: str
    err: str

    def become(self) -> None:
        """Give this process the output, the environment and the folder of the program."""
        os.setsid()
        for number, file in ((0, os.devnull), (1, self.out), (2, self.err)):
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOCTTY if number else os.O_RDONLY)
            os.dup2(opened, number)
            os.close(opened)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)

    def run(self) -> None:
        """Run the program in this process."""
        if self.command[0] == "-m":
            sys.argv = self.command[1:]
            sys.path.insert(0, self.folder)
            runpy.run_module(self.command[1], run_name="__main__", alter_sys=True)
        else:
            script = Path(self.folder, self.command[0])
            sys.argv = self.command
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")


class Server:
    """The process that is forked, seen from the one that has started it.

    Args:
        environment: its variables.
        preloaded: names of modules that it loads.
    """

    def __init__(self, environment: Mapping[str, str], preloaded: Sequence[str]) -> None:
        command = [sys.executable, __file__, *preloaded]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environment)
        )

    def run(self, programs: Sequence[Program], timeout: float, at_once: int = 1) -> list[int | None]:
        """Run programs, ``at_once`` of them side by side, and return their exit statuses in order, negative if a signal
        has ended one.

        A program that takes longer than ``timeout`` seconds is killed with its children, and has None.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"programs": [asdict(program) for program in programs], "timeout": timeout, "at_once": at_once}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"programs: expected an answer, got its exit status {self._process.wait()}")
        return json.loads(answer)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@functools.cache
def server() -> Server:
    """Return the server of this process, which starts when it is first wanted and ends with this process."""
    return _until_exit(Server(os.environ, PRELOADED))


@functools.cache
def compiler() -> Server:
    """Return the server of this process for programs that compile kernels, as :func:`server` does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return _until_exit(Server(environment, (*PRELOADED, "triton.compiler")))


def _until_exit(made: Server) -> Server:
    atexit.register(made.close)
    return made


def serve(orders: TextIO, answers: TextIO) -> Program | None:
    """Carry orders out. Returns None when they end, and in each fork the program that it is to run."""
    for line in orders:
        order = json.loads(line)
        waiting = [(index, Program(**fields)) for index, fields in enumerate(order["programs"])]
        statuses: list[int | None] = [None] * len(waiting)
        running: dict[int, tuple[int, float]] = {}
        while waiting or running:
            while waiting and len(running) < order["at_once"]:
                index, program = waiting.pop(0)
                child = os.fork()
                if child == 0:
                    return program
                running[child] = (index, time.monotonic() + order["timeout"])
            for child, (index, deadline) in list(running.items()):
                late = time.monotonic() > deadline
                if late:
                    _kill_all(child)
                ended, status = os.waitpid(child, 0 if late else os.WNOHANG)
                if ended:
                    del running[child]
                    statuses[index] = None if late else os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        answers.write(json.dumps(statuses) + "\n")
        answers.flush()
    return None


def _kill_all(child: int) -> None:
    """Kill a program and its children, or the fork alone if it is not a program yet."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))
    for name in sys.argv[1:]:
        importlib.import_module(name)
    found = [name for name in FORBIDDEN if name in sys.modules]
    if found:
        raise SystemExit(f"expected none of {FORBIDDEN}, got {found}; {sys.argv[1:]} load them")
    gc.collect()
    gc.freeze()  # a fork that ends would look through all of it, for half a second
    chosen = serve(sys.stdin, sys.stdout)
    if chosen is not None:
        chosen.become()
        importlib.import_module("torch").set_num_threads(1)
        chosen.run()
