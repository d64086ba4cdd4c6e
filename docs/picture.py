"""Draw the picture of the README from ``docs/demo.json``, the output of ``moelink demo --json`` (see Makefile)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moelink.tools.plots import FAINT, INK, MUTED, OTHERS, OURS, bare, blues, new_figure, write_head

HERE = Path(__file__).resolve().parent
OURS_BACK = "#9cc7e8"


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
    write_head(
        figure, "One layer of text through moelink",
        f"{document['num_tokens']:,} bytes of text · {config['ranks']} ranks · top-{layer['topk']} of "
        f"{layer['num_experts']} experts · hidden size {layer['hidden_size']} · {document['formats'][0]['transport']} "
        f"transport · {document['device'].upper()}",
        left=0.055, top=0.935, below=0.885,
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


if __name__ == "__main__":
    draw_demo(json.loads((HERE / "demo.json").read_text()), HERE / "demo.png")
