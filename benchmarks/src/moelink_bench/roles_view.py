"""The presets of roles in ``moelink bench``: their result as text. Every number comes from the document."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from moelink.tools.cli.console import table
from moelink_bench.roles_result import comparison_lines, tables


def head(document: dict[str, Any]) -> str:
    """Render machine, versions, bandwidth and gate."""
    versions, bandwidth = document["versions"], document["bandwidth"]
    commit = "no commit known" if not document["commit"] else f"commit {document['commit'][:12]}"
    return (
        f"{document['preset']}: one {document['devices'][0]}, torch {versions['torch']}, triton {versions['triton']}, "
        f"{commit}{' with changes' if document['dirty'] else ''}, {document['date']}\n"
        f"correctness gate passed in {len(document['gate']['checked'])} cases\n"
        f"bandwidth: {bandwidth['gb_per_s']:.0f} GB/s ({bandwidth['method']})\n"
        "microseconds of one rank, in parentheses the share of the bandwidth"
    )


def roles_view(console: Console, document: dict[str, Any]) -> RenderableType:
    """Render the whole report of a run whose gate passed."""
    parts: list[RenderableType] = [head(document), ""]
    for title, heads, lines in tables(document):
        grid = table(console, title)
        for name in heads:
            grid.add_column(name, justify="right", overflow="fold")
        for line in lines:
            grid.add_row(*line)
        parts += [grid, ""]
    notes = [document["method"], f"memory: {document['memory_rule']}"]
    return Group(*parts, Text("\n".join(notes), "dim"), "", Text("\n".join(comparison_lines(document))))
