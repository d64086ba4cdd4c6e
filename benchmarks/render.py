"""Write the tables of README.md from the benchmarks' JSON, between their markers. ``--check`` only compares.

Between the markers "benchmark" goes the comparison on CPUs, between "speed" one table for each result of
``moelink bench`` on GPUs in ``results/``, or nothing where there is none.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
RESULT = RESULTS / "collective_vs_topk.json"


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


def gpu_results() -> list[dict[str, Any]]:
    """Results of ``moelink bench`` on GPUs, by number of ranks, then file name."""
    documents = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    found = [d for d in documents if d["benchmark"] == "moelink bench" and d["device"] == "cuda"]
    return sorted(found, key=lambda document: document["ranks"])


def cell(result: dict[str, Any] | None) -> str:
    """Median (20th - 80th percentile) by graph replay, or of eager calls and said so, in microseconds."""
    figure = result and (result["graph"] or result["eager"])
    if not result or not figure:
        return ""
    text = f"{figure['median']:.1f} ({figure['p20']:.1f} – {figure['p80']:.1f})"
    return text if result["graph"] else f"{text} eager"


def speed_table(document: dict[str, Any]) -> str:
    """One result of ``moelink bench`` in Markdown."""
    versions, ceiling = document["versions"], document["ceiling"]["gb_per_s"]
    limit = f"{ceiling:.0f} GB/s" if ceiling else "not measured"
    lines = [
        "| | | dispatch, µs | combine, µs | both, µs | share of the wire |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in document["rows"]:
        if row["reason"]:
            continue
        phases = row["phases"]
        shares = [phases.get(phase, {}).get("share_of_ceiling") for phase in ("dispatch", "combine")]
        share = " / ".join("" if value is None else f"{100 * value:.0f} %" for value in shares)
        cells = " | ".join(cell(phases.get(phase)) for phase in ("dispatch", "combine", "both"))
        lines.append(f"| {document['cases'][row['case']]['label']} | {row['contender']} | {cells} | {share} |")
    case = document["cases"][0]["case"]
    absent = dict.fromkeys(f"{row['contender']}: {row['reason']}" for row in document["rows"] if row["reason"])
    left_out = dict.fromkeys(
        f"{row['contender']} leaves out {row['leaves_out']}" for row in document["rows"] if row["leaves_out"]
    )
    notes = [
        f"`{document['command']}`: {document['ranks']} × {document['devices'][0]}, hidden size {case['hidden_size']}, "
        f"top-{case['topk']} of {case['num_experts']} experts, bf16 home, torch {versions['torch']}, triton "
        f"{versions['triton']}, {document['date']}. Median over samples of the slowest rank (20th – 80th percentile) "
        "by CUDA-graph replay, after all transports returned the same bits. Share of the wire: time that the busiest "
        f"link needs at the all-to-all ceiling of the same run ({limit} out of each GPU) / time taken.",
        *(f"{text}." for text in left_out),
        *(f"Not run: {text}." for text in absent),
    ]
    return "\n".join([*lines, "", " ".join(notes)])


def between(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    inner = f"\n{content}\n" if content else "\n"
    return f"{before}{begin}{inner}{end}{after}"


def updated(text: str) -> str:
    """``text`` with all tables replaced."""
    text = between(text, "benchmark", render(json.loads(RESULT.read_text())))
    return between(text, "speed", "\n\n".join(speed_table(document) for document in gpu_results()))


def main() -> int:
    """Update README.md, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the table is stale")
    check = parser.parse_args().check
    text = README.read_text()
    new = updated(text)
    if check:
        if new != text:
            print("a table in README.md is stale; run: python benchmarks/render.py", file=sys.stderr)
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
