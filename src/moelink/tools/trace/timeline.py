"""Draw a trace: the work of each CTA of each rank in one pair of dispatch and combine, over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moelink.errors import ArgumentError
from moelink.tools.plots import FAINT, INK, new_figure, write_head

COLOURS: dict[str, tuple[str, tuple[str, ...]]] = {
    "waits for credit, counts, heads": ("#e07a5f", ("credit seen", "counts seen", "heads seen")),
    "waits for messages, rows": ("#f2b880", ("message seen", "row seen", "last message seen", "last row seen")),
    "reads and counts ids, rows": ("#b7c9e2", ("ids read", "counted", "base known", "rows known")),
    "first store": ("#7fa3d1", ("first store",)),
    "publishes": ("#1f4e79", ("published", "last published")),
    "stores rows, results": (
        "#3a9a78", ("row stored", "result stored", "last row stored", "last result stored"),
    ),
    "tells that it is done": ("#8a94a6", ("told",)),
}  # fmt: skip
"""By the work of a CTA, its colour and the moments that end it."""


def draw_trace(document: dict[str, Any], path: Path) -> None:
    """Draw the last pair of the JSON document of a trace into ``path`` (its suffix chooses the file format).

    A line is a track, ranks from top to bottom and SMs inside; a colour is the work of a CTA until its next moment.

    Raises:
        ArgumentError: the document has no slices.
    """
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    if not slices:
        raise ArgumentError("document", "a trace with at least one call", "one without any")
    shown = _last_pair(slices)
    ranks = sorted({event["pid"] for event in shown})
    tracks = sorted({(event["pid"], event["tid"]) for event in shown})
    gap = max(1.0, len(tracks) / 40)
    place = {track: i + gap * ranks.index(track[0]) for i, track in enumerate(tracks)}
    begin = min(event["ts"] for event in shown)
    figure = new_figure(6.2)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.07, right=0.985, top=0.79, bottom=0.1)
    for label, (colour, moments) in COLOURS.items():
        bars = [event for event in shown if event["name"] in moments]
        axes.barh(
            [place[event["pid"], event["tid"]] for event in bars], [event["dur"] for event in bars],
            left=[event["ts"] - begin for event in bars], height=0.9, color=colour, linewidth=0, label=label,
        )  # fmt: skip
    facts = document["otherData"]
    unit = "us" if facts["unit"] == "ns" else facts["unit"]
    for rank in ranks:
        mine = [place[track] for track in tracks if track[0] == rank]
        axes.text(
            -0.008, (min(mine) + max(mine)) / 2, f"rank {rank}", ha="right", va="center", size=10, color=INK,
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=3, colors=INK, labelsize=9)
    axes.set_xlabel(f"{unit} since the first CTA began", color=INK, size=9.5)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=4, frameon=False, fontsize=8.5, labelcolor=INK,
        handlelength=1.1, handleheight=0.9, columnspacing=1.4, borderaxespad=0.2,
    )  # fmt: skip
    write_head(
        figure, "One dispatch and its combine, CTA by CTA",
        f"{facts['world_size']} ranks · {facts['device']} · up to {facts['max_tokens_per_rank']} tokens per rank · "
        f"top-{facts['topk']} of {facts['num_experts']} experts · hidden size {facts['hidden_size']} · "
        f"{facts['dispatch_format']} · each line one SM",
        left=0.07, top=0.95, below=0.91,
    )  # fmt: skip
    figure.savefig(path)


def _last_pair(slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the slices of the last call of each phase."""
    last = {
        phase: max((event["args"]["call"] for event in slices if event["cat"] == phase), default=0)
        for phase in ("dispatch", "combine")
    }
    return [event for event in slices if event["args"]["call"] == last[event["cat"]]]
