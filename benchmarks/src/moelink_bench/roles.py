"""Compare the kernels of two source trees, role by role, on one device in one run.

    mkdir .old && git archive COMMIT | tar -x -C .old
    PYTHONPATH=src python -m moelink_bench.roles --a .old --b . --commits COMMIT HEAD --out roles.json
    PYTHONPATH=src python -m moelink_bench.roles --a .old --b . --quick

Each tree gets a process of its own. The driver asks both for the same case in turn (A B, B A, A B ...), so that drift
of the machine falls on both, and compares the medians of the rounds. Cases with a slower row are measured again.

What a case measures, with W ranks on one device:

* Roles: ``dispatch sender``, ``dispatch receiver``, ``combine sender``, ``combine home``. Each phase of the split form
  is one CUDA graph with the launches of all ranks on one stream, so a role runs alone and finds everything it waits
  for. A role's time is that of its graph divided by W. The receiver's graph includes the launch that lays out scales,
  where there is one; ``scale layout`` is that launch alone, between two events.
* ``fused pair``: dispatch and combine of one rank, replayed from a graph of many pairs.
* Host: processor time of an eager dispatch, combine and pair of one rank.
* Kernels: registers, spills and shared memory of everything that was loaded.

``bytes`` is the least that one rank's role reads and writes in device memory, by the rules of the tree that this
program is of. Before any time is taken, both trees' results are reduced to checksums; rows of cases whose checksums
differ are errors. On a CPU (``--device cpu``, Triton's interpreter, sizes of ``--tiny``) the same code runs with the
host's clock; those times mean nothing.

Both trees are measured by the same file, ``roles_worker.py``. Compiled kernels stay in ``--cache``, apart for each
tree, so a second run on the same machine has all its time for measuring.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moelink_bench import roles_worker
from moelink_bench.roles_process import Worker, compile_all, environment_of
from moelink_bench.roles_result import bytes_of
from moelink_bench.roles_worker import HOST, Case
from moelink_bench.script import Save, Script

RANKS = (2, 4, 8)
"""Numbers of ranks that are simulated."""
TOKENS = (1, 8, 32, 128, 512, 4096)
"""Tokens of each rank."""

SLOWER = 1.02
"""A row is slower when B takes more than this times what A takes."""


def cases_of(*, quick: bool = False, tiny: bool = False) -> list[Case]:
    """Everything that is measured."""
    if tiny:
        sizes: Any = {"hidden": 256, "experts": 8, "topk": 2}
        return [
            Case("host", 1, 2, "fp8_block128", **sizes),
            Case("fused", 1, 1, "fp8_block128", **sizes),
            Case("roles", 2, 2, "fp8_block128", **sizes),
        ]
    if quick:
        sizes_of: dict[int, tuple[int, ...]] = {2: (1, 128, 4096), 4: TOKENS, 8: (1, 128, 4096)}
        formats: tuple[str, ...] = ("fp8_block128",)
    else:
        sizes_of, formats = dict.fromkeys(RANKS, TOKENS), ("fp8_block128", "bf16")
    return [
        *[Case("roles", w, t, fmt) for t in TOKENS for w in RANKS if t in sizes_of[w] for fmt in formats],
        *[Case("fused", 1, 1, fmt) for fmt in formats],
        Case("host", 1, 128, "fp8_block128", experts=64),
    ]


def label(case: Case) -> str:
    """A short name of a case."""
    by = "" if case.layout == "expert" else f" by {case.layout}"
    within = "" if case.num_sms is None else f" {case.num_sms} SMs"
    return f"{case.kind} W={case.ranks} tokens={case.tokens} {case.format}{by}{within}"


class Tree(Worker):
    """A process that measures one tree."""

    def __init__(self, root: Path, device: str, cache: Path) -> None:
        self.root = root.resolve()
        source = self.root / "src"
        if not (source / "moelink").is_dir():
            raise SystemExit(f"expected a tree with src/moelink, got {self.root}; make it with `git archive`")
        own = cache / hashlib.sha256(str(self.root).encode()).hexdigest()[:12]
        super().__init__(str(self.root), roles_worker.__file__, device, environment_of(source, device, own))

    def start(self, timeout: float) -> dict[str, Any]:
        """Start the process that measures. Returns what it says about itself."""
        hello = super().start(timeout)
        if Path(hello["package"]) != self.root / "src" / "moelink":
            raise SystemExit(f"expected moelink of {self.root}, got {hello['package']}; leave sys.path alone")
        return hello


class Comparison:
    """Answers of both trees, by case. ``device``: "cpu", "cuda" or "cuda:N"."""

    def __init__(self, cases: Sequence[Case], device: str) -> None:
        self.cases, self.device = tuple(cases), device
        self.times: dict[tuple[Case, str], tuple[list[float], list[float]]] = {}
        self.bytes: dict[tuple[Case, str], int] = {}
        self.checksums: dict[Case, list[str]] = {}
        self.kernels: tuple[dict[tuple[Case, str], Any], ...] = ({}, {})
        self.errors: list[str] = []

    def add(self, case: Case, side: int, answer: dict[str, Any]) -> None:
        """The answer of tree ``side`` (0: A, 1: B)."""
        if "error" in answer:
            self.errors.append(f"{'AB'[side]} {label(case)}: {answer['error']}")
            return
        moved = bytes_of(case, answer["counts"], self.device) if "counts" in answer else {}
        for role, microseconds in answer["times"].items():
            self.times.setdefault((case, role), ([], []))[side].append(microseconds)
            self.bytes[case, role] = moved.get(role, 0)
        if "checksum" in answer:
            sums = self.checksums.setdefault(case, ["", ""])
            sums[side] = answer["checksum"]
            if "" not in sums and sums[0] != sums[1]:
                self.errors.append(f"{label(case)}: A and B give other bits ({sums[0]}, {sums[1]})")
        self.kernels[side].update({(case, name): stats for name, stats in answer["kernels"].items()})

    def rows(self) -> list[dict[str, Any]]:
        """A row for each role of each case that both trees gave, the worst ratio first."""
        found = []
        for (case, role), (a, b) in self.times.items():
            if a and b:
                a_us, b_us = statistics.median(a), statistics.median(b)
                found.append({
                    "role": role, "W": case.ranks, "tokens": case.tokens, "format": case.format,
                    "a_us": round(a_us, 3), "b_us": round(b_us, 3), "ratio": round(b_us / a_us, 4),
                    "bytes": self.bytes[case, role], "a_rounds": [round(t, 3) for t in a],
                    "b_rounds": [round(t, 3) for t in b],
                })  # fmt: skip
        return sorted(found, key=lambda row: -row["ratio"])

    def slower_cases(self) -> list[Case]:
        """Cases with a row that is slower in B."""
        slow = {
            case for (case, _), (a, b) in self.times.items()
            if a and b and statistics.median(b) > SLOWER * statistics.median(a)
        }  # fmt: skip
        return [case for case in self.cases if case in slow]

    def compared_kernels(self) -> list[dict[str, Any]]:
        """Each kernel of each case; registers, spills and shared memory in both trees, None where a tree has none."""
        a, b = self.kernels
        return [
            {"name": name, "case": label(case), "a": a.get((case, name)), "b": b.get((case, name))}
            for case, name in dict.fromkeys([*a, *b])
        ]

    def document(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        rows = self.rows()
        return {
            "rows": [row for row in rows if row["role"] not in HOST],
            "host": [row for row in rows if row["role"] in HOST],
            "kernels": self.compared_kernels(),
            "checksums": {label(case): sums for case, sums in self.checksums.items()},
            "slower": sum(row["ratio"] > SLOWER for row in rows),
            "errors": self.errors,
        }


def table(document: dict[str, Any], most: int = 24) -> str:
    """The worst rows, kernels that changed, errors, and the line that counts slower rows."""
    rows = sorted(document["rows"] + document["host"], key=lambda row: -row["ratio"])
    lines = [
        f"{'role':<18} {'W':>2} {'tokens':>6} {'format':<12} {'A us':>9} {'B us':>9} {'B / A':>7}  {'rounds of B / A'}"
    ]
    for row in rows[:most]:
        both = list(zip(row["a_rounds"], row["b_rounds"], strict=False))
        spread = f"{min(b / a for a, b in both):.3f} to {max(b / a for a, b in both):.3f}"
        lines.append(
            f"{row['role']:<18} {row['W']:>2} {row['tokens']:>6} {row['format']:<12} {row['a_us']:>9.2f} "
            f"{row['b_us']:>9.2f} {row['ratio']:>7.3f}  {spread}"
        )
    if len(rows) > most:
        lines.append(f"... {len(rows) - most} more, all with a smaller ratio")
    changed = [each for each in document["kernels"] if each["a"] != each["b"]]
    lines += [f"kernel {each['name']} ({each['case']}): A {each['a']}, B {each['b']}" for each in changed[:most]]
    lines += [f"error: {error}" for error in document["errors"]]
    middle = statistics.median(row["ratio"] for row in rows) if rows else float("nan")
    lines.append(
        f"{document['slower']} of {len(rows)} rows slower than 2 % (median B / A {middle:.4f}); "
        f"{len(changed)} of {len(document['kernels'])} kernels changed; {len(document['errors'])} errors"
    )
    return "\n".join(lines)


def compare(
    comparison: Comparison, trees: Sequence[Tree], rounds: int, deadline: float, save: Callable[[], object]
) -> None:
    """``rounds`` rounds of all cases, then as many of those that have a slower row; after ``deadline`` no case."""
    for again in (False, True):
        cases = comparison.slower_cases() if again else list(comparison.cases)
        for turn in range(rounds):
            for index, case in enumerate(cases):
                if time.monotonic() > deadline:
                    sys.stderr.write(
                        f"no time left in round {turn + 1} of {rounds}, {len(cases) - index} cases to go\n"
                    )
                    return
                for side in (0, 1) if (turn + index) % 2 == 0 else (1, 0):
                    answer = trees[side].ask(case, check=turn == 0 and not again, timeout=120.0)
                    comparison.add(case, side, answer)
            save()


def _own_cache() -> Path:
    """Return a folder in the user's own cache. Code is loaded from it, so nobody else may be able to make it first."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "moelink" / "roles"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.set_defaults(out=Path("roles.json"))
    parser.add_argument("--a", type=Path, default=Path(".old"), help="root of the first tree, which is the measure")
    parser.add_argument("--b", type=Path, default=Path("."), help="root of the second tree")
    parser.add_argument("--commits", nargs=2, metavar=("A", "B"), default=(None, None), help="to record")
    parser.add_argument(
        "--quick", action="store_true", help="fp8_block128 only, all tokens with four ranks, three with two and eight"
    )
    parser.add_argument("--tiny", action="store_true", help="a few bytes, to try the program itself")
    parser.add_argument(
        "--rounds", type=int, help="of each tree, 3, or 2 with --quick; cases with a slower row get as many more"
    )
    parser.add_argument("--seconds", type=float, help="after this time no case is started; 480, or 85 with --quick")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu with Triton's interpreter")
    parser.add_argument("--cache", type=Path, default=_own_cache(), help="of Triton; default: of this user alone")


