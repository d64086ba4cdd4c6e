"""The picture of results of ``moelink bench``: lines over tokens and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelink.tools.documents import INDEX, RANKS, TEXT, US, Maybe, number
from moelink.tools.plots import INK, MUTED, OURS, frame, log_axis, log_values, new_figure, write_head
from moelink.tools.results import BENCHMARK, CASE, COLLECTIVE, METHODS, RUN, SYMMETRIC
from moelink_bench.measure import PHASES

COLORS = {SYMMETRIC: OURS, COLLECTIVE: "#d08c60"}
MORE_COLORS = ("#7a9e7e", "#8d7bb0", "#b56576")
FIGURES = {f"{method}?": Maybe({"median": US, "p20": US, "p80": US}) for method in METHODS}
FORMS = {
    BENCHMARK: {
        **RUN, "commit": Maybe(TEXT), "ranks": RANKS, "versions": {"torch": TEXT},
        "ceiling": {"gb_per_s": Maybe(number("GB/s", 0, 1e12))},
        "cases": [{"case": CASE, "wire_us": dict.fromkeys(PHASES, Maybe(number("microseconds", 0, 1e12)))}],
        "rows": [{
            "case": INDEX, "contender": TEXT,
            "phases": {
                f"{phase}?": {"share_of_ceiling": Maybe(number("a share", 0, 1e6)), **FIGURES} for phase in PHASES
            },
        }],
    }
}  # fmt: skip
"""Of results of ``moelink bench``, as far as they are drawn."""
LABEL_STEP = 1.28
"""Ratio of heights, on a logarithmic axis, at which two labels do not touch."""
STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Point:
    """One figure of one document: microseconds, by the first of ``METHODS`` that was used."""

    ranks: int
    tokens: int
    format: str
    contender: str
    phase: str
    method: str
    figure: dict[str, float]
    wire_us: float | None
    share: float | None

    @property
    def median(self) -> float:
        """Microseconds."""
        return self.figure["median"]


def points_of(document: dict[str, Any]) -> list[Point]:
    """Return the figures of uniform routing without an SM limit, rows by expert."""
    points = []
    for row in document["rows"]:
        entry = document["cases"][row["case"]]
        case = entry["case"]
        if case["distribution"] != "uniform" or case["num_sms"] is not None:
            continue
        if case.get("layout", "expert") != "expert":  # older results do not say
            continue
        for phase in PHASES:
            result = row["phases"].get(phase, {})
            method = next((name for name in METHODS if result.get(name)), None)
            if method is not None:
                what = (document["ranks"], case["tokens"], case["format"], row["contender"], phase)
                points.append(Point(*what, method, result[method], entry["wire_us"][phase], result["share_of_ceiling"]))
    return points


def draw_bench(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw ``documents`` (results of ``moelink bench``) into ``path`` (its suffix chooses the file format).

    Latency and share are those of the most ranks among the documents, for formats measured with several numbers of
    tokens; scaling takes all. A panel that would be empty is left out.

    Raises:
        ValueError: no document has a figure for uniform routing.
    """
    points = [point for document in documents for point in points_of(document)]
    if not points:
        raise ValueError("no figure of uniform routing in these results")
    most = max(point.ranks for point in points)
    largest = main_formats([point for point in points if point.ranks == most])
    figure = new_figure(7.4)
    panels = figure.subplots(2, 3)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.83, bottom=0.085, wspace=0.24, hspace=0.42)
    for axes, phase in zip(panels[0], PHASES, strict=True):
        _latency(axes, largest, phase)
    _share(panels[1][0], largest)
    if most > min(point.ranks for point in points):
        _scaling(panels[1][1], main_formats(points), commits(documents))
    else:
        panels[1][1].set_axis_off()
    _key(panels[1][2], panels[0])
    head = next(document for document in documents if document["ranks"] == most)
    write_head(figure, "moelink: dispatch and combine", subtitle(head), left=0.06, top=0.95, below=0.915)
    figure.savefig(path)


