"""Where the programs of each role wait, alone on a GPU: samples of Nsight Compute (``ncu``), by instruction.

    python benchmarks/stalls.py --format fp8_block128 --out benchmarks/results/stalls_h200.json

Runs the roles that ``counters.py`` describes, and keeps of each of them the share of every reason to wait, and the
instructions at which most samples were taken. A sample stands at the instruction that could not be issued: the first
that needs what is waited for. ``--modules`` is where Nsight Compute keeps ``ncu_report``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counters import EXPERTS, HIDDEN, TOKENS, TOPK

PREFIX = "smsp__pcsamp_warps_issue_stalled_"
HOTTEST = 30
METHOD = (
    "ncu --clock-control none --cache-control none, warp states sampled in one pass; one launch of each role after one "
    "that warms up; percentages are of a kernel's samples"
)


@dataclass(frozen=True)
class Instruction:
    """An instruction's place in its kernel, in bytes, its text, and samples by the reason why it was not issued."""

    at: int
    text: str
    samples: Mapping[str, int]


def condense(instructions: Sequence[Instruction], *, hottest: int = HOTTEST) -> dict[str, Any]:
    """Shares of reasons, and the ``hottest`` instructions in the order of the kernel, in per cent of all samples.

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


def command(script: Path, dispatch_format: str, report: Path) -> list[str]:
    """How the profiler is called."""
    return [
        "ncu", "--clock-control", "none", "--cache-control", "none", "--metrics",
        "group:smsp__pcsamp_warp_stall_reasons", "--warp-sampling-interval", "0", "--warp-sampling-max-passes", "1",
        "-k", "regex:ep_.*(async|wait)_kernel", "--launch-skip", "4", "--launch-count", "4", "-f", "-o", str(report),
        sys.executable, str(script), "--run", "--format", dispatch_format,
    ]  # fmt: skip


def read(report: Path, modules: Path) -> list[dict[str, Any]]:
    """What a report says of each kernel in it."""
    sys.path.insert(0, str(modules))
    import ncu_report  # type: ignore[import-not-found]

    kernels = []
    launches = ncu_report.load_report(str(report)).range_by_idx(0)
    for index in range(launches.num_actions()):
        action = launches.action_by_idx(index)
        found: dict[int, dict[str, int]] = {}
        for name in action.metric_names():
            if name.startswith(PREFIX) and not name.endswith("_not_issued"):
                metric = action.metric_by_name(name)
                places = metric.correlation_ids()
                for i in range(metric.num_instances()):
                    if metric.as_uint64(i):
                        found.setdefault(places.as_uint64(i), {})[name.removeprefix(PREFIX)] = metric.as_uint64(i)
        begin = min(found, default=0)
        lines = [Instruction(pc - begin, action.sass_by_pc(pc).strip(), found[pc]) for pc in found]
        kernels.append({"kernel": action.name(), **condense(lines)})
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="fp8_block128")
    parser.add_argument("--commit", help="commit to record, where there is no repository")
    parser.add_argument("--modules", type=Path, help="folder of ncu_report; default: the newest under /opt/nvidia")
    parser.add_argument("--out", type=Path, help="write the document there; default: print it")
    args = parser.parse_args()
    from moelink.tools.bench import provenance

    installed = sorted(Path("/opt/nvidia/nsight-compute").glob("*/extras/python"))
    modules = args.modules or (installed[-1] if installed else None)
    if modules is None:
        parser.error("no ncu_report under /opt/nvidia/nsight-compute: say where it is with --modules")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "stalls.ncu-rep"
        call = command(Path(__file__).with_name("counters.py"), args.format, report)
        subprocess.run(call, check=True)
        kernels = read(report, modules)
    document = {
        "schema_version": 1, "benchmark": "stalls", "command": shlex.join(call), **provenance.collect(args.commit),
        "method": METHOD, "tokens": TOKENS, "topk": TOPK, "num_experts": EXPERTS, "hidden_size": HIDDEN,
        "format": args.format, "kernels": kernels,
    }  # fmt: skip
    text = json.dumps(document, indent=1) + "\n"
    args.out.write_text(text) if args.out else print(text, end="")


if __name__ == "__main__":
    main()
