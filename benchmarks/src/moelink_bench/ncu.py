"""Profile each role of a call of many tokens, alone on a GPU, with Nsight Compute (``ncu``).

``counters`` records hardware counters: what a role is short of. ``stalls`` records where its warps wait: samples by
instruction and by reason. A sample stands at the instruction that could not be issued: the first that needs what is
waited for.

One rank does what a rank of two does with half the tokens: 8192 of them, top-4 of 128 experts, are 8192 messages of
four rows each. Its roles are launched one after the other (``dispatch_async`` and so on), so that the profiler can run
each of them again and again; nothing waits for another GPU, and nothing crosses a link.

    python -m moelink_bench.ncu counters --format fp8_block128 --out benchmarks/results/counters_h200.json
    python -m moelink_bench.ncu stalls --format fp8_block128 --out benchmarks/results/stalls_h200.json

The module runs itself under ``ncu`` (``run`` is what is profiled). ``counters --read`` makes the document of a report
(ncu's text) that was kept; ``stalls --modules`` says where Nsight Compute keeps ``ncu_report``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from moelink.errors import ArgumentError
from moelink.names import BuiltInFormat
from moelink_bench.script import Save, Script

TOKENS, EXPERTS, TOPK, HIDDEN = 8192, 128, 4, 7168
ROLES = "regex:ep_.*(async|wait)_kernel"
SECTIONS = ("SpeedOfLight", "WarpStateStats", "SchedulerStats", "MemoryWorkloadAnalysis", "InstructionStats")
KEPT = {
    "Duration": ("us", "us"),
    "DRAM Throughput": ("dram_percent", "%"),
    "L2 Cache Throughput": ("l2_percent", "%"),
    "Memory Throughput": ("dram_tb_per_s", "Tbyte/s"),
    "One or More Eligible": ("issue_percent", "%"),
    "Active Warps Per Scheduler": ("warps_per_scheduler", "warp"),
    "Warp Cycles Per Issued Instruction": ("cycles_per_instruction_of_a_warp", "cycle"),
    "Executed Instructions": ("instructions", "inst"),
}
COUNTERS_METHOD = (
    "ncu --clock-control none; one launch of each role; percentages are of the device's peak, issue_percent of the "
    "cycles in which a scheduler issues an instruction"
)
STALL_PREFIX = "smsp__pcsamp_warps_issue_stalled_"
HOTTEST = 30
STALLS_METHOD = (
    "ncu --clock-control none --cache-control none, warp states sampled in one pass; one launch of each role after one "
    "that warms up; percentages are of a kernel's samples"
)


UNKNOWN = ("command", "date", "dirty", "versions", "host", "variables")
"""Fields of a result that is made of a report."""


def launch_roles(dispatch_format: str) -> None:
    """Launch every role twice, the first time to compile it."""
    import torch
    import torch.distributed as dist

    import moelink

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    dist.init_process_group("cpu:gloo,cuda:nccl")
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    ids = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOPK).indices.int()
    weights = torch.rand(TOKENS, TOPK, device="cuda")
    with moelink.init(
        num_experts=EXPERTS, topk=TOPK, hidden_size=HIDDEN, max_tokens_per_rank=TOKENS, transport="symmetric",
        dispatch_format=dispatch_format,
    ) as ep:  # fmt: skip
        for _ in range(2):
            recv = ep.dispatch_async(x, ids, weights).wait()
            y = torch.randn(recv.tokens.shape[0], HIDDEN, device="cuda").bfloat16()
            ep.combine_async(y, recv).wait()
            torch.cuda.synchronize()
    dist.destroy_process_group()


def command(options: Sequence[str], dispatch_format: str) -> list[str]:
    """Return how the profiler is called: :func:`launch_roles` in this module, with ``options`` before it."""
    script = [sys.executable, "-m", "moelink_bench.ncu", "run", "--format", dispatch_format]
    return ["ncu", "--clock-control", "none", *options, "-k", ROLES, "--launch-count", "4", *script]


def counters(dispatch_format: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return ncu's command, and the kept metrics of each kernel."""
    call = command([part for section in SECTIONS for part in ("--section", section)], dispatch_format)
    return call, parse(subprocess.run(call, capture_output=True, text=True, check=True).stdout)


def parse(report: str) -> list[dict[str, Any]]:
    """Return the kept metrics of each kernel of an ncu report.

    Example: a kernel's line "  ep_x_kernel (132, 1, 1)x(256, 1, 1), ..." and, below it, "    Duration   us   148.22":
    {"kernel": "ep_x_kernel", "programs": 132, "threads": 256, "us": 148.22}.
    """
    found: list[dict[str, Any]] = []
    for line in report.splitlines():
        kernel = re.match(r"\s+(ep_\w+) \((\d+), 1, 1\)x\((\d+), 1, 1\)", line)
        if kernel:
            name, programs, threads = kernel.groups()
            found.append({"kernel": name, "programs": int(programs), "threads": int(threads)})
        for metric, (name, unit) in KEPT.items():
            value = re.match(rf"\s+{re.escape(metric)}\s+{re.escape(unit)}\s+([\d.,]+)$", line.rstrip())
            if found and value:
                number = float(value.group(1).replace(",", ""))
                found[-1].setdefault(name, int(number) if unit == "inst" else number)
    return found


