"""The presets of the layer in ``moelink bench``, and their result as text. Every number comes from the document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moelink.errors import ConfigError
from moelink.tools.cli.console import table
from moelink_bench.layer.result import METHODS


def refuse_options(preset: str, given: Mapping[str, object]) -> None:
    """Raise ConfigError for an option that has a value and means nothing to ``preset``."""
    for name, value in given.items():
        if value:
            raise ConfigError(name, f"nothing with --preset {preset}, which does not use it", value)


def us(figure: dict[str, Any] | None) -> str:
    """Render ``12.3 (12.1-12.9)``: median, 20th and 80th percentile; a dash without a figure."""
    return "-" if figure is None else f"{figure['median']:.1f} ({figure['p20']:.1f}-{figure['p80']:.1f})"


def case_table(console: Console, document: dict[str, Any], index: int) -> Table:
    """Render all contenders of one case: whole calls, then the medians of parts."""
    entry = document["cases"][index]
    grid = table(console, f"{entry['label']}   (sized for {entry['max_tokens']}, {entry['calls']} inputs)")
    grid.add_column("contender", overflow="fold")
    for name in (*(f"{method} us" for method in METHODS), *document["parts"]):
        grid.add_column(name, justify="right", overflow="fold")
    for row in document["rows"]:
        if row["case"] != index:
            continue
        if row["reason"]:
            grid.add_row(row["contender"], "not run")
            continue
        parts = (row["parts"].get(name) for name in document["parts"])
        medians = ("-" if part is None else f"{part['median']:.1f}" for part in parts)
        grid.add_row(row["contender"], *(us(row[method]) for method in METHODS), *medians)
    return grid


def notes(document: dict[str, Any]) -> Text:
    """Render what the numbers mean, and who did not run."""
    lines = [document["method"]]
    lines += dict.fromkeys(f"{row['contender']}: {row['note']}" for row in document["rows"] if row["note"])
    lines += dict.fromkeys(
        f"{row['contender']} did not run: {row['reason']}" for row in document["rows"] if row["reason"]
    )
    return Text("\n".join(lines), "dim")


def verdict_lines(document: dict[str, Any]) -> Text:
    """Render one line per verdict."""
    text = Text()
    for verdict in document["verdicts"]:
        text.append(f"{verdict['text']}\n", "bold red" if verdict["faster"] is False else "")
    text.append(f"rule: {document['rule']}", "dim")
    return text


def head(document: dict[str, Any]) -> str:
    """Render machine, versions and gate."""
    versions = document["versions"]
    commit = "no commit known" if not document["commit"] else f"commit {document['commit'][:12]}"
    return (
        f"{document['preset']}: {document['ranks']} ranks on {document['devices'][0]}, torch {versions['torch']}, "
        f"triton {versions['triton']}, {commit}{' with changes' if document['dirty'] else ''}, {document['date']}\n"
        "correctness gate passed: every output was compared with the layer in fp32 before it was timed"
    )


def layer_view(console: Console, document: dict[str, Any]) -> RenderableType:
    """Render the whole report of a run whose gate passed."""
    parts: list[RenderableType] = [head(document), ""]
    for index in range(len(document["cases"])):
        parts += [case_table(console, document, index), ""]
    return Group(*parts, notes(document), "", verdict_lines(document))
