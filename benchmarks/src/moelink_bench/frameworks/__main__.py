"""The command ``torchrun ... -m moelink_bench.frameworks``; the package says what it does."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moelink.errors import ArgumentError, MoelinkError, UnsupportedError
from moelink.integrations.versions import require
from moelink_bench import frameworks
from moelink_bench.document import head, results_folder, script_parser, write
from moelink_bench.frameworks import engines
from moelink_bench.frameworks.engines import EngineCase
from moelink_bench.frameworks.steps import PASSES, Case, differences, largest_over_ranks, time_steps

PACKAGES = {"torchtitan": "torchtitan", "megatron": "megatron-core", "vllm": "vllm", "sglang": "sglang"}
ENGINES = ("vllm", "sglang")
"""Those that run layers forward only, whose modules make an :class:`engines.Engine`."""

TOLERANCE = 0.02
"""Of a part's length, in bf16: both round rows and sums to 8 bits, at different places."""


def measure(framework: str, case: Case, *, samples: int, calls: int) -> dict[str, Any]:
    """Compare both dispatchers in the layer, and time them if they agree: the fields of a result. Collective.

    The default process group is there. Figures are missing where the gate failed.

    Raises:
        UnsupportedError: the framework is not installed, or not a release that moelink supports.
    """
    release = require(PACKAGES[framework])
    module = importlib.import_module(f"moelink_bench.frameworks.{framework}")
    steps, note = module.make_steps(case, dist.get_rank(), dist.get_world_size())
    try:
        theirs, ours = (step.both() for step in steps)
        found = largest_over_ranks(differences(theirs, ours))
        del theirs, ours
        wrong = [name for name, off in found.items() if not off <= TOLERANCE]
        fields: dict[str, Any] = {
            "framework": {"package": PACKAGES[framework], "release": release}, "note": note,
            "case": dataclasses.asdict(case) | {"capacity": case.capacity, "dtype": "bf16"},
            "gate": {"passed": not wrong, "fault": f"{', '.join(wrong)} differ" if wrong else "", "differences": found},
        }  # fmt: skip
        if not wrong:
            rows = time_steps(steps, case.device, samples=samples, calls=calls)
            for step in steps:
                step.check()
            fields["rows"] = [{"contender": name, **figures} for name, figures in rows.items()]
            fields["times_as_fast"] = {
                name: round(fields["rows"][0][name]["median"] / fields["rows"][1][name]["median"], 3) for name in PASSES
            }
        return fields
    finally:
        module.close()


def measure_engine(framework: str, case: EngineCase, *, samples: int) -> dict[str, Any]:
    """Compare both dispatchers with torch on one rank, and time them if they agree: as :func:`measure`. Collective."""
    release = require(PACKAGES[framework])
    module = importlib.import_module(f"moelink_bench.frameworks.{framework}")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if case.num_experts % ranks:
        raise ArgumentError("experts", f"a multiple of {ranks}, the number of ranks", case.num_experts)
    weights = engines.make_weights(case)
    engine = module.make_engine(case, weights.of(case.own_experts(rank, ranks)), rank, ranks)
    try:
        batches = {tokens: engines.make_batch(case, rank, tokens) for tokens in case.tokens}
        found = engines.compare(engine, batches, weights)
        del weights
        wrong = [name for name, off in found.items() if not off <= TOLERANCE]
        fields: dict[str, Any] = {
            "framework": {"package": PACKAGES[framework], "release": release}, "note": engine.note,
            "case": dataclasses.asdict(case) | {"dtype": "bf16"},
            "gate": {"passed": not wrong, "fault": f"{', '.join(wrong)} differ" if wrong else "", "differences": found},
        }  # fmt: skip
        if not wrong:
            fields["rows"], fields["graphs"] = engines.time_engine(engine, batches, case.device, samples=samples)
            fields["times_as_fast"] = engines.times_as_fast(fields["rows"])
        return fields
    finally:
        engine.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark on the ranks of torchrun; rank 0 writes."""
    parser = script_parser(frameworks.__doc__, out="benchmarks/results/frameworks_FRAMEWORK.json")
    parser.add_argument("--framework", choices=PACKAGES, required=True)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        help=f"of each rank: default 4096, for engines {' '.join(map(str, engines.SIZES))}",
    )
    parser.add_argument("--experts", type=int, help="default 64, for engines 128")
    for name, value in (("hidden", 2048), ("intermediate", 768), ("topk", 8), ("samples", 15)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--room", type=float, help="rows of outputs over those expected, default 1.25; 0: worst case")
    parser.add_argument("--calls", type=int, help="calls a sample, default 5; not for engines")
    args = parser.parse_args(arguments)
    try:
        case = _case(args)
        require(PACKAGES[args.framework])
        if not torch.cuda.is_available():
            raise UnsupportedError("device: expected a CUDA device for each rank, got none; run this on a GPU machine")
    except MoelinkError as error:
        print(f"moelink: {error}", file=sys.stderr)
        return 1
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    try:
        if isinstance(case, EngineCase):
            fields, how = measure_engine(args.framework, case, samples=args.samples), "one a sample, cold cache"
        else:
            calls = args.calls or 5
            fields, how = measure(args.framework, case, samples=args.samples, calls=calls), f"{calls} a sample"
    finally:
        dist.destroy_process_group()
    if rank == 0:
        document = {
            **head("frameworks", script="frameworks", program=f"torchrun --nproc-per-node {ranks}", commit=args.commit),
            "device": "cuda", "devices": [torch.cuda.get_device_name()] * ranks, "ranks": ranks,
            "method": f"eager calls, {how}, samples of both in turns; the slowest rank, microseconds a "
            "call: median, 20th and 80th percentile; skew is the median difference between ranks",
            **fields,
        }  # fmt: skip
        write(document, args.out or results_folder() / f"frameworks_{args.framework}.json")
        for row in fields.get("rows", ()):
            medians = (f"{name}: {entry['median']:.0f} us" for name, entry in row.items() if isinstance(entry, dict))
            print(row["contender"], f"{row.get('tokens', case.tokens)} tokens", *medians, sep=", ")
        ratios = fields.get("times_as_fast") or fields["gate"]["fault"]
        print(*(ratios if isinstance(ratios, list) else [ratios]), sep="\n")
    return 0 if fields["gate"]["passed"] else 1


def _case(args: argparse.Namespace) -> Case | EngineCase:
    """Return the case of the command line.

    Raises:
        ArgumentError: an option that the framework's benchmark has no use for.
    """
    sizes = {"hidden_size": args.hidden, "intermediate_size": args.intermediate, "topk": args.topk, "device": "cuda"}
    if args.framework in ENGINES:
        for name in ("room", "calls"):
            if getattr(args, name) is not None:
                raise ArgumentError(name, f"none with {args.framework}", getattr(args, name))
        several = tuple(dict.fromkeys(args.tokens or engines.SIZES))
        return EngineCase(tokens=several, num_experts=args.experts or 128, **sizes)
    tokens = args.tokens or [4096]
    if len(tokens) != 1:
        raise ArgumentError("tokens", f"one number with {args.framework}", tokens)
    room = 1.25 if args.room is None else args.room
    return Case(tokens=tokens[0], num_experts=args.experts or 64, room=room or None, **sizes)


if __name__ == "__main__":
    raise SystemExit(main())
