"""Test and measure a machine in one call of a given time, one result a step, so that nothing is lost when time ends.

Results are compared with the oracle first. On two GPUs and more, every step that measures runs beside that once, with
one sample and no file, so that its kernels are compiled: on many cores this takes as long as the slowest of them. Then
steps run one after the other, each in processes of its own, which are ended at the step's limit. A step that measures
writes the file of its benchmark. After each step ``whole.json`` is written anew, with the exit status and the last line
of every step so far, and of those that did not begin.

On two GPUs and more: the tests of all transports; the presets decode, prefill, layouts, sms (4096 tokens at 24 and 16
SMs), skew, and layer for each of its models, with the libraries that load; GPUs played as nodes, in two levels if there
are four; 20,000 calls; and, on four or more, all GPU tests. On one GPU: the roles of 2, 4 and 8 ranks, which it
simulates, and layer for each of its models. Without a GPU: the presets that run on CPUs.

    python -m moelink_bench.whole --seconds 540 --folder results
    python -m moelink_bench.whole --steps results layer-qwen3-30b-a3b --seconds 200
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from moelink.errors import ArgumentError
from moelink_bench.names import CaseName
from moelink_bench.script import Save, Script, positive
from moelink_bench.serve_processes import started

_ENOUGH = 0.5
"""Share of a step's limit that must be left for it to begin: limits have room for a slow compiler."""
_COMPILING = 170
"""Seconds for the kernels of a step, while those of all others are compiled."""
_RIVALS = ("--peer", "flashinfer")
"""Of pairs. Torch's ``all_to_all_vdev_2d`` is no rival, and takes most of a step's time."""
_RESULTS = "not thousand_calls and (processes or bf16 or fp8_block128)"
"""The matrix of all formats takes longer than a call; it belongs to the tests of four GPUs."""
TOKENS = (1, 8, 32, 128, 512, 4096)


