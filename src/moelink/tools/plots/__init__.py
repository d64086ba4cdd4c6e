"""Pictures: JSON in, PNG or SVG out.

``plan`` draws plans, ``maps`` the load of trained layers, :mod:`moelink.tools.trace.timeline` traces. The scripts of
``docs/`` and the distribution moelink-bench draw theirs with the functions below.
matplotlib (the extra ``moelink[plot]``) is imported when something is drawn, with a backend that needs no display.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INK = "#1b2a41"
MUTED = "#8a94a6"
FAINT = "#e7eaf0"
OURS = "#1f77b4"
OTHERS = "#c9ced8"


def new_figure(height: float) -> Any:
    """Make an empty white figure of ``height`` inches, as wide as all pictures of moelink."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def write_head(figure: Any, title: str, facts: str, *, left: float, top: float, below: float) -> None:
    """Write a title at height ``top``, and a line of facts at ``below``, as shares of the figure."""
    figure.text(left, top, title, size=15, weight="bold", color=INK)
    figure.text(left, below, facts, size=9.5, color=MUTED)


def bare(axes: Any) -> None:
    """Remove the box and the tick marks."""
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, colors=INK, labelsize=9)


def blues() -> Any:
    """Return the colours of heat maps, from none to most."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("moelink", ("#f4f8fc", "#9cc7e8", "#1f77b4", "#0b2e59"))


def frame(axes: Any, title: str, across: str, up: str) -> None:
    """Set title and labels, a faint grid, and no box but the two axes."""
    axes.set_title(title, loc="left", size=11, color=INK, pad=8)
    axes.set_xlabel(across, color=INK, size=9.5)
    axes.set_ylabel(up, color=INK, size=9.5)
    axes.grid(which="major", color=FAINT, linewidth=0.8)
    axes.tick_params(length=3, color=OTHERS, colors=INK, labelsize=9)
    for name, spine in axes.spines.items():
        spine.set(visible=name in ("left", "bottom"), color=OTHERS)


LEAST_STEP = 1.35
"""Ratio of two values that have labels on a logarithmic axis: nearer labels would cover each other."""


def log_axis(axes: Any, values: Sequence[int], labels: Sequence[str]) -> None:
    """Make the horizontal axis double with each step, with a tick at each of ``values``, as far as labels have room."""
    ticks: dict[int, str] = {}
    for value, label in sorted(zip(values, labels, strict=True)):
        if not ticks or value >= LEAST_STEP * max(ticks):
            ticks[value] = label
    axes.set_xscale("log", base=2)
    axes.set_xticks([*ticks], [*ticks.values()])
    axes.minorticks_off()


def log_values(axes: Any) -> None:
    """Make the vertical axis logarithmic, with numbers as people write them: 0.5, 1, 2, 5, 10, 1,000."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
