"""What each role of a call of many tokens is short of, alone on a GPU: hardware counters by Nsight Compute (``ncu``).

One rank does what a rank of two does with half the tokens: 8192 of them, top-4 of 128 experts, are 8192 messages of
four rows each. Its roles are launched one after the other (``dispatch_async`` and so on), so that the profiler can run
each of them again and again; nothing waits for another GPU, and nothing crosses a link.

    python benchmarks/counters.py --format fp8_block128 --out benchmarks/results/counters_h200.json

It runs itself under ``ncu``. ``--read`` makes the document of a report (ncu's text) that was kept instead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKENS, EXPERTS, TOPK, HIDDEN = 8192, 128, 4, 7168
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
METHOD = (
    "ncu --clock-control none; one launch of each role; percentages are of the device's peak, issue_percent of the "
    "cycles in which a scheduler issues an instruction"
)


def command(script: Path, dispatch_format: str) -> list[str]:
    """How the profiler is called."""
    sections = [part for section in SECTIONS for part in ("--section", section)]
    return [
        "ncu", "--clock-control", "none", *sections, "-k", "regex:ep_.*(async|wait)_kernel", "--launch-count", "4",
        sys.executable, str(script), "--run", "--format", dispatch_format,
    ]  # fmt: skip


def parse(report: str) -> list[dict[str, Any]]:
    """The kept metrics of each kernel of an ncu report.

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


def run(dispatch_format: str) -> None:
    """Every role twice, the first time to compile it."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="fp8_block128")
    parser.add_argument("--read", type=Path, help="an ncu report, instead of making one")
    parser.add_argument("--commit", help="commit to record, where there is no repository")
    parser.add_argument("--run", action="store_true", help="only do what is profiled")
    parser.add_argument("--out", type=Path, help="write the document there; default: print it")
    args = parser.parse_args()
    if args.run:
        run(args.format)
        return
    head: dict[str, Any] = {"schema_version": 1, "benchmark": "hardware counters"}
    if args.read:
        report = args.read.read_text()
        head["commit"] = args.commit
    else:
        from moelink.tools.bench import provenance

        call = command(Path(__file__), args.format)
        report = subprocess.run(call, capture_output=True, text=True, check=True).stdout
        head |= {"command": shlex.join(call), **provenance.collect(args.commit)}
    document = {
        **head, "method": METHOD, "tokens": TOKENS, "topk": TOPK, "num_experts": EXPERTS, "hidden_size": HIDDEN,
        "format": args.format, "kernels": parse(report),
    }  # fmt: skip
    text = json.dumps(document, indent=2) + "\n"
    args.out.write_text(text) if args.out else print(text, end="")


if __name__ == "__main__":
    main()