@dataclass(frozen=True)
class Step:
    """A process that tests or measures.

    Attributes:
        name: also of its file.
        arguments: of the interpreter. A benchmark's end with ``--out``, to which the file is added.
        seconds: after which it is ended.
        early: it measures nothing, and runs beside others first.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    early: bool = False

    @property
    def measures(self) -> bool:
        """Whether it writes a file."""
        return self.arguments[-1] == "--out"

    def recording(self, commit: str | None) -> Step:
        """Return the step whose file names ``commit``, on a machine without a repository."""
        if not self.measures or commit is None:
            return self
        return replace(self, arguments=(*self.arguments[:-1], "--commit", commit, "--out"))

    def compiling(self, *, peers: bool) -> Step:
        """Return the step that compiles the kernels of this one: the same with one sample and without a file.

        ``peers``: those of other libraries, which may take longer than all of moelink's, and are the same for all
        steps.
        """
        settings = ("--samples", "1", "--timeout", str(_COMPILING))  # they replace those before them
        kept = [word for word in self.arguments[:-1] if peers or word not in _RIVALS]
        arguments = (*kept, *settings, *["--no-peers"] * (not peers))
        return Step(f"compile-{self.name}", arguments, _COMPILING, early=True)


@dataclass(frozen=True)
class Done:
    """How a step went.

    Attributes:
        status: the exit status, or "ended" at the limit, or "not begun".
        seconds: that it took.
        last: the last line that it wrote.
    """

    name: str
    status: int | str
    seconds: float = 0.0
    last: str = ""


def steps_on(gpus: int) -> list[Step]:
    """Return the steps of a machine with so many GPUs, in their order."""
    if not gpus:
        return [_preset(name, 2, 150) for name in ("smoke", "layer-smoke", "roles-smoke")]
    layers = [_layer(name, gpus) for name in get_args(CaseName) if name != "tiny"]
    if gpus == 1:
        return [_preset("roles", None, 150), *layers]
    return [
        replace(_tests("results", _COMPILING, "processes", "matrix", "-k", _RESULTS), early=True),
        _pairs("decode", gpus, 80),
        _pairs("prefill", gpus, 110),
        _pairs("sms", gpus, 90, "--tokens", "4096", "--num-sms", "24", "--num-sms", "16"),
        *layers,
        _pairs("layouts", gpus, 60),
        _pairs("skew", gpus, 60, "--tokens", "4096"),
        _tests("levels", 100, "nodes_levels" if gpus >= 4 else "nodes"),
        _tests("calls", 100, "processes", "-k", "thousand_calls"),
        *[_tests("tests", 300, "faults", "symmetric", "moe", "zero_copy", "device_memory", "matrix")] * (gpus >= 4),
    ]


def _pairs(name: str, ranks: int, seconds: float, *options: str) -> Step:
    return _preset(name, ranks, seconds, *_RIVALS, *options)


def _preset(name: str, ranks: int | None, seconds: float, *options: str) -> Step:
    on = () if ranks is None else ("--ranks", str(ranks))
    command = ("-m", "moelink_bench", "--preset", name, *on, *options)
    return Step(name, (*command, "--timeout", str(seconds), "--out"), seconds)


def _layer(case: str, ranks: int) -> Step:
    tokens = [word for count in TOKENS for word in ("--tokens", str(count))]
    step = _preset("layer", ranks, 140, "--case", case, "--samples", "9", *tokens)
    return Step(f"layer-{case}", step.arguments, step.seconds)


def _tests(name: str, seconds: float, *words: str) -> Step:
    options = words.index("-k") if "-k" in words else len(words)
    files = [f"tests/gpu/test_{word}_gpu.py" for word in words[:options]]
    return Step(name, ("-m", "pytest", "--full", "-q", "-m", "gpu", *files, *words[options:]), seconds)


def perform(step: Step, folder: Path, seconds: float) -> Done:
    """Run a step for at most ``seconds``, and end all its processes. Its output goes to a file of its name."""
    out = (str(folder / f"{step.name}.json"),) if step.measures else ()
    log, begin = folder / f"{step.name}.log", time.monotonic()
    status: int | str = "ended"
    with started((*step.arguments, *out), log, grace=0.0) as process, suppress(subprocess.TimeoutExpired):
        status = process.wait(seconds)
    lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return Done(step.name, status, round(time.monotonic() - begin, 1), last)


def perform_all(steps: Sequence[Step], folder: Path, seconds: float, note: Any) -> list[Done]:
    """Run the steps within ``seconds``. ``note`` is called with all of them after each."""
    end, done = time.monotonic() + seconds, [Done(step.name, "not begun") for step in steps]

    def perform_at(place: int) -> None:
        step, left = steps[place], end - time.monotonic()
        if left < _ENOUGH * step.seconds:
            return  # a shorter one may still fit
        done[place] = one = perform(step, folder, min(left, step.seconds))
        print(f"{one.name:28}{one.status!s:>10}{one.seconds:8.1f} s  {one.last[:90]}", flush=True)
        note(done)

    early = [place for place, step in enumerate(steps) if step.early]
    with ThreadPoolExecutor(max(1, len(early))) as pool:
        list(pool.map(perform_at, early))
    for place in range(len(steps)):
        if place not in early:
            perform_at(place)
    return done


def run(args: argparse.Namespace, save: Save) -> int:
    """Run the steps; the status is 1 if one failed or did not begin."""
    gpus = min(args.ranks or torch.cuda.device_count(), torch.cuda.device_count())
    known = {step.name: step for step in steps_on(gpus)}
    for name in args.steps or ():
        if name not in known:
            raise ArgumentError("steps", f"some of {', '.join(known)}", name)
    args.folder.mkdir(parents=True, exist_ok=True)

    def note(done: Sequence[Done]) -> None:
        save("whole", {"gpus": gpus, "steps": [asdict(one) for one in done]})

    args.out = args.out or args.folder / "whole.json"
    chosen = [known[name].recording(args.commit) for name in args.steps or known]
    measuring = [step for step in chosen if step.measures and gpus > 1 and not args.compiled]
    compiling = [step.compiling(peers=step is measuring[0]) for step in measuring]
    done = perform_all([*compiling, *chosen], args.folder.resolve(), args.seconds, note)
    note(done)
    missed = [one.name for one in done if one.status == "not begun"]
    if missed:
        print(f"not begun: {', '.join(missed)}")
    return int(any(one.status != 0 for one in done[len(compiling) :]))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=positive, default=540, help="for all steps; default: 540")
    parser.add_argument("--folder", type=Path, default=Path("results"), help="of all files; default: results")
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="only these, in this order")
    parser.add_argument("--compiled", action="store_true", help="the cache holds the kernels; compile nothing first")
    parser.add_argument("--ranks", type=positive, help="GPUs that take part; default: all")


main = Script("whole", __doc__, _options, run).main

if __name__ == "__main__":
    raise SystemExit(main())