def commits(documents: Sequence[dict[str, Any]]) -> str:
    """Return which commit each number of ranks ran, ``"2: 929aa69, 4: 9abbd53"``; "" when all ran the same."""
    by_ranks: dict[int, list[str]] = {}
    for document in sorted(documents, key=lambda document: document["ranks"]):
        by_ranks.setdefault(document["ranks"], []).append((document["commit"] or "unknown")[:7])
    if len({commit for found in by_ranks.values() for commit in found}) == 1:
        return ""
    return ", ".join(f"{ranks}: {' and '.join(dict.fromkeys(found))}" for ranks, found in by_ranks.items())


def main_formats(points: Sequence[Point]) -> list[Point]:
    """Return points of the formats with more than one number of tokens, which make a line; all where none has."""
    tokens: dict[str, set[int]] = {}
    for point in points:
        tokens.setdefault(point.format, set()).add(point.tokens)
    chosen = [point for point in points if len(tokens[point.format]) > 1]
    return chosen or list(points)


def subtitle(document: dict[str, Any]) -> str:
    """Return hardware, shape, versions and date in a line."""
    case = document["cases"][0]["case"]
    versions = document["versions"]
    ceiling = document["ceiling"]["gb_per_s"]
    limit = f" · ceiling {ceiling:.4g} GB/s" if ceiling else ""
    return (
        f"{document['ranks']} x {document['devices'][0]} · hidden size {case['hidden_size']} · top-{case['topk']} of "
        f"{case['num_experts']} experts{limit} · torch {versions['torch']} · {document['date']}"
    )


def _token_axis(axes: Any, points: Sequence[Point]) -> None:
    tokens = sorted({point.tokens for point in points})
    log_axis(axes, tokens, [short(count) for count in tokens])
    axes.tick_params(axis="x", labelsize=6.5)


def short(count: int) -> str:
    """Write 1024 as "1k", so that neighbours fit."""
    return f"{count // 1024}k" if count % 1024 == 0 and count else str(count)


def _color(contender: str, contenders: Sequence[str]) -> str:
    others = [name for name in contenders if name not in COLORS]
    return COLORS.get(contender) or MORE_COLORS[others.index(contender) % len(MORE_COLORS)]


def _key(axes: Any, panels: Sequence[Any]) -> None:
    """Draw one legend for all latency panels, in a panel of its own."""
    axes.set_axis_off()
    entries = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    axes.legend(
        entries.values(), entries.keys(), frameon=False, fontsize=9, labelcolor=INK, loc="upper left",
        bbox_to_anchor=(-0.12, 1.0), handlelength=2.6, labelspacing=0.7,
    )  # fmt: skip


def _series(points: Sequence[Point]) -> dict[tuple[str, str], list[Point]]:
    """Group points by (contender, format), in order of tokens."""
    series: dict[tuple[str, str], list[Point]] = {}
    for point in sorted(points, key=lambda point: point.tokens):
        series.setdefault((point.contender, point.format), []).append(point)
    return series


