"""A result of ``moelink bench`` as text. Nothing here runs anything; every number comes from the document."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moelink.tools.cli.render import quantity, table

PHASES = ("dispatch", "combine", "both")
METHODS = ("graph", "pairs", "eager", "kernel")


def cell(figure: dict[str, Any] | None) -> str:
    """``12.3 (12.1-12.9)``: median, 20th and 80th percentile; a dash without a figure."""
    return "-" if figure is None else f"{figure['median']:.1f} ({figure['p20']:.1f}-{figure['p80']:.1f})"


def method_rows(row: dict[str, Any]) -> list[tuple[str, list[str], str, str]]:
    """(method, cells by phase, skew, shares) for every method that the row has.

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
    """All contenders of one case."""
    entry = document["cases"][index]
    wire = " + ".join(quantity(round(entry[phase]["busiest"])) for phase in PHASES[:2])
    grid = table(console, f"{entry['label']}   (busiest link {wire}, {entry['copies']} inputs)")
    for name in ("contender", "by", "dispatch us", "combine us", "both us", "skew", "share of ceiling"):
        grid.add_column(
            name,
            justify="left" if name in ("contender", "by") else "right",
            overflow="fold",
            no_wrap=name == "contender",
        )
    for row in document["rows"]:
        if row["case"] != index:
            continue
        if row["reason"]:
            grid.add_row(row["contender"], "-", "not run")
            continue
        for line, (method, cells, skew, share) in enumerate(method_rows(row)):
            grid.add_row(row["contender"] if not line else "", method, *cells, skew, share)
    return grid


def notes(document: dict[str, Any]) -> Text:
    """What the numbers mean, and what contenders leave out."""
    lines = [document["method"], f"bytes: {document['bytes_formula']}"]
    left_out = dict.fromkeys((row["contender"], row["leaves_out"]) for row in document["rows"] if row["leaves_out"])
    lines += [f"{name} leaves out: {text}" for name, text in left_out]
    said = {
        (row["contender"], result["note"])
        for row in document["rows"]
        for result in row["phases"].values()
        if result["note"]
    }
    lines += [f"{name}: {note}" for name, note in sorted(said)]
    absent = {(row["contender"], row["reason"]) for row in document["rows"] if row["reason"]}
    lines += [f"{name} did not run: {reason}" for name, reason in sorted(absent)]
    return Text("\n".join(lines), "dim")


def verdict_lines(document: dict[str, Any]) -> Text:
    """One line per verdict."""
    text = Text()
    for verdict in document["verdicts"]:
        failed = verdict["faster"] is False or verdict["within_wire"] is False
        text.append(f"{verdict['text']}\n", "bold red" if failed else "")
    text.append(f"rule: {document['rule']}", "dim")
    return text


def head(document: dict[str, Any]) -> str:
    """Machine, versions, ceiling, gate."""
    versions = document["versions"]
    ceiling = document["ceiling"]
    speed = f"{ceiling['gb_per_s']:.1f} GB/s out of each rank" if ceiling["gb_per_s"] else f"none: {ceiling['reason']}"
    commit = "no commit known" if not document["commit"] else f"commit {document['commit'][:12]}"
    return (
        f"{document['preset']}: {document['ranks']} ranks on {document['devices'][0]}, torch {versions['torch']}, "
        f"triton {versions['triton']}, {commit}{' with changes' if document['dirty'] else ''}, {document['date']}\n"
        f"correctness gate passed in {len(document['gate']['checked'])} cases\n"
        f"ceiling: {speed} ({ceiling['method']})"
    )


def bench_view(console: Console, document: dict[str, Any]) -> RenderableType:
    """The whole report of a run whose gate is green."""
    parts: list[RenderableType] = [head(document), ""]
    for index in range(len(document["cases"])):
        parts += [case_table(console, document, index), ""]
    return Group(*parts, notes(document), "", verdict_lines(document))
