"""Results of the layer in Markdown, for README.md and the docs."""

from __future__ import annotations

from typing import Any

from moelink_bench.layer.result import METHODS

EAGER = "\\*"
"""Marks the time of calls made one by one."""

PARTS_OF = "moelink bf16"
"""The contender whose parts are shown."""


def microseconds(value: float) -> str:
    """Write a time with as many digits as it is worth: ``12.3``, ``1234``."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def cell(row: dict[str, Any] | None, *, spread: bool) -> str:
    """Render the median of a whole call, with ``spread`` also the 20th and 80th percentile; a dash without a figure."""
    method = next((method for method in METHODS if row and row[method]), None)
    if row is None or method is None:
        return "–"
    figure = row[method]
    text = microseconds(figure["median"]) + (EAGER if method == "eager" else "")
    if spread:
        text += f" ({microseconds(figure['p20'])} – {microseconds(figure['p80'])})"
    return text


def times_table(document: dict[str, Any], *, spread: bool) -> str:
    """Render a line per case and a column per contender that ran. The fastest of a line is bold."""
    names = dict.fromkeys(row["contender"] for row in document["rows"] if not row["reason"])
    lines = [f"| layer, tokens per rank | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for index, case in enumerate(document["cases"]):
        rows = {row["contender"]: row for row in document["rows"] if row["case"] == index}
        medians = {name: (row["graph"] or row["eager"])["median"] for name, row in rows.items() if not row["reason"]}
        fastest = min(medians, key=medians.__getitem__) if medians else None
        cells = {name: cell(rows.get(name), spread=spread) for name in names}
        texts = (f"**{text}**" if name == fastest else text for name, text in cells.items())
        lines.append(f"| {case['label'].removesuffix('s').removesuffix(' token')} | {' | '.join(texts)} |")
    return "\n".join(lines)


def parts_table(document: dict[str, Any]) -> str:
    """Render medians of the parts of :data:`PARTS_OF`; "" where it has none."""
    rows = [row for row in document["rows"] if row["contender"] == PARTS_OF and row["parts"]]
    names = [name for name in document["parts"] if any(name in row["parts"] for row in rows)]
    if not rows:
        return ""
    lines = [f"| {PARTS_OF}, µs | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for row in rows:
        cells = (microseconds(row["parts"][name]["median"]) if name in row["parts"] else "–" for name in names)
        lines.append(f"| {document['cases'][row['case']]['label']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shapes_text(document: dict[str, Any]) -> str:
    """Name the sizes of each model's layer."""
    shapes = {case["shape"]["model"]: case["shape"] for case in document["cases"]}
    return "; ".join(
        f"{name}: hidden size {shape['hidden_size']}, top-{shape['topk']} of {shape['num_experts']} experts of "
        f"intermediate size {shape['intermediate_size']}"
        for name, shape in shapes.items()
    )


def setting_text(document: dict[str, Any]) -> str:
    """Say what was measured on what."""
    versions, most = document["versions"], max(case["max_tokens"] for case in document["cases"])
    commit = f"commit {document['commit'][:7]}" if document["commit"] else "no commit known"
    marked = " \\* marks calls that were made one by one." if EAGER in times_table(document, spread=False) else ""
    return (
        f"Microseconds of one layer, router logits to output, on {document['ranks']} × {document['devices'][0]}, "
        f"by CUDA-graph replay; the median of the slowest rank.{marked} moelink is `moelink.nn.MoE` on one "
        f"communicator that is sized for {most} tokens. All contenders have the same weights; each output was compared "
        f"with the layer in fp32 before it was timed. {shapes_text(document)}. torch {versions['torch']}, triton "
        f"{versions['triton']}, {commit}, {document['date']}."
    )


def note_lines(document: dict[str, Any]) -> list[str]:
    """Return a sentence for every note of a contender, and for every reason why one did not run."""
    notes = [f"{row['contender']}: {row['note']}." for row in document["rows"] if row["note"]]
    absent = [f"{row['contender']} did not run: {row['reason']}." for row in document["rows"] if row["reason"]]
    return list(dict.fromkeys([*notes, *absent]))


def verdict_lines(document: dict[str, Any]) -> list[str]:
    """Return the texts of all verdicts."""
    return [verdict["text"] for verdict in document["verdicts"]]
