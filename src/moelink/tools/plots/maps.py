"""The picture of ``moelink plot``: the load of trained layers, by expert and rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moelink.errors import ArgumentError
from moelink.nn.load import KIND, LayerLoad, LoadStats, combine_reports
from moelink.tools import documents
from moelink.tools.documents import FLAG, RANKS, TEXT, count, number, one_of
from moelink.tools.plots import INK, OTHERS, OURS, bare, blues, new_figure, write_head

Axis = Literal["steps", "layers"]


@dataclass(frozen=True)
class _Map:
    """The picture.

    Attributes:
        columns: tokens per expert, one entry a step or layer.
        labels: of the columns.
        along: the kind of columns.
        stats: tokens per expert and rank over all columns.
        title: of the heat map.
    """

    columns: tuple[tuple[int, ...], ...]
    labels: tuple[str, ...]
    along: Axis
    stats: LoadStats
    title: str


TOKENS = count("tokens", 1 << 48, least=0)
REPORT = {
    "kind": one_of(KIND), "schema_version": documents.VERSION,
    "layers": [{
        "name": TEXT, "rank": number("a rank", 0, 1 << 12, (int,)), "world_size": RANKS, "replicated": FLAG,
        "tokens_per_expert": [TOKENS], "steps": [[TOKENS]], "first_step": TOKENS,
    }],
}  # fmt: skip
"""Form of the files of :func:`moelink.nn.save_load`."""


def load_layers(paths: Sequence[Path]) -> list[LayerLoad]:
    """Read files of :func:`moelink.nn.save_load`, of different ranks of one run.

    Raises:
        ConfigError: one is no such file.
        ArgumentError: as :func:`moelink.nn.load.combine_reports`.
    """
    expected, reports = "JSON files of moelink.nn.save_load", []
    for path in paths:
        report: Any = documents.read(path, "reports", expected)
        documents.check(report, REPORT, "reports", expected, documents.printable(path.name))
        reports.append(report)
    return combine_reports(reports)


def draw_load(layers: Sequence[LayerLoad], path: Path, *, along: Axis | None = None, layer: str | None = None) -> None:
    """Draw load statistics into ``path`` (its suffix chooses the file format).

    Left: tokens by expert (rows, owners' borders white) over steps of one layer or over layers. Right: tokens by rank,
    over all that the left shows, with the mean.

    Args:
        layers: of :func:`moelink.nn.load.combine_reports`.
        along: "steps" or "layers"; default steps if more than one was kept and only one layer is there to show.
        layer: name of the only layer to show.

    Raises:
        ArgumentError: no layer has that name; or steps of several layers, or layers of different sizes, were asked for.
    """
    shown = _choose(list(layers), along, layer)
    figure = new_figure(5.0)
    left, right = figure.subplots(1, 2, width_ratios=(2.0, 1.0))
    figure.subplots_adjust(left=0.06, right=0.975, top=0.77, bottom=0.12, wspace=0.2)
    _heat_map(figure, left, shown)
    _rank_load(right, shown.stats)
    stats = shown.stats
    whose = "all ranks' tokens" if stats.replicated or len(layers[0].ranks) == stats.world_size else (
        f"only the tokens of rank{'s' if len(layers[0].ranks) > 1 else ''} {', '.join(map(str, layers[0].ranks))}"
    )  # fmt: skip
    write_head(
        figure, "Where tokens go",
        f"{sum(stats.tokens_per_expert):,} choices of {len(stats.tokens_per_expert)} experts on {stats.world_size} "
        f"rank{'s' if stats.world_size > 1 else ''} · {whose}",
        left=0.06, top=0.935, below=0.885,
    )  # fmt: skip
    figure.savefig(path)


def _choose(layers: list[LayerLoad], along: Axis | None, layer: str | None) -> _Map:
    if layer is not None:
        names = [each.name for each in layers]
        if layer not in names:
            raise ArgumentError("layer", f"one of {', '.join(names)}", layer)
        layers = [layers[names.index(layer)]]
    if along is None:
        along = "steps" if len(layers) == 1 and len(layers[0].stats.steps) > 1 else "layers"
    if along == "steps":
        if len(layers) > 1:
            raise ArgumentError("layer", f"one of {', '.join(each.name for each in layers)}, to draw its steps", None)
        stats = layers[0].stats
        labels = tuple(str(stats.first_step + index) for index in range(len(stats.steps)))
        return _Map(stats.steps, labels, along, _with(stats, _sum(stats.steps)), f"by step, {layers[0].name}")
    if len({(len(each.stats.tokens_per_expert), each.stats.world_size) for each in layers}) > 1:
        raise ArgumentError("layer", "one layer, as they differ in experts or ranks", None)
    columns = tuple(each.stats.tokens_per_expert for each in layers)
    return _Map(columns, tuple(each.name for each in layers), along, _with(layers[0].stats, _sum(columns)), "by layer")


def _sum(columns: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(row) for row in zip(*columns, strict=True))


def _with(stats: LoadStats, tokens_per_expert: tuple[int, ...]) -> LoadStats:
    """Return ``stats`` with other totals."""
    return LoadStats(stats.rank, stats.world_size, stats.replicated, tokens_per_expert, (), 0)


def _heat_map(figure: Any, axes: Any, shown: _Map) -> None:
    from matplotlib.ticker import MaxNLocator

    rows = list(zip(*shown.columns, strict=True))
    experts, columns = len(rows), len(shown.columns)
    image = axes.imshow(rows, aspect="auto", cmap=blues(), vmin=0, interpolation="nearest")
    bare(axes)
    axes.set_title(f"Tokens per expert, {shown.title}", loc="left", size=11, color=INK, pad=10)
    axes.set_ylabel("expert", color=INK, size=9.5)
    axes.set_xlabel({"steps": "step", "layers": "layer"}[shown.along], color=INK, size=9.5)
    every = max(1, -(-experts // 16))
    axes.set_yticks(range(0, experts, every), [str(expert) for expert in range(0, experts, every)])
    every = max(1, -(-columns // 12))
    axes.set_xticks(range(0, columns, every), [shown.labels[column] for column in range(0, columns, every)])
    for border in {*shown.stats.expert_bounds[1:-1]}:
        axes.axhline(border - 0.5, color="white", linewidth=3)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, ticks=MaxNLocator(integer=True))
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8.5, colors=INK)
    bar.ax.set_title("tokens", color=INK, size=8.5, pad=7)


def _rank_load(axes: Any, stats: LoadStats) -> None:
    from matplotlib.ticker import MaxNLocator

    load = stats.tokens_per_rank
    mean = sum(load) / len(load)
    axes.barh(range(len(load)), load, height=0.62, color=OURS)
    bare(axes)
    axes.set_title(f"Tokens per rank, busiest {stats.imbalance:.2f} x mean", loc="left", size=11, color=INK, pad=10)
    labelled = range(0, len(load), max(1, len(load) // 64))  # a label takes longer than a bar
    axes.set_yticks(labelled, [f"rank {rank}" for rank in labelled])
    axes.set_ylim(len(load) - 0.5, -0.5)
    axes.set_xlim(0, max(max(load), 1) * 1.2)
    axes.axvline(mean, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    for rank in labelled:
        axes.text(load[rank] + max(load) * 0.015, rank, f"{load[rank]:,}", va="center", size=9, color=INK, bbox=behind)
    axes.set_xlabel("tokens to this rank's experts (dashed: mean)", color=INK, size=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="x", length=3, color=OTHERS)
    axes.spines["bottom"].set(visible=True, color=OTHERS)
