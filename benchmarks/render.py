"""Write the table of README.md from the benchmark's JSON, between its markers. ``--check`` only compares."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "collective_vs_topk.json"
BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"


def render(document: dict[str, Any]) -> str:
    """The Markdown between the markers."""
    case, host, versions = document["case"], document["host"], document["versions"]
    lines = [
        "| | dispatch, ms | combine, ms | both, ms | bytes between ranks |",
        "|---|---:|---:|---:|---:|",
    ]
    labels = {"baseline": "sort + `all_to_all_single` of top-k copies", "moelink": "moelink, collective transport"}
    for row in document["rows"]:
        times = (row[f"{phase}_ms"] for phase in ("dispatch", "combine", "total"))
        cells = " | ".join(f"{t['median']:.1f} ({t['p20']:.1f} – {t['p80']:.1f})" for t in times)
        lines.append(f"| {labels[row['name']]} | {cells} | {row['total_bytes'] / 1e6:.1f} MB |")
    lines.append(
        f"| ratio | | | **{document['time_ratio']:.2f}** | **{document['bytes_ratio']:.2f}** |"
    )  # fmt: skip
    lines += [
        "",
        f"{case['ranks']} ranks as processes over gloo, {case['tokens_per_rank']} tokens per rank, hidden size "
        f"{case['hidden_size']}, top-{case['topk']} of {case['num_experts']} experts, bf16. Median over "
        f"{case['iterations']} iterations of the slowest rank (20th – 80th percentile), after both results were "
        f"checked against the unsharded one. {host['processor']}, {host['cores']} cores, torch {versions['torch']}, "
        f"{document['date']}. A small machine without a GPU: this compares two ways to do the same work and says "
        "nothing about GPUs.",
    ]
    return "\n".join(lines)


def updated(text: str, document: dict[str, Any]) -> str:
    """``text`` with the table replaced."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{render(document)}\n{END}{after}"


def main() -> int:
    """Update README.md, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the table is stale")
    check = parser.parse_args().check
    text = README.read_text()
    new = updated(text, json.loads(RESULT.read_text()))
    if check:
        if new != text:
            print("the table in README.md is stale; run: python benchmarks/render.py", file=sys.stderr)
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
