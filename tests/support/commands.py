"""Run ``python ...`` and ``torchrun ...`` for tests, in processes that come from ``programs``.

Each is as if Python had started it: its own arguments, environment, folder and output, ``__main__`` in its own process,
an exit status, and kernels in Triton's own interpreter. Tests of what a program imports, and of ``torchrun`` itself,
start processes of their own.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moelink.testing import free_port
from tests.support.programs import Program, server


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
    where = str(folder if folder is not None else Path.cwd())
    with tempfile.TemporaryDirectory() as place:
        programs = []
        for rank in range(max(1, ranks)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
            files = [str(Path(place) / f"{name}{rank}") for name in ("out", "err")]
            programs.append(Program(command, variables | own, where, *files))
        statuses = server().run(programs, timeout, at_once=len(programs))
        said = ["".join(path.read_text() for path in sorted(Path(place).glob(f"{name}*"))) for name in ("out", "err")]
        if None in statuses:
            raise subprocess.TimeoutExpired(command, timeout, *said)
        return subprocess.CompletedProcess(command, next(filter(None, statuses), 0), *map(_without_leaks, said))


def _without_leaks(text: str) -> str:
    """``text`` without all that Triton 3.9 says at the end of a process of what its bindings leaked."""
    return re.sub(r"nanobind: leaked .*?refleaks\.html\n?", "", text, flags=re.DOTALL)


def run_in_terminal(*arguments: str, environment: Mapping[str, str]) -> str:
    """Run ``python *arguments`` with a terminal as its standard output, and return what it says there."""
    ours, theirs = os.openpty()
    program = Program(list(arguments), dict(environment), str(Path.cwd()), os.ttyname(theirs), os.devnull)
    said = []
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(server().run, [program], 60.0)
        while select.select([ours], [], [], 0.1)[0] or not ending.done():
            if select.select([ours], [], [], 0)[0]:
                said.append(os.read(ours, 65536))
    os.close(theirs)
    os.close(ours)
    assert ending.result() == [0], said
    return b"".join(said).decode()
