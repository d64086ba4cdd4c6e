"""Maps of routing: tokens by source rank and expert of a demonstration run, and the load of trained layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moelink.errors import ArgumentError
from moelink.nn.load import KIND, LayerLoad, LoadStats, combine_reports
from moelink.tools import documents
from moelink.tools.documents import FLAG, RANKS, TEXT, count, number, one_of
from moelink.tools.plots import FAINT, INK, MUTED, OTHERS, OURS, OURS_BACK, bare, blues, new_figure


def draw_demo(document: dict[str, Any], path: Path) -> None:
    """Draw the JSON document of ``moelink demo --json`` into ``path`` (its suffix chooses the file format).

    Left: tokens that each source rank sends to each expert. Right: megabytes that leave the ranks per format, dispatch
    and combine, against one copy per expert. Formats that come home in fp32 or fp64 (they exist for exactness) are left
    out when there are others: their bars would make the rest unreadable.
    """
    figure = new_figure(5.0)
    left, right = figure.subplots(1, 2, width_ratios=(1.12, 1.0))
    figure.subplots_adjust(left=0.055, right=0.985, top=0.76, bottom=0.12, wspace=0.31)
    _routing(figure, left, document)
    _wire(right, document)
    config = document["config"]
    layer = config["layer"]
    figure.text(0.055, 0.935, "One layer of text through moelink", size=15, weight="bold", color=INK)
    figure.text(
        0.055, 0.885,
        f"{document['num_tokens']:,} bytes of text · {config['ranks']} ranks · top-{layer['topk']} of "
        f"{layer['num_experts']} experts · hidden size {layer['hidden_size']} · {document['formats'][0]['transport']} "
        f"transport · {document['device'].upper()}",
        size=9.5, color=MUTED,
    )  # fmt: skip
    figure.savefig(path)


def _routing(figure: Any, axes: Any, document: dict[str, Any]) -> None:
    counts = document["tokens_by_rank_and_expert"]
    ranks, experts = len(counts), len(counts[0])
    image = axes.imshow(counts, aspect="auto", cmap=blues(), vmin=0, interpolation="nearest")
    bare(axes)
    axes.set_title("Tokens sent, by source rank and expert", loc="left", size=11, color=INK, pad=22)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xlabel("expert", color=INK, size=9.5)
    step = max(1, experts // 8)
    axes.set_xticks(range(0, experts, step), [str(expert) for expert in range(0, experts, step)])
    axes.set_xticks([edge - 0.5 for edge in range(experts + 1)], minor=True)
    axes.set_yticks([edge - 0.5 for edge in range(ranks + 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    owners = document["expert_owners"]
    for rank in range(ranks):
        mine = [expert for expert in range(experts) if owners[expert] == rank]
        if not mine:
            continue
        if mine[0]:
            axes.axvline(mine[0] - 0.5, color="white", linewidth=5)
        middle = (mine[0] + mine[-1]) / 2
        axes.text(middle, -0.56, f"on rank {rank}", ha="center", va="bottom", size=8.5, color=MUTED)
    bar = figure.colorbar(image, ax=axes, fraction=0.035, pad=0.025)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8.5, colors=INK)
    bar.ax.set_title("tokens", color=INK, size=8.5, pad=7)


def _wire(axes: Any, document: dict[str, Any]) -> None:
    narrow = [entry for entry in document["formats"] if entry["combine_dtype"] == "bfloat16"]
    formats = narrow or document["formats"]
    names = [entry["format"] for entry in formats]
    places = list(range(len(formats)))

    def megabytes(key: str) -> list[float]:
        return [entry[key] / 1e6 for entry in formats]

    dispatch, combine = megabytes("dispatch_bytes"), megabytes("combine_bytes")
    copies = [a + b for a, b in zip(megabytes("copies_dispatch_bytes"), megabytes("copies_combine_bytes"), strict=True)]
    axes.barh(places, copies, height=0.74, color=FAINT, edgecolor=OTHERS, linewidth=0.8, label="one copy per expert")
    axes.barh(places, dispatch, height=0.44, color=OURS, label="moelink dispatch")
    axes.barh(places, combine, height=0.44, left=dispatch, color=OURS_BACK, label="moelink combine")
    for place, ours, theirs in zip(
        places, (a + b for a, b in zip(dispatch, combine, strict=True)), copies, strict=True
    ):
        axes.text(theirs + max(copies) * 0.012, place, f"{ours:.1f} of {theirs:.1f} MB", va="center", size=9, color=INK)
    bare(axes)
    axes.set_title("Bytes between ranks, by dispatch format", loc="left", size=11, color=INK, pad=22)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(copies) * 1.28)
    axes.set_xlabel("MB leaving all ranks in one layer", color=INK, size=9.5)
    axes.tick_params(axis="x", length=3, color=OTHERS)
    axes.spines["bottom"].set(visible=True, color=OTHERS)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 0.985), ncols=3, frameon=False, fontsize=8.5, labelcolor=INK,
        handlelength=1.1, handleheight=0.9, columnspacing=1.4, borderaxespad=0.0,
    )  # fmt: skip


Axis = Literal["steps", "layers"]


@dataclass(frozen=True)
class _Map:
    """What is drawn.

    Attributes:
        columns: tokens per expert, one entry a step or layer.
        labels: of the columns.
        along: what columns are.
        stats: tokens per expert and rank over all columns.
        title: what the heat map shows.
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
    figure.text(0.06, 0.935, "Where tokens go", size=15, weight="bold", color=INK)
    whose = "all ranks' tokens" if stats.replicated or len(layers[0].ranks) == stats.world_size else (
        f"only the tokens of rank{'s' if len(layers[0].ranks) > 1 else ''} {', '.join(map(str, layers[0].ranks))}"
    )  # fmt: skip
    figure.text(
        0.06, 0.885,
        f"{sum(stats.tokens_per_expert):,} choices of {len(stats.tokens_per_expert)} experts on {stats.world_size} "
        f"rank{'s' if stats.world_size > 1 else ''} · {whose}",
        size=9.5, color=MUTED,
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
    axes.tick_params(axis="x", length=3, color=OTHERS)
    axes.spines["bottom"].set(visible=True, color=OTHERS)
