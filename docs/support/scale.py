"""Writes the tables and the picture of a layer by number of GPUs in ``docs/plan.md``, predictions of ``moelink plan``.

``python docs/support/scale.py`` (``make scale``) writes ``docs/plan.md`` between its marks, and ``docs/scale.png``;
``tests/project/test_docs_scale.py`` fails if the page is not the present plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moelink.tools.plan import (
    Layer,
    Uniform,
    make_plan,
    packaged_constants,
    packaged_expert_constants,
    to_document,
)
from moelink.tools.plots import INK, MUTED, frame, new_figure

DOCS = Path(__file__).resolve().parent.parent
PAGE, PICTURE = DOCS / "plan.md", DOCS / "scale.png"
MARKS = ("<!-- plan: begin -->\n", "<!-- plan: end -->\n")
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PER_NODE = 8
NETWORK = 50.0
CASES = {128: "Decode: 128 tokens on every GPU", 4096: "Prefill or training: 4096 tokens on every GPU"}


def plan_of(tokens: int, home: str | None = None) -> dict[str, Any]:
    """The plan of a layer of DeepSeek-V3's shape, rows coming home in bf16 or in the format ``home``."""
    layer = Layer(
        num_experts=256, topk=8, hidden_size=7168, tokens=tokens, combine_format=home, intermediate_size=2048,
        expert_format="fp8_block128",
    )  # fmt: skip
    plan = make_plan(
        layer, RANKS, ranks_per_node=PER_NODE, routing=Uniform(256, 8),
        constants=packaged_constants().assume({"network_gb_per_s": (NETWORK, "--net")}),
        experts=packaged_expert_constants(),
    )  # fmt: skip
    return to_document(plan)


def us(value: float) -> str:
    """Microseconds to three digits or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def rows_of(size: dict[str, Any]) -> tuple[str, str]:
    """A line of each table, of needs and of times, in the form that "auto" chooses."""
    phases = size["schemes"][size["auto"]]
    dispatch, combine = (phases[phase]["time"]["total_us"] for phase in ("dispatch", "combine"))
    whole = size["layer"]["total_us"]
    way = "stores in its own memory" if size["ranks"] == 1 else "NVLink"
    if size["nodes"] > 1:
        way = "NVSHMEM, two levels" if size["auto"] == "node" else "NVSHMEM, one level"
    memory = size["memory"]["two_levels" if size["auto"] == "node" else "symmetric"] / 1e9
    network = sum(phases[phase]["links"]["network"] for phase in phases) / 1e6
    ranks = str(size["ranks"]) + ("\\*" if size["extrapolated"] else "")
    needs = [
        ranks, str(size["nodes"]), way, str(size["experts_per_rank"]), f"{memory:.2f}",
        f"{network:.1f}" if size["nodes"] > 1 else "–",
    ]  # fmt: skip
    takes = [
        ranks, us(dispatch), us(size["layer"]["experts"]["total_us"]), us(combine), us(whole[size["auto"]]),
        us(whole["rank"]) if size["auto"] == "node" else "–",
        f"{100 * (dispatch + combine) / whole[size['auto']]:.0f} %",
    ]  # fmt: skip
    return f"| {' | '.join(needs)} |", f"| {' | '.join(takes)} |"


def tables() -> str:
    """The text between the marks."""
    heads = (
        "| GPUs | nodes | rows travel by | experts a GPU | memory, GB | network, MB |\n"
        "|---:|---:|---|---:|---:|---:|\n",
        "| GPUs | dispatch | experts | combine | **layer** | with one level | communication |\n"
        "|---:|---:|---:|---:|---:|---:|---:|\n",
    )
    parts = []
    for tokens, title in CASES.items():
        columns = zip(*(rows_of(size) for size in plan_of(tokens)["sizes"]), strict=True)
        both = "\n".join(head + "\n".join(rows) + "\n" for head, rows in zip(heads, columns, strict=True))
        parts.append(f"#### {title}\n\n{both}")
    return "\n" + "\n".join([*parts, table_of_formats()]) + "\n"


def table_of_formats() -> str:
    """The savings of rows that come home in fp8_block128, in the form that "auto" chooses for them."""
    head = (
        "#### Rows home in 8 bits\n\n"
        "| GPUs | tokens | combine, bf16 | combine, fp8_block128 | layer, bf16 | layer, fp8_block128 |\n"
        "|---:|---:|---:|---:|---:|---:|\n"
    )
    rows = []
    for tokens in CASES:
        plans = [plan_of(tokens, home)["sizes"] for home in (None, "fp8_block128")]
        for pair in zip(*plans, strict=True):
            if pair[0]["ranks"] in (8, 16, 64, 256):
                combine = [us(size["schemes"][size["auto"]]["combine"]["time"]["total_us"]) for size in pair]
                whole = [us(size["layer"]["total_us"][size["auto"]]) for size in pair]
                rows.append(f"| {pair[0]['ranks']} | {tokens} | {' | '.join([*combine, *whole])} |")
    return head + "\n".join(rows) + "\n"


def written(page: str) -> str:
    """The page with its tables as the plan has them now."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}{tables()}{MARKS[1]}{rest.split(MARKS[1])[1]}"


