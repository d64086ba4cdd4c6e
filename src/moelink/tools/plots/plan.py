"""The picture of ``moelink plan``: lines over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moelink.tools.plots import INK, MUTED, OURS, frame, log_axis, log_values, new_figure, write_head

NETWORK = "#d08c60"
DARK = "#0b2e59"
PLAN_STYLES = {"rank": "-", "node": "--"}
COPIES = {"rank": "a copy per rank", "node": "a copy per node"}


def draw_plan(document: dict[str, Any], path: Path) -> None:
    """Draw the JSON document of ``moelink plan`` into ``path`` (its suffix chooses the file format).

    Raises:
        ValueError: matplotlib does not know the suffix.
    """
    figure = new_figure(8.6)
    ((memory, times), (dispatch, combine)) = figure.subplots(2, 2)
    figure.subplots_adjust(left=0.07, right=0.985, top=0.85, bottom=0.075, wspace=0.19, hspace=0.36)
    _memory(memory, document)
    _times(times, document)
    _bytes(dispatch, document, "dispatch")
    _bytes(combine, document, "combine")
    layer = document["layer"]
    write_head(
        figure, "moelink plan",
        f"{layer['tokens']} tokens a rank · top-{layer['topk']} of {layer['num_experts']} experts · hidden size "
        f"{layer['hidden_size']} · {layer['dispatch_format']} · {document['routing']} routing · "
        f"{document['ranks_per_node']} ranks a node",
        left=0.07, top=0.955, below=0.925,
    )  # fmt: skip
    figure.savefig(path)


def _plan_frame(axes: Any, document: dict[str, Any], title: str, up: str) -> None:
    ranks = [size["ranks"] for size in document["sizes"]]
    frame(axes, title, "ranks", up)
    log_axis(axes, ranks, [str(count) for count in ranks])
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, borderaxespad=0.2, handlelength=3.5)


def _line(axes: Any, document: dict[str, Any], values: list[float | None], style: str, color: str, label: str) -> None:
    """Draw a series, or nothing when no value is above 0: a logarithmic axis does not show 0."""
    points = [(size["ranks"], value) for size, value in zip(document["sizes"], values, strict=True) if value]
    if points:
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=4, color=color, label=label)


def _memory(axes: Any, document: dict[str, Any]) -> None:
    for name, label, style, color in (
        ("block", "symmetric: block", "-", OURS),
        ("staging", "collective: staging", "--", DARK),
        ("outputs", "outputs of a dispatch and a combine", ":", MUTED),
    ):
        _line(axes, document, [size["memory"][name] / 1e9 for size in document["sizes"]], style, color, label)
    log_values(axes)
    rows = document["layer"]["capacity"]
    _plan_frame(axes, document, f"Memory of a rank ({'worst case' if rows is None else f'{rows} rows'})", "GB")


def _times(axes: Any, document: dict[str, Any]) -> None:
    for phase, color in (("dispatch", OURS), ("combine", DARK)):
        for copies in document["copies"]:
            values = [size["schemes"][copies][phase]["time"]["total_us"] for size in document["sizes"]]
            _line(axes, document, values, PLAN_STYLES[copies], color, f"{phase}, {COPIES[copies]}")
    entry = document["constants"]
    if axes.lines:
        log_values(axes)
    else:
        axes.text(0.5, 0.5, "no constants fitted or given", ha="center", color=MUTED, transform=axes.transAxes)
    kind = "constants fitted" if entry["measured"] else "constants assumed" if entry["sources"] else "unknown"
    _plan_frame(axes, document, f"Predicted time ({kind})", "microseconds")


def _bytes(axes: Any, document: dict[str, Any], phase: str) -> None:
    for link, label, color in (("nvlink", "NVLink", OURS), ("network", "network", NETWORK)):
        for copies in document["copies"]:
            values = [size["schemes"][copies][phase]["links"][link] / 1e6 for size in document["sizes"]]
            _line(axes, document, values, PLAN_STYLES[copies], color, f"{label}, {COPIES[copies]}")
    if axes.lines:
        log_values(axes)
    _plan_frame(axes, document, f"{phase.capitalize()}: bytes over the busiest link of each kind", "MB a call")
