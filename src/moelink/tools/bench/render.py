"""Write what the results say into the documents. ``--check`` only compares.

* README.md, between the markers "benchmark": the comparison on CPUs; between "speed": the medians of the presets
  ``decode`` and ``prefill`` of ``moelink bench`` on the most GPUs there are results of.
* docs/pytorch.md, between the markers "overhead": what the operator layer costs.
* docs/results.md: every result of ``moelink bench`` on GPUs, whole.

    python -m moelink.tools.bench.render
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from moelink.tools.bench.document import BENCHMARK, repository, results_folder
from moelink.tools.bench.measure import PHASES
from moelink.tools.bench.report import METHODS

COMMAND = "python -m moelink.tools.bench.render"
IN_PAIRS = "†"
PAIRS_ARE = "the phase's part of a replayed graph of dispatches, each followed by its combine."


def cpu_table(document: dict[str, Any]) -> str:
    """Return the comparison of ``collective`` on CPUs in Markdown."""
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


def gpu_results() -> list[tuple[str, dict[str, Any]]]:
    """(File, result) of ``moelink bench`` on GPUs, by number of ranks, the most first, then file name."""
    documents = [(path.name, json.loads(path.read_text())) for path in sorted(results_folder().glob("*.json"))]
    found = [(name, d) for name, d in documents if d["benchmark"] == BENCHMARK and d["device"] == "cuda"]
    return sorted(found, key=lambda entry: -entry[1]["ranks"])


def cell(result: dict[str, Any] | None) -> str:
    """Median (20th - 80th percentile) by the first method that was used, named unless it is the graph; microseconds."""
    method = next((name for name in METHODS if result and result.get(name)), None)
    if not result or method is None:
        return ""
    figure = result[method]
    text = f"{figure['median']:.1f} ({figure['p20']:.1f} – {figure['p80']:.1f})"
    return text if method == "graph" else f"{text} {method}"


def medians(row: dict[str, Any] | None) -> str:
    """Medians of the three phases, in microseconds: by graph replay, or of eager calls where no phase has a graph.

    A phase alone that is in a graph of pairs only is marked with :data:`IN_PAIRS`.
    """
    if row is None or row["reason"]:
        return "–"
    phases = [row["phases"].get(phase) or {} for phase in PHASES]
    on_device = any(phase.get("graph") for phase in phases)
    texts = []
    for phase in phases:
        marked = phase.get("pairs") if on_device and not phase.get("graph") else None
        figure = marked or phase.get("graph" if on_device else "eager")
        digits = 0 if figure and figure["median"] >= 1000 else 1
        texts.append(f"{figure['median']:.{digits}f}{IN_PAIRS if marked else ''}" if figure else "–")
    return " / ".join(texts)


def compact_table(documents: list[dict[str, Any]]) -> str:
    """Medians of several results with the same contenders: a line a case, a column a contender, ours first."""
    names = dict.fromkeys(row["contender"] for document in documents for row in document["rows"])
    order = sorted(names, key=lambda name: ("symmetric" not in name, "collective" in name))
    heads = " | ".join(f"**{name}**" if "symmetric" in name else name for name in order)
    lines = [f"| dispatch / combine / both, µs | {heads} |", f"|---|{'---:|' * len(order)}"]
    for document in documents:
        for index, case in enumerate(document["cases"]):
            rows = {row["contender"]: row for row in document["rows"] if row["case"] == index}
            lines.append(f"| {case['label']} | {' | '.join(medians(rows.get(name)) for name in order)} |")
    return "\n".join(lines)


def speed_summary(documents: list[dict[str, Any]]) -> str:
    """What README.md says of the presets for decoding and prefilling; nothing without a result of them."""
    chosen = [document for document in documents if document["preset"] in ("decode", "prefill")]
    most = max((document["ranks"] for document in chosen), default=0)
    chosen = [document for document in chosen if document["ranks"] == most]
    if not chosen:
        return ""
    head = chosen[0]
    case, versions = head["cases"][0]["case"], head["versions"]
    table = compact_table(chosen)
    marked = f"{IN_PAIRS}: {PAIRS_ARE} " if IN_PAIRS in table else ""
    text = (
        f"{most} × {head['devices'][0]}, hidden size {case['hidden_size']}, top-{case['topk']} of "
        f"{case['num_experts']} experts, uniform routing, bf16 home; tokens per rank. Medians of the slowest rank by "
        "CUDA-graph replay, or of calls made one by one where a contender synchronises with the host; first all "
        f"transports returned the same bits. {marked}moelink collective runs on NCCL. torch {versions['torch']}, "
        f"triton {versions['triton']}, NCCL {versions['nccl']}, commit {head['commit'][:7]}, {head['date']}. "
        f"{' '.join(leaving_out(chosen))} "
        "[docs/results.md](docs/results.md) has percentiles, shares of the wire and the commands."
    )
    return "\n".join([table, "", text])


def leaving_out(documents: list[dict[str, Any]]) -> list[str]:
    """What contenders do not do, and which did not run, a sentence each."""
    rows = [(document["cases"][row["case"]], row) for document in documents for row in document["rows"]]
    texts = [f"{row['contender']} leaves out {row['leaves_out']}." for _, row in rows if row["leaves_out"]]
    texts += [
        f"{row['contender']} did not run with {case['label']}: {row['reason']}." for case, row in rows if row["reason"]
    ]
    return list(dict.fromkeys(texts))


def speed_table(document: dict[str, Any]) -> str:
    """One result of ``moelink bench`` in Markdown, whole."""
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
        shares = [phases.get(phase, {}).get("share_of_ceiling") for phase in PHASES[:2]]
        share = " / ".join("" if value is None else f"{100 * value:.0f} %" for value in shares)
        cells = " | ".join(cell(phases.get(phase)) for phase in PHASES)
        lines.append(f"| {document['cases'][row['case']]['label']} | {row['contender']} | {cells} | {share} |")
    case = document["cases"][0]["case"]
    notes = [
        f"`{document['command']}`: {document['ranks']} × {document['devices'][0]}, hidden size {case['hidden_size']}, "
        f"top-{case['topk']} of {case['num_experts']} experts, bf16 home, torch {versions['torch']}, triton "
        f"{versions['triton']}, commit {document['commit'][:7]}, {document['date']}. "
        "Median over samples of the slowest rank (20th – 80th percentile) by CUDA-graph replay, after all transports "
        "returned the same bits. Share of the wire: time that the busiest "
        f"link needs at the all-to-all ceiling of the same run ({limit} out of each GPU) / time taken.",
        *([f"pairs: {PAIRS_ARE}"] if any(" pairs |" in line for line in lines) else []),
        *leaving_out([document]),
    ]
    return "\n".join([*lines, "", " ".join(notes)])


def page(documents: list[tuple[str, dict[str, Any]]]) -> str:
    """docs/results.md: every (file, result)."""
    parts = [
        "# Results of `moelink bench` on GPUs",
        f"Written by `{COMMAND}` from the files that are named here; `moelink bench plot` draws\n"
        "the picture from decode and prefill. What the figures lead to is in [performance.md](performance.md).",
        "![Latency over tokens, and share of the all-to-all ceiling](speed.png)",
    ]
    for name, document in documents:
        parts += [f"## {document['preset']}, {document['ranks']} ranks", f"`benchmarks/results/{name}`"]
        parts += [speed_table(document)]
        verdicts = [entry["text"] for entry in document["verdicts"]]
        if verdicts:
            parts.append("\n".join([f"By the rule: {document['rule']}.", "", *(f"* {text}" for text in verdicts)]))
    return "\n\n".join(parts) + "\n"


def overhead(document: dict[str, Any]) -> str:
    """Return the paragraph of docs/pytorch.md about what the operator layer costs."""
    row, host, versions = document["rows"][0], document["host"], document["versions"]
    us = {name: times["median"] for name, times in row["us"].items()}
    text = (
        f"A pair of dispatch and combine of {row['tokens']} token takes {us['operator'] - us['direct']:.0f} µs longer "
        f"through the operators, and deciding which way to go takes {us['choice']:.1f} µs "
        f"({us['direct'] / 1e3:.1f} ms in all on one rank of the collective transport; {host['processor']}, "
        f"torch {versions['torch']}, {document['date']})."
    )
    return textwrap.fill(text, 120)


def between(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    inner = f"\n{content}\n" if content else "\n"
    return f"{before}{begin}{inner}{end}{after}"


def rendered() -> dict[Path, str]:
    """Return each document as it should be."""
    root, results = repository(), gpu_results()
    readme, guide = root / "README.md", root / "docs" / "pytorch.md"

    def result(name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((results_folder() / name).read_text())
        return document

    text = between(readme.read_text(), "benchmark", cpu_table(result("collective_vs_topk.json")))
    return {
        readme: between(text, "speed", speed_summary([document for _, document in results])),
        guide: between(guide.read_text(), "overhead", overhead(result("ops_overhead.json"))),
        root / "docs" / "results.md": page(results),
    }


def main() -> int:
    """Write the documents, or say whether they are up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a document is stale")
    check = parser.parse_args().check
    stale = {path: text for path, text in rendered().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if check:
            print(f"{path.name} is stale; run: {COMMAND}", file=sys.stderr)
        else:
            path.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
