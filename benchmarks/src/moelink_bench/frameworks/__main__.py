"""The command ``torchrun ... -m moelink_bench.frameworks``; the package says what it does."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
from typing import Any

import torch
import torch.distributed as dist

from moelink.errors import ArgumentError, UnsupportedError
from moelink.integrations.versions import require
from moelink_bench import frameworks
from moelink_bench.document import device_names
from moelink_bench.frameworks.dispatchers import TOLERANCE, Amount, Case, Layer, compare, time_layer, times_as_fast
from moelink_bench.frameworks.engines import SIZES
from moelink_bench.ranks import joined
from moelink_bench.script import Save, Script, add_numbers, positive
from moelink_bench.timing import Clock, Turns

PACKAGES = {"torchtitan": "torchtitan", "megatron": "megatron-core", "vllm": "vllm", "sglang": "sglang"}
ENGINES = ("vllm", "sglang")
"""Those that run layers forward only."""

TURNS = 3
"""Of samples of engines."""
FLUSH_BYTES = 128 << 20
"""Of engines, whose calls find a cold cache: more than the second-level cache of any GPU here."""


def measure(framework: str, case: Case, clock: Clock, how: Amount) -> dict[str, Any]:
    """Compare both dispatchers in the layer, and time them if they agree: the fields of a result. Collective.

    The default process group is there. Figures are missing where the gate failed.

    Raises:
        UnsupportedError: the framework is not installed, or not a release that moelink supports.
    """
    release = require(PACKAGES[framework])
    module = importlib.import_module(f"moelink_bench.frameworks.{framework}")
    layer: Layer = module.make_layer(case, dist.get_rank(), dist.get_world_size())
    try:
        found = compare(layer, case)
        wrong = [name for name, off in found.items() if not off <= TOLERANCE]
        fields: dict[str, Any] = {
            "framework": {"package": PACKAGES[framework], "release": release}, "note": layer.note,
            "case": dataclasses.asdict(case) | {"capacity": case.capacity, "dtype": "bf16"},
            "gate": {"passed": not wrong, "fault": f"{', '.join(wrong)} differ" if wrong else "", "differences": found},
        }  # fmt: skip
        if not wrong:
            fields["rows"], fields["graphs"] = time_layer(layer, case, clock, how)
            fields["times_as_fast"] = times_as_fast(fields["rows"])
        return as_stored(fields, engine=framework in ENGINES)
    finally:
        layer.close()


def as_stored(fields: dict[str, Any], *, engine: bool) -> dict[str, Any]:
    """Return ``fields`` with what results have: those of engines no capacity, the others one size and no graphs."""
    if engine:
        return fields | {"case": _without(fields["case"], "room", "capacity")}
    (tokens,) = fields["case"]["tokens"]
    made = _without(fields, "graphs") | {"case": fields["case"] | {"tokens": tokens}}
    if "rows" in fields:
        made["rows"] = [_without(row, "tokens") for row in fields["rows"]]
        made["times_as_fast"] = _without(fields["times_as_fast"][0], "tokens")
    return made


def _without(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("--framework", choices=PACKAGES, required=True)
    sizes = " ".join(map(str, SIZES))
    parser.add_argument("--tokens", type=positive, nargs="+", help=f"of each rank: default 4096, for engines {sizes}")
    parser.add_argument("--experts", type=positive, help="default 64, for engines 128")
    add_numbers(parser, {"hidden": 2048, "intermediate": 768, "topk": 8, "samples": 15})
    parser.add_argument("--room", type=float, help="rows of outputs over those expected, default 1.25; 0: worst case")
    parser.add_argument("--calls", type=positive, help="calls a sample, default 5; not for engines")


def run(args: argparse.Namespace, save: Save) -> int:
    """Run the benchmark on the ranks of torchrun; rank 0 saves."""
    case, engine = case_of(args), args.framework in ENGINES
    require(PACKAGES[args.framework])
    if not torch.cuda.is_available():
        raise UnsupportedError("device: expected a CUDA device for each rank, got none; run this on a GPU machine")
    how = Amount(1, Turns(turns=TURNS, samples=-(-args.samples // TURNS), warmup=2))
    if not engine:
        how = Amount(args.calls or 5, Turns(turns=args.samples, dropped=1))
    with joined(int(os.environ.get("RANK", "0")), "cuda", flush_bytes=FLUSH_BYTES if engine else 0) as clock:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        fields = measure(args.framework, case, clock, how)
    if rank == 0:
        said = "one a sample, cold cache" if engine else f"{how.calls} a sample"
        save("frameworks", {
            "device": "cuda", "devices": device_names("cuda") * ranks, "ranks": ranks,
            "method": f"eager calls, {said}, samples of both in turns; the slowest rank, microseconds a "
            "call: median, 20th and 80th percentile; skew is the median difference between ranks",
            **fields,
        })  # fmt: skip
        for row in fields.get("rows", ()):
            medians = (f"{name}: {entry['median']:.0f} us" for name, entry in row.items() if isinstance(entry, dict))
            print(row["contender"], f"{row.get('tokens', case.tokens[0])} tokens", *medians, sep=", ")
        ratios = fields.get("times_as_fast") or fields["gate"]["fault"]
        print(*(ratios if isinstance(ratios, list) else [ratios]), sep="\n")
    return 0 if fields["gate"]["passed"] else 1


def case_of(args: argparse.Namespace) -> Case:
    """Return the case of the command line.

    Raises:
        ArgumentError: an option that the framework's benchmark has no use for.
    """
    engine = args.framework in ENGINES
    for name in ("room", "calls") if engine else ():
        if getattr(args, name) is not None:
            raise ArgumentError(name, f"none with {args.framework}", getattr(args, name))
    tokens = tuple(dict.fromkeys(args.tokens or (SIZES if engine else (4096,))))
    if len(tokens) != 1 and not engine:
        raise ArgumentError("tokens", f"one number with {args.framework}", list(tokens))
    room = None if engine else 1.25 if args.room is None else args.room
    return Case(
        tokens=tokens, hidden_size=args.hidden, intermediate_size=args.intermediate, topk=args.topk, device="cuda",
        num_experts=args.experts or (128 if engine else 64), room=room or None,
    )  # fmt: skip


main = Script("frameworks", frameworks.__doc__, options, run, out="frameworks_{framework}.json").main

if __name__ == "__main__":
    raise SystemExit(main())
