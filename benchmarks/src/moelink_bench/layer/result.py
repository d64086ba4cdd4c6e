"""Figures, verdicts and the JSON document of the layer's benchmark, made of all ranks' samples; and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moelink.tools.results import LAYER_BENCHMARK, Method
from moelink_bench.document import markdown, run_head, to_document
from moelink_bench.layer.contenders import LAYER, PARTS
from moelink_bench.layer.peers import IN_FP8
from moelink_bench.layer.plan import LayerPlan
from moelink_bench.measure import FAILED
from moelink_bench.report import (
    FASTER,
    RankReport,
    Row,
    duels_of,
    faster_in,
    merged_row,
    microseconds,
    overall,
    said_of,
)

METHODS: tuple[Method, ...] = ("graph", "eager")

METHOD = (
    "The layer is from tokens to output, its router included, which is moelink.nn.Router for all. "
    "A sample is `calls` calls, each of its own input and routing; before it more bytes than the second-level cache "
    "holds are written and all ranks are aligned. A figure is the median (20th, 80th percentile) over samples of the "
    "slowest rank, microseconds per call. graph: events around one replay of a CUDA graph of the calls. eager: events "
    "around as many calls made one by one (wall-clock time on CPUs). parts: by events between the steps of the layer "
    "inside one replay of such a graph, or between calls made one by one, as `parts_by` says; an event takes time too, "
    "so parts add up to more than the whole. error: the largest distance of a token's output from the layer in fp32, "
    "relative to the length of that output. All calls of moelink use communicators that are sized for the most tokens "
    "of the shape"
)
RULE = (
    "faster: a lower median than every contender that is not moelink, by the same method: CUDA graph replay where both "
    "have it, else eager calls. moelink bf16 is compared with contenders whose experts are in bf16, moelink "
    "fp8_block128 with all"
)
SHOWN = "moelink bf16"
"""The contender whose parts are shown."""


def judge_layer(labels: Sequence[str], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Judge each of moelink's rows that have figures, against others than moelink. ``labels``: of the cases."""
    verdicts = []
    ran = [row for row in rows if not row.reason]
    for ours in (row for row in ran if row.contender.startswith("moelink")):
        others = {
            row.contender: row
            for row in ran
            if row.case == ours.case and not row.contender.startswith("moelink")
            and (ours.contender != SHOWN or row.contender not in IN_FP8)
        }  # fmt: skip
        duels = duels_of(ours, others, LAYER)
        faster, words = faster_in(duels), said_of(duels)
        text = f"{labels[ours.case]}, {ours.contender}: {FASTER[faster]}" + (f" ({'; '.join(words)})" if words else "")
        verdicts.append({
            "case": ours.case, "contender": ours.contender, "duels": to_document(duels), "faster": faster, "text": text,
        })  # fmt: skip
    return verdicts


def row_entry(row: Row) -> dict[str, Any]:
    """Return a row as the document has it: figures of the whole, and of the parts by the method that says most."""
    parts = {part: row.best(part) for part in PARTS if part in row.phases}
    by_graph = any(row.figure(part, "pairs") for part in parts)
    notes = [result.note for result in row.phases.values()]
    failed = next((note[note.index(FAILED) :] for note in notes if FAILED in note), "")
    return {
        "case": row.case, "contender": row.contender,
        "note": "; ".join(filter(None, (row.note, failed))), "reason": row.reason, "error": row.error,
        **{method: to_document(row.figure(LAYER, method)) for method in METHODS},
        "parts": {part: to_document(figure) for part, figure in parts.items() if figure is not None},
        "parts_by": "" if not parts else "graph" if by_graph else "eager",
    }  # fmt: skip


def layer_document(
    plan: LayerPlan, reports: Sequence[RankReport], *, commit: str | None, command: str
) -> dict[str, Any]:
    """Return the JSON document of a run from all ranks' reports: without figures when the gate failed."""
    gate = next((report.gate for report in reports if report.gate), "")
    devices = [report.device for report in reports]
    document = run_head(LAYER_BENCHMARK, plan, devices, {"passed": not gate, "fault": gate}, command, commit)
    if gate:
        return document
    rows = [merged_row(column) for column in zip(*(report.rows for report in reports), strict=True)]
    rows.sort(key=lambda row: row.case)
    verdicts = judge_layer([case.label for case in plan.cases], rows)
    most = plan.shapes()
    cases = [
        {
            "label": case.label, "case": case.name, "tokens": case.tokens, "max_tokens": most[case.shape],
            "calls": case.calls(plan.settings), "shape": to_document(case.shape), "distribution": case.distribution,
        }
        for case in plan.cases
    ]  # fmt: skip
    return {
        **document, "method": METHOD, "parts": list(PARTS), "cases": cases, "rows": [row_entry(row) for row in rows],
        "rule": RULE, "verdicts": verdicts, "faster_everywhere": overall([verdict["faster"] for verdict in verdicts]),
        "not_faster": [verdict["text"] for verdict in verdicts if verdict["faster"] is False],
    }  # fmt: skip


# --- tables in Markdown -----------------------------------------------------------------------------------------------


EAGER = "\\*"
"""Marks the time of calls made one by one."""


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
    lines = []
    for index, case in enumerate(document["cases"]):
        rows = {row["contender"]: row for row in document["rows"] if row["case"] == index}
        medians = {name: (row["graph"] or row["eager"])["median"] for name, row in rows.items() if not row["reason"]}
        fastest = min(medians, key=medians.__getitem__) if medians else None
        cells = {name: cell(rows.get(name), spread=spread) for name in names}
        texts = (f"**{text}**" if name == fastest else text for name, text in cells.items())
        lines.append([case["label"].removesuffix("s").removesuffix(" token"), *texts])
    return markdown(["layer, tokens per rank", *names], lines)


def parts_table(document: dict[str, Any]) -> str:
    """Render medians of the parts of :data:`SHOWN`; "" where it has none."""
    rows = [row for row in document["rows"] if row["contender"] == SHOWN and row["parts"]]
    names = [name for name in document["parts"] if any(name in row["parts"] for row in rows)]
    if not rows:
        return ""
    lines = []
    for row in rows:
        cells = (microseconds(row["parts"][name]["median"]) if name in row["parts"] else "–" for name in names)
        lines.append([document["cases"][row["case"]]["label"], *cells])
    return markdown([f"{SHOWN}, µs", *names], lines)


def shapes_text(document: dict[str, Any]) -> str:
    """Name the sizes of each model's layer."""
    shapes = {case["shape"]["model"]: case["shape"] for case in document["cases"]}
    return "; ".join(
        f"{name}: hidden size {shape['hidden_size']}, top-{shape['topk']} of {shape['num_experts']} experts of "
        f"intermediate size {shape['intermediate_size']}"
        for name, shape in shapes.items()
    )


def span_of(document: dict[str, Any]) -> str:
    """Name the first and the last thing that a call computes. Older results begin after the router's product."""
    routed = any("distribution" in case for case in document["cases"])
    return "tokens to output" if routed else "router logits to output"


def setting_text(document: dict[str, Any]) -> str:
    """Say what was measured on what."""
    versions, most = document["versions"], max(case["max_tokens"] for case in document["cases"])
    commit = f"commit {document['commit'][:7]}" if document["commit"] else "no commit known"
    marked = " \\* marks calls that were made one by one." if EAGER in times_table(document, spread=False) else ""
    return (
        f"Microseconds of one layer, {span_of(document)}, on {document['ranks']} × {document['devices'][0]}, "
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
