"""Results of presets as text. Every number comes from the document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moelink.tools.cli.console import quantity, table
from moelink.tools.results import LAYER_BENCHMARK, ROLES_BENCHMARK
from moelink_bench.comparisons import NEEDED, gate_line, published_lines, share_lines, summary, table_of
from moelink_bench.layer.result import METHODS as LAYER_METHODS
from moelink_bench.measure import PHASES
from moelink_bench.roles_result import comparison_lines, tables

METHODS = ("graph", "pairs", "eager", "kernel")


def view(console: Console, document: dict[str, Any]) -> RenderableType:
    """Render the whole report of a run whose gate passed."""
    parts = {LAYER_BENCHMARK: layer_parts, ROLES_BENCHMARK: roles_parts}.get(document["benchmark"], bench_parts)
    return Group(*parts(console, document))


def cell(figure: dict[str, Any] | None) -> str:
    """Render ``12.3 (12.1-12.9)``: median, 20th and 80th percentile; a dash without a figure."""
    return "-" if figure is None else f"{figure['median']:.1f} ({figure['p20']:.1f}-{figure['p80']:.1f})"


def grid_of(console: Console, title: str, heads: Sequence[str], lines: Iterable[Sequence[str]], text: int = 1) -> Table:
    """Render lines as a table whose first ``text`` columns are text."""
    grid = table(console, title)
    for index, name in enumerate(heads):
        whole = not index and text > 1
        grid.add_column(name, justify="left" if index < text else "right", overflow="fold", no_wrap=whole)
    for line in lines:
        grid.add_row(*line)
    return grid


def head(document: dict[str, Any], *facts: str) -> str:
    """Render what ran on what, by which versions, and what else is to be known before the figures."""
    versions, ranks = document["versions"], document["ranks"]
    where = "one" if document["benchmark"] == ROLES_BENCHMARK else f"{ranks} ranks on"
    commit = "no commit known" if not document["commit"] else f"commit {document['commit'][:12]}"
    ran = (
        f"{document['preset']}: {where} {document['devices'][0]}, torch {versions['torch']}, "
        f"triton {versions['triton']}, {commit}{' with changes' if document['dirty'] else ''}, {document['date']}"
    )
    return "\n".join([ran, *facts])


def absent(document: dict[str, Any]) -> list[str]:
    """Say who did not run, and why."""
    reasons = [f"{row['contender']} did not run: {row['reason']}" for row in document["rows"] if row["reason"]]
    return list(dict.fromkeys(reasons))


def verdict_lines(document: dict[str, Any]) -> Text:
    """Render one line per verdict."""
    text = Text()
    for verdict in document["verdicts"]:
        failed = verdict["faster"] is False or verdict.get("within_wire") is False
        text.append(f"{verdict['text']}\n", "bold red" if failed else "")
    text.append(f"rule: {document['rule']}", "dim")
    return text


# --- dispatch and combine ---------------------------------------------------------------------------------------------


def method_rows(row: dict[str, Any]) -> list[tuple[str, list[str], str, str]]:
    """Return (method, cells by phase, skew, shares) for every method that the row has.

    Shares of the ceiling stand with the first method that has figures of phases alone: they are made of those.
    """
    shares = [row["phases"].get(phase, {}).get("share_of_ceiling") for phase in PHASES[:2]]
    share = " / ".join("-" if value is None else f"{100 * value:.0f} %" for value in shares)
    rows = []
    for method in METHODS:
        figures = [row["phases"].get(phase, {}).get(method) for phase in PHASES]
        if any(figures):
            skew = figures[-1] or next(figure for figure in figures if figure)
            alone = any(figures[:2])
            rows.append((method, [cell(figure) for figure in figures], f"{skew['skew']:.1f}", share if alone else ""))
            share = "" if alone else share
    return rows


def case_table(console: Console, document: dict[str, Any], index: int) -> Table:
    """Render all contenders of one case."""
    entry, lines = document["cases"][index], []
    wire = " + ".join(quantity(round(entry[phase]["busiest"])) for phase in PHASES[:2])
    for row in (row for row in document["rows"] if row["case"] == index):
        if row["reason"]:
            lines.append([row["contender"], "-", "not run"])
        for number, (method, cells, skew, share) in enumerate(method_rows(row)):
            lines.append([row["contender"] if not number else "", method, *cells, skew, share])
    heads = ("contender", "by", *(f"{phase} us" for phase in PHASES), "skew", "share of ceiling")
    return grid_of(console, f"{entry['label']}   (busiest link {wire}, {entry['copies']} inputs)", heads, lines, 2)


def notes(document: dict[str, Any]) -> Text:
    """Render what the numbers mean, and what contenders leave out."""
    lines = [document["method"], f"bytes: {document['bytes_formula']}"]
    left_out = dict.fromkeys((row["contender"], row["leaves_out"]) for row in document["rows"] if row["leaves_out"])
    lines += [f"{name} leaves out: {text}" for name, text in left_out]
    said = {(row["contender"], phase["note"]) for row in document["rows"] for phase in row["phases"].values()}
    lines += [f"{name}: {note}" for name, note in sorted(said) if note]
    return Text("\n".join([*lines, *sorted(absent(document))]), "dim")


def comparison_parts(console: Console, document: dict[str, Any]) -> list[RenderableType]:
    """Render the comparisons with FlashInfer, what the speed gate says, published figures, and shares of the speed."""
    if "speed_gate" not in document:  # older results have no comparisons
        return []
    heads, lines = table_of(document)
    parts: list[RenderableType] = []
    count = [index for index, name in enumerate(heads) if name in NEEDED]
    alone = [index for index in range(1, len(heads)) if index not in count]
    for title, columns in (("comparisons that count", count), ("comparisons that do not count", alone)):
        chosen = [[line[index] for index in (0, *columns)] for line in lines if any(line[i] != "–" for i in columns)]
        if chosen:
            parts += [grid_of(console, title, [heads[index] for index in (0, *columns)], chosen), ""]
    text = Text()
    for comparison in document["speed_gate"]["comparisons"]:
        text.append(f"{summary(comparison)}\n", "bold red" if comparison["passed"] is False else "")
    text.append(gate_line(document), "bold")
    parts += [text, ""]
    if document["published"]:
        parts += [Text("\n".join(published_lines(document["published"])), "dim"), ""]
    heads, lines = share_lines(document)
    if lines:
        parts += [grid_of(console, "share of the full speed", heads, lines), Text(document["sm_share_rule"], "dim"), ""]
    return parts


def bench_parts(console: Console, document: dict[str, Any]) -> list[RenderableType]:
    """Render a result of dispatch and combine."""
    ceiling = document["ceiling"]
    speed = f"{ceiling['gb_per_s']:.1f} GB/s out of each rank" if ceiling["gb_per_s"] else f"none: {ceiling['reason']}"
    gate = f"correctness gate passed in {len(document['gate']['checked'])} cases"
    parts: list[RenderableType] = [head(document, gate, f"ceiling: {speed} ({ceiling['method']})"), ""]
    for index in range(len(document["cases"])):
        parts += [case_table(console, document, index), ""]
    return [*parts, *comparison_parts(console, document), notes(document), "", verdict_lines(document)]


# --- the layer, and roles ---------------------------------------------------------------------------------------------


def layer_parts(console: Console, document: dict[str, Any]) -> list[RenderableType]:
    """Render a result of the layer: whole calls, then the medians of parts."""
    gate = "correctness gate passed: every output was compared with the layer in fp32 before it was timed"
    parts: list[RenderableType] = [head(document, gate), ""]
    heads = ("contender", *(f"{method} us" for method in LAYER_METHODS), *document["parts"])
    for index, entry in enumerate(document["cases"]):
        lines = []
        for row in (row for row in document["rows"] if row["case"] == index):
            medians = [row["parts"].get(name) for name in document["parts"]]
            cells = ["-" if part is None else f"{part['median']:.1f}" for part in medians]
            whole = ["not run"] if row["reason"] else [*(cell(row[method]) for method in LAYER_METHODS), *cells]
            lines.append([row["contender"], *whole])
        title = f"{entry['label']}   (sized for {entry['max_tokens']}, {entry['calls']} inputs)"
        parts += [grid_of(console, title, heads, lines), ""]
    said = dict.fromkeys(f"{row['contender']}: {row['note']}" for row in document["rows"] if row["note"])
    words = Text("\n".join([document["method"], *said, *absent(document)]), "dim")
    return [*parts, words, "", verdict_lines(document)]


def roles_parts(console: Console, document: dict[str, Any]) -> list[RenderableType]:
    """Render a result of roles."""
    bandwidth = document["bandwidth"]
    parts: list[RenderableType] = [head(
        document, f"correctness gate passed in {len(document['gate']['checked'])} cases",
        f"bandwidth: {bandwidth['gb_per_s']:.0f} GB/s ({bandwidth['method']})",
        "microseconds of one rank, in parentheses the share of the bandwidth",
    ), ""]  # fmt: skip
    for title, heads, lines in tables(document):
        parts += [grid_of(console, title, heads, lines, 0), ""]
    words = Text(f"{document['method']}\nmemory: {document['memory_rule']}", "dim")
    return [*parts, words, "", Text("\n".join(comparison_lines(document)))]
