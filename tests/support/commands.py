"""Run ``python ...`` and ``torchrun ...`` for tests, in processes that come from the fork server of the ranks.

A process that Python starts from nothing loads torch and moelink for three to six seconds of processor time. One from
the fork server has them. Otherwise it is as if it had been started: its own arguments, environment, folder and output,
``__main__`` in its own process, an exit status. Tests of what a program imports, and of ``torchrun`` itself, start
processes of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from moelink.testing import free_port


def run_python(
    *arguments: str | Path,
    ranks: int = 0,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments``, a script or ``-m module`` and its arguments, and return what ``subprocess.run`` does.

    Args:
        ranks: run it in so many processes, as ``torchrun --nproc-per-node`` does; 0 for one without torchrun's
            variables. Their output is that of rank 0, then that of rank 1, and so on; their status is the first that is
            not 0.
        environment: all variables; None for those of this process.
        folder: the working folder; None for that of this process.

    Raises:
        subprocess.TimeoutExpired: a process had not ended after ``timeout`` seconds. All are killed.
    """
    command = [str(argument) for argument in arguments]
    variables = dict(os.environ if environment is None else environment)
    if ranks:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as place:
        processes = []
        for rank in range(max(1, ranks)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
            files = [str(Path(place) / f"{name}{rank}") for name in ("out", "err")]
            where = str(folder if folder is not None else Path.cwd())
            processes.append(context.Process(target=_main, args=(command, variables | own, where, *files)))
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        said = ["".join(path.read_text() for path in sorted(Path(place).glob(f"{name}*"))) for name in ("out", "err")]
        if late:
            raise subprocess.TimeoutExpired(command, timeout, *said)
        failed = [process.exitcode for process in processes if process.exitcode]
        return subprocess.CompletedProcess(command, failed[0] or 0 if failed else 0, *said)


def run_in_terminal(*arguments: str, environment: Mapping[str, str]) -> str:
    """Run ``python *arguments`` with a terminal as its standard output, and return what it says there."""
    ours, theirs = os.openpty()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(
        target=_main, args=(list(arguments), dict(environment), str(Path.cwd()), os.ttyname(theirs), os.devnull)
    )
    process.start()
    said = []
    with suppress(OSError):  # the other end is closed: the process has ended
        while select.select([ours], [], [], 0.1)[0] or process.is_alive():
            if select.select([ours], [], [], 0)[0]:
                said.append(os.read(ours, 65536))
    process.join()
    os.close(theirs)
    os.close(ours)
    assert process.exitcode == 0, said
    return b"".join(said).decode()


def _main(command: list[str], environment: dict[str, str], folder: str, out: str, err: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for number, file in ((1, out), (2, err)):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        script = Path(folder, command[0])
        sys.argv = command
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
