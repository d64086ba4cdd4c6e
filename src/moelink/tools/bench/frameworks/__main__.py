"""The command ``torchrun ... -m moelink.tools.bench.frameworks``; the package says what it does."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moelink.errors import MoelinkError, UnsupportedError
from moelink.integrations.versions import require
from moelink.tools.bench import frameworks
from moelink.tools.bench.document import head, results_folder, script_parser, write
from moelink.tools.bench.frameworks.steps import PASSES, Case, differences, largest_over_ranks, time_steps

PACKAGES = {"torchtitan": "torchtitan", "megatron": "megatron-core"}
TOLERANCE = 0.02
"""Of a part's length, in bf16: both round rows and sums to 8 bits, at different places."""


def measure(framework: str, case: Case, *, samples: int, calls: int) -> dict[str, Any]:
    """Compare both dispatchers in the layer, and time them if they agree: the fields of a result. Collective.

    The default process group is there. Figures are missing where the gate failed.

    Raises:
        UnsupportedError: the framework is not installed, or not a release that moelink supports.
    """
    release = require(PACKAGES[framework])
    module = importlib.import_module(f"moelink.tools.bench.frameworks.{framework}")
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark on the ranks of torchrun; rank 0 writes."""
    parser = script_parser(frameworks.__doc__, out="benchmarks/results/frameworks_FRAMEWORK.json")
    parser.add_argument("--framework", choices=PACKAGES, required=True)
    for name, value in (("tokens", 4096), ("hidden", 2048), ("intermediate", 768), ("experts", 64), ("topk", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--room", type=float, default=1.25, help="rows of outputs over those expected; 0: worst case")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--calls", type=int, default=5)
    args = parser.parse_args(arguments)
    try:
        require(PACKAGES[args.framework])
        if not torch.cuda.is_available():
            raise UnsupportedError("device: expected a CUDA device for each rank, got none; run this on a GPU machine")
    except MoelinkError as error:
        print(f"moelink: {error}", file=sys.stderr)
        return 1
    case = Case(
        tokens=args.tokens, hidden_size=args.hidden, intermediate_size=args.intermediate, num_experts=args.experts,
        topk=args.topk, device="cuda", room=args.room or None,
    )  # fmt: skip
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    try:
        fields = measure(args.framework, case, samples=args.samples, calls=args.calls)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        document = {
            **head("frameworks", script="frameworks", program=f"torchrun --nproc-per-node {ranks}", commit=args.commit),
            "device": "cuda", "devices": [torch.cuda.get_device_name()] * ranks, "ranks": ranks,
            "method": f"eager calls, {args.calls} a sample, samples of both in turns; the slowest rank, microseconds a "
            "call: median, 20th and 80th percentile; skew is the median difference between ranks",
            **fields,
        }  # fmt: skip
        write(document, args.out or results_folder() / f"frameworks_{args.framework}.json")
        for row in fields.get("rows", ()):
            print(row["contender"], *(f"{name}: {row[name]['median']:.0f} us" for name in PASSES), sep=", ")
        print(fields.get("times_as_fast") or fields["gate"]["fault"])
    return 0 if fields["gate"]["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