def run(args: argparse.Namespace, save: Save) -> int:
    """Compare, save the result after every round, print the table. Returns 1 where a case failed or bits differed."""
    start = time.monotonic()
    seconds = args.seconds if args.seconds is not None else 85.0 if args.quick else 480.0
    rounds = args.rounds if args.rounds is not None else 2 if args.quick else 3
    cases = cases_of(quick=args.quick, tiny=args.tiny)
    trees = [Tree(root, args.device, args.cache) for root in (args.a, args.b)]
    comparison = Comparison(cases, args.device)
    said: dict[str, Any] = {"commits": dict(zip("ab", args.commits, strict=True)), "unit": "microseconds; of one rank"}

    def keep() -> dict[str, Any]:
        return save("roles", {**said, "seconds": round(time.monotonic() - start, 1), **comparison.document()})

    try:
        if args.device != "cpu":
            compile_all(trees, cases, seconds / 2)
            said["compile_seconds"] = round(time.monotonic() - start, 1)
            sys.stderr.write(f"compiled within {said['compile_seconds']} s\n")
        for tree in trees:
            said.update({name: value for name, value in tree.start(120.0).items() if name != "package"})
        compare(comparison, trees, rounds, start + seconds, keep)
    except RuntimeError as error:
        comparison.errors.append(str(error))
    finally:
        for tree in trees:
            tree.stop()
        document = keep()
    sys.stdout.write(table(document) + "\n")
    return 1 if comparison.errors else 0


main = Script("roles", __doc__, options, run).main

if __name__ == "__main__":
    sys.exit(main())
