"""The picture of the layer's benchmark: the time of each contender, as a bar of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moelink.tools.documents import INDEX, RANKS, SIZE, TEXT, US, Maybe, number, one_of
from moelink.tools.plots import INK, MUTED, OTHERS, frame, new_figure
from moelink.tools.results import LAYER_BENCHMARK, RUN
from moelink_bench.layer.result import span_of

COLORS = {
    "route": "#e0c068", "dispatch": "#1f77b4", "convert": "#7a9e7e", "product 1": "#8d7bb0", "activation": "#b56576",
    "product 2": "#5d4e8c", "combine": "#9cc7e8",
}  # fmt: skip
"""By part; communication is blue, the products are violet."""

FIGURE = Maybe({"median": US})
FORMS = {
    LAYER_BENCHMARK: {
        **RUN, "commit": Maybe(TEXT), "ranks": RANKS, "versions": {"torch": TEXT}, "parts": [one_of(*COLORS)],
        "cases": [{"tokens": SIZE, "shape": {"model": TEXT}}],
        "rows": [{
            "case": INDEX, "contender": TEXT, "graph": FIGURE, "eager": FIGURE,
            "parts": {"*": {"median": number("microseconds", 0, 1e12)}},
        }],
    }
}  # fmt: skip
"""Of results of the layer, as far as they are drawn."""
MOST_PANELS = 64
_UPRIGHT = 5
"""Bars whose figures fit beside one another."""

SHORT = {
    "moelink fp8_block128": "moelink fp8",
    "transformers grouped_mm": "transformers",
    "sort + all-to-all": "sort + a2a",
    "sort + all-to-all fp8": "sort + a2a fp8",
    "FlashInfer one-sided fp8": "FlashInfer fp8",
}
"""Names that are too long for an axis."""


def draw_layer(document: dict[str, Any], path: Path) -> None:
    """Draw a result into ``path`` (its suffix chooses the file format): a row of panels per model, a panel per number
    of tokens, a bar per contender.

    A bar is as high as a whole call takes, by the first method that was used, and divided as its parts are. Calls that
    were made one by one may take many times as long as replays: such a bar ends at the highest replay, undivided.

    Raises:
        ValueError: no contender has a figure, or there are more than 64 panels.
    """
    rows = [row for row in document["rows"] if whole(row) is not None]
    if not rows:
        raise ValueError("no figure in this result")
    models = list(dict.fromkeys(case["shape"]["model"] for case in document["cases"]))
    columns = max(sum(case["shape"]["model"] == model for case in document["cases"]) for model in models)
    if len(models) * columns > MOST_PANELS:
        raise ValueError(f"{len(models)} x {columns} panels are more than {MOST_PANELS}")
    height = 1.65 + 2.6 * len(models)
    figure = new_figure(height)
    panels = figure.subplots(len(models), columns, squeeze=False)
    figure.subplots_adjust(left=0.055, right=0.99, top=1 - 1.45 / height, bottom=0.65 / height, wspace=0.38, hspace=0.5)
    for line, model in zip(panels, models, strict=True):
        cases = [(index, case) for index, case in enumerate(document["cases"]) if case["shape"]["model"] == model]
        for axes in line[len(cases) :]:
            axes.set_axis_off()
        for axes, (index, case) in zip(line, cases, strict=False):
            tokens = case["tokens"]
            _panel(axes, [row for row in rows if row["case"] == index], f"{tokens} token{'s' * (tokens != 1)}")
        line[0].set_ylabel("microseconds", color=INK, size=8)
        top = line[0].get_position().y1
        figure.text(0.055, top + 0.27 / height, model, size=10.5, weight="bold", color=INK)
    _words(figure, document, height)
    figure.savefig(path)


def whole(row: dict[str, Any]) -> dict[str, float] | None:
    """Return the figure of a whole call by the first method that was used, or None."""
    figure: dict[str, float] | None = row["graph"] or row["eager"]
    return figure


def segments(row: dict[str, Any], highest: float) -> list[tuple[str, float]]:
    """Return (part, microseconds) from the bottom of the bar to its top; one segment "" where there are no parts, and
    one of ``highest`` for calls that were made one by one and took longer than that.

    Example: a call of 90 us with parts of 20 and 80 us between events: 18 and 72 us.
    """
    figure = whole(row)
    assert figure is not None
    if not row["graph"] and figure["median"] > highest:
        return [("", highest)]
    parts = {name: part["median"] for name, part in row["parts"].items()}
    total = sum(parts.values())
    if not total:
        return [("", figure["median"])]
    return [(name, took * figure["median"] / total) for name, took in parts.items()]


def _panel(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    frame(axes, title, "", "")
    axes.grid(visible=False, axis="x")
    axes.set_axisbelow(True)
    replayed = [row["graph"]["median"] for row in rows if row["graph"]]
    highest = max(replayed or [row["eager"]["median"] for row in rows], default=1.0)
    many = len(rows) > _UPRIGHT
    for place, row in enumerate(rows):
        bottom = 0.0
        for name, height in segments(row, highest):
            axes.bar(place, height, 0.72, bottom, color=COLORS.get(name, OTHERS), linewidth=0)
            bottom += height
        said = f"{(whole(row) or {})['median']:.0f}{'' if row['graph'] else '*'}"
        rotation = 90 if many else 0
        axes.text(place, bottom + 0.02 * highest, said, ha="center", size=6.5, color=INK, rotation=rotation)
    axes.set_ylim(0, (1.25 if many else 1.12) * highest)
    names = [SHORT.get(row["contender"], row["contender"].removesuffix(" one-sided")) for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=38, ha="right")
    axes.tick_params(axis="x", labelsize=6, length=0, pad=1)
    axes.tick_params(axis="y", labelsize=7)


def _words(figure: Any, document: dict[str, Any], height: float) -> None:
    from matplotlib.patches import Patch

    versions = document["versions"]
    commit = f"commit {document['commit'][:7]}" if document["commit"] else "no commit known"
    figure.text(
        0.055, 1 - 0.35 / height, f"moelink: the whole layer, {span_of(document)}", size=14, weight="bold", color=INK
    )
    figure.text(
        0.055, 1 - 0.6 / height,
        f"{document['ranks']} x {document['devices'][0]} · torch {versions['torch']} · {commit} · {document['date']} · "
        "median of CUDA graph replay (* calls made one by one, cut at the highest replay), divided as the parts are",
        size=8.5, color=MUTED,
    )  # fmt: skip
    drawn = [name for name in document["parts"] if any(name in row["parts"] for row in document["rows"])]
    entries = [Patch(color=COLORS[name], label=name) for name in drawn]
    if any(whole(row) is not None and not (row["parts"] and row["graph"]) for row in document["rows"]):
        entries.append(Patch(color=OTHERS, label="not taken apart"))
    figure.legend(
        handles=entries, loc="upper left", bbox_to_anchor=(0.048, 1 - 0.62 / height), ncols=8, frameon=False,
        fontsize=8, labelcolor=INK, handlelength=1.2, columnspacing=1.4,
    )  # fmt: skip