def _latency(axes: Any, points: Sequence[Point], phase: str) -> None:
    # Calls made one by one of what a graph can hold are the host's time, which the other curves are not.
    replayed = {point.contender for point in points if point.method != "eager"}
    of_phase = [point for point in points if point.phase == phase]
    chosen = [point for point in of_phase if point.method != "eager" or point.contender not in replayed]
    contenders = list(dict.fromkeys(point.contender for point in points))
    formats = list(dict.fromkeys(point.format for point in points))
    for (contender, fmt), line in _series(chosen).items():
        tokens = [p.tokens for p in line]
        method = line[0].method
        label = contender if len(formats) == 1 else f"{contender}, {fmt}"
        style = {"linestyle": STYLES[formats.index(fmt) % len(STYLES)], "color": _color(contender, contenders)}
        fill = {"markerfacecolor": "white", "linewidth": 0.8} if method == "eager" else {"linewidth": 1.7}
        label += {"graph": "", "pairs": ",\nbetween events in a graph", "eager": ", call by call"}[method]
        axes.plot(tokens, [p.median for p in line], marker="o", markersize=3.5, label=label, **style, **fill)
        low, high = ([p.figure[edge] for p in line] for edge in ("p20", "p80"))
        axes.fill_between(tokens, low, high, color=style["color"], alpha=0.15, linewidth=0)
    title = {"both": "Dispatch, then combine"}.get(phase, phase.capitalize())
    frame(axes, title, "tokens per rank", "microseconds")
    log_values(axes)
    if chosen:
        _token_axis(axes, chosen)
        axes.set_ylim(bottom=0.6 * min(p.median for p in chosen))
    for fmt in formats:
        limit = sorted({(p.tokens, p.wire_us) for p in chosen if p.format == fmt and p.wire_us is not None})
        if limit:
            dashes, suffix = STYLES[formats.index(fmt) % len(STYLES)], "" if len(formats) == 1 else f", {fmt}"
            axes.plot(*zip(*limit, strict=True), dashes, color=MUTED, linewidth=1, label=f"wire at the ceiling{suffix}")


def _share(axes: Any, points: Sequence[Point]) -> None:
    chosen = [p for p in points if p.share is not None and p.phase != "both" and p.contender == SYMMETRIC]
    chosen = chosen or [p for p in points if p.share is not None and p.phase != "both"]
    formats = list(dict.fromkeys(point.format for point in chosen))
    colors = {"dispatch": OURS, "combine": "#0b2e59"}
    for phase, color in colors.items():
        for (contender, fmt), line in _series([p for p in chosen if p.phase == phase]).items():
            label = f"{contender.removeprefix('moelink ')}, {phase}" + ("" if len(formats) == 1 else f", {fmt}")
            style = STYLES[formats.index(fmt) % len(STYLES)]
            shares = [100 * (p.share or 0.0) for p in line]
            axes.plot([p.tokens for p in line], shares, style, marker="o", markersize=4, color=color, label=label)
    frame(axes, "moelink's share of the all-to-all ceiling", "tokens per rank", "per cent")
    axes.set_ylim(0, max([105.0, *(103 * (p.share or 0.0) for p in chosen)]))
    if chosen:
        axes.axhline(100, color=MUTED, linewidth=1)
        _token_axis(axes, chosen)
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper left", bbox_to_anchor=(0.0, 0.95))


def _scaling(axes: Any, points: Sequence[Point], code: str) -> None:
    chosen = [p for p in points if p.phase == "both" and p.contender == SYMMETRIC]
    chosen = chosen or [p for p in points if p.phase == "both"]
    lines: dict[tuple[int, str], list[Point]] = {}
    for point in sorted(chosen, key=lambda point: (point.tokens, point.ranks)):
        lines.setdefault((point.tokens, point.format), []).append(point)
    formats = {fmt for _, fmt in lines}
    ranks = sorted({point.ranks for point in chosen})
    span, height = ranks[-1] - ranks[0], 0.0
    for index, ((tokens, fmt), line) in enumerate(lines.items()):
        shade = 0.25 + 0.75 * (index + 1) / len(lines)
        label = f"{tokens} token{'s' * (tokens != 1)}" + ("" if len(formats) == 1 else f", {fmt}")
        axes.plot([p.ranks for p in line], [p.median for p in line], marker="o", markersize=4, color=OURS, alpha=shade)
        height = max(line[-1].median, LABEL_STEP * height)
        aside = line[-1].ranks + 0.08 * span
        axes.plot([line[-1].ranks, aside], [line[-1].median, height], color=MUTED, linewidth=0.6)
        axes.annotate(label, (aside, height), (2, -3), textcoords="offset points", size=8, color=INK)
    axes.set_xlim(min(ranks) - 0.4, max(ranks) + 0.6 + 0.28 * span)  # room for the labels
    frame(axes, "Both, over the number of ranks", f"ranks (commits {code})" if code else "ranks", "microseconds")
    log_values(axes)
    axes.set_xticks(ranks, [str(count) for count in ranks])