COLORS = {"dispatch": "#1f77b4", "experts": "#8d7bb0", "combine": "#9cc7e8"}
"""As in the picture of the layer's benchmark: communication is blue, the experts are violet."""
BANDS = {"here": "#f3f5f8", "nvlink": "#e9f2fa", "network": "#fdf3ea"}
BAND_NAMES = {"here": "nothing\ntravels", "nvlink": "NVLink", "network": "NVLink and network, {} GPUs a node"}


def parts_of(size: Mapping[str, Any], copies: str) -> dict[str, float]:
    """Return the microseconds of dispatch, experts and combine of a size of a plan.

    Raises:
        ValueError: a time is missing because a constant is.
    """
    phases = size["schemes"][copies]
    found = {
        "dispatch": phases["dispatch"]["time"]["total_us"],
        "experts": size["layer"]["experts"]["total_us"] if size["layer"] and size["layer"]["experts"] else None,
        "combine": phases["combine"]["time"]["total_us"],
    }
    if None in found.values():
        raise ValueError("the plan has no times: constants are missing")
    return found


def band_of(size: Mapping[str, Any]) -> str:
    """Return the link of rows of this size."""
    return "here" if size["ranks"] == 1 else "nvlink" if size["nodes"] == 1 else "network"


def draw_scale(plans: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw documents of ``moelink plan``, by title, into ``path`` (its suffix chooses the file format): a panel for
    each, a bar for each number of ranks, in the form that ``two_level="auto"`` chooses.

    Raises:
        ValueError: a plan without times, or matplotlib does not know the suffix.
    """
    figure = new_figure(2.0 + 3.1 * len(plans))
    height = figure.get_figheight()
    panels = figure.subplots(len(plans), 1, squeeze=False)[:, 0]
    figure.subplots_adjust(left=0.07, right=0.985, top=1 - 1.55 / height, bottom=0.55 / height, hspace=0.42)
    for axes, (title, document) in zip(panels, plans.items(), strict=True):
        _panel(axes, title, document)
    panels[-1].set_xlabel("GPUs in one expert-parallel group", color=INK, size=9.5)
    first = next(iter(plans.values()))
    layer, constants = first["layer"], first["constants"]
    network = constants["phases"]["dispatch"]["network_gb_per_s"]
    figure.text(0.07, 1 - 0.4 / height, "One MoE layer, from one GPU to 256", size=14, weight="bold", color=INK)
    figure.text(
        0.07, 1 - 0.66 / height,
        f"top-{layer['topk']} of {layer['num_experts']} experts · hidden size {layer['hidden_size']} · intermediate "
        f"{layer['intermediate_size']} · {layer['dispatch_format']} dispatch · experts in {layer['expert_format']} · "
        "predicted by moelink plan",
        size=9, color=MUTED,
    )  # fmt: skip
    fitted = " and ".join(map(str, constants["fitted_ranks"]))
    figure.text(
        0.07, 1 - 0.87 / height,
        f"Constants of NVLink were measured on {fitted} H200, other sizes are extrapolated; {network:g} GB/s of "
        f"network and {constants['forward_us']:g} us of forwarding are assumed.",
        size=9, color=MUTED,
    )  # fmt: skip
    _legend(figure, height)
    figure.savefig(path)


def _panel(axes: Any, title: str, document: Mapping[str, Any]) -> None:
    sizes = document["sizes"]
    frame(axes, title, "", "microseconds")
    axes.grid(visible=False, axis="x")
    axes.set_axisbelow(True)
    highest = max(sum(parts_of(size, copies).values()) for size in sizes for copies in size["schemes"])
    bands = [band_of(size) for size in sizes]
    for band in dict.fromkeys(bands):
        first, last = bands.index(band), len(bands) - 1 - bands[::-1].index(band)
        axes.axvspan(first - 0.5, last + 0.5, color=BANDS[band], linewidth=0, zorder=0)
        name = BAND_NAMES[band].format(document["ranks_per_node"])
        axes.text(first - 0.44, 1.26 * highest, name, size=7.5, color=MUTED, va="top")
    for place, size in enumerate(sizes):
        bottom = 0.0
        for name, us in parts_of(size, size["auto"]).items():
            axes.bar(place, us, 0.58, bottom, color=COLORS[name], linewidth=0, zorder=2)
            bottom += us
        label = f"{bottom:.0f}"
        other = sum(parts_of(size, "rank").values())
        if size["auto"] == "node":
            axes.plot([place - 0.36, place + 0.36], [other, other], color="#c4622d", linewidth=1.6, zorder=3)
            axes.text(place, other + 0.012 * highest, f"{other:.0f}", ha="center", size=7.5, color="#c4622d")
            axes.text(place, bottom - 0.055 * highest, label, ha="center", size=8, color=INK, zorder=4)
        else:
            axes.text(place, bottom + 0.015 * highest, label, ha="center", size=8, color=INK)
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.set_ylim(0, 1.28 * highest)
    axes.set_xticks(range(len(sizes)), [str(size["ranks"]) for size in sizes])


def _legend(figure: Any, height: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Patch | Line2D] = [Patch(color=color, label=name) for name, color in COLORS.items()]
    entries.append(Line2D([], [], color="#c4622d", linewidth=1.6, label="the same with one level between nodes"))
    figure.legend(
        handles=entries, loc="upper left", bbox_to_anchor=(0.063, 1 - 0.92 / height), ncols=4, frameon=False,
        fontsize=8.5, labelcolor=INK, handlelength=1.4, columnspacing=1.6,
    )  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    draw_scale({title: plan_of(tokens) for tokens, title in CASES.items()}, PICTURE)