@dataclass(frozen=True)
class Instruction:
    """An instruction's place in its kernel, in bytes, its text, and samples by the reason why it was not issued."""

    at: int
    text: str
    samples: Mapping[str, int]


def condense(instructions: Sequence[Instruction], *, hottest: int = HOTTEST) -> dict[str, Any]:
    """Return shares of reasons, and the ``hottest`` instructions in the kernel's order, in per cent of all samples.

    Example: "LDG" with 1 sample of "wait", and "IADD" with 3 of "long_scoreboard": 75 % and 25 %; IADD is the hottest.
    """
    reasons: Counter[str] = Counter()
    for instruction in instructions:
        reasons.update(instruction.samples)
    total = max(1, reasons.total())
    chosen = sorted(instructions, key=lambda each: -sum(each.samples.values()))[:hottest]
    return {
        "samples": reasons.total(),
        "reasons": {reason: round(100 * count / total, 1) for reason, count in reasons.most_common(8)},
        "hottest": [
            {
                "at": each.at, "text": each.text, "percent": round(100 * sum(each.samples.values()) / total, 2),
                "reason": max(each.samples, key=lambda reason: each.samples[reason]),
            }
            for each in sorted(chosen, key=lambda each: each.at)
        ],
    }  # fmt: skip


def stalls(dispatch_format: str, modules: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return ncu's command, and the condensed samples of each kernel."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "stalls.ncu-rep"
        options = (
            "--cache-control", "none", "--metrics", "group:smsp__pcsamp_warp_stall_reasons",
            "--warp-sampling-interval", "0", "--warp-sampling-max-passes", "1", "--launch-skip", "4", "-f", "-o",
            str(report),
        )  # fmt: skip
        call = command(options, dispatch_format)
        subprocess.run(call, check=True)
        return call, read_stalls(report, modules)


def read_stalls(report: Path, modules: Path) -> list[dict[str, Any]]:
    """Return the condensed samples of each kernel in a report."""
    sys.path.insert(0, str(modules))
    import ncu_report  # type: ignore[import-not-found]

    kernels = []
    launches = ncu_report.load_report(str(report)).range_by_idx(0)
    for index in range(launches.num_actions()):
        action = launches.action_by_idx(index)
        found: dict[int, dict[str, int]] = {}
        for name in action.metric_names():
            if name.startswith(STALL_PREFIX) and not name.endswith("_not_issued"):
                metric = action.metric_by_name(name)
                places = metric.correlation_ids()
                for i in range(metric.num_instances()):
                    if metric.as_uint64(i):
                        found.setdefault(places.as_uint64(i), {})[name.removeprefix(STALL_PREFIX)] = metric.as_uint64(i)
        begin = min(found, default=0)
        lines = [Instruction(pc - begin, action.sass_by_pc(pc).strip(), found[pc]) for pc in found]
        kernels.append({"kernel": action.name(), **condense(lines)})
    return kernels


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("what", choices=("counters", "stalls", "run"))
    parser.add_argument("--format", choices=get_args(BuiltInFormat), default="fp8_block128")
    parser.add_argument("--read", type=Path, help="counters: an ncu report, instead of making one")
    parser.add_argument("--modules", type=Path, help="stalls: folder of ncu_report; default: the newest in /opt/nvidia")


def run(args: argparse.Namespace, save: Save) -> int:
    """Profile, and save or print the document."""
    if args.what == "run":
        launch_roles(args.format)
        return 0
    made: dict[str, Any] = {"commit": args.commit}
    if args.read:  # what made the report is not known here: only its commit can be told
        kernels = parse(args.read.read_text())
    elif args.what == "counters":
        call, kernels = counters(args.format)
        made = {"command": shlex.join(call)}
    else:
        installed = sorted(Path("/opt/nvidia/nsight-compute").glob("*/extras/python"))
        modules = args.modules or (installed[-1] if installed else None)
        if modules is None:
            raise ArgumentError("modules", "the folder of ncu_report, which /opt/nvidia/nsight-compute lacks", None)
        call, kernels = stalls(args.format, modules)
        made = {"command": shlex.join(call)}
    document = save("hardware counters" if args.what == "counters" else "stalls", {
        **made, "method": COUNTERS_METHOD if args.what == "counters" else STALLS_METHOD, "tokens": TOKENS, "topk": TOPK,
        "num_experts": EXPERTS, "hidden_size": HIDDEN, "format": args.format, "kernels": kernels,
    }, UNKNOWN if args.read else ())  # fmt: skip
    if not args.out:
        print(json.dumps(document, indent=2))
    return 0


main = Script("ncu", __doc__, options, run).main

if __name__ == "__main__":
    raise SystemExit(main())
