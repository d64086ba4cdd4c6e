"""Writes the tables and the picture of ``docs/scale.md``, which are predictions of ``moelink plan``.

``python docs/support/scale.py`` (``make scale``) writes ``docs/scale.md`` between its marks, and ``docs/scale.png``;
``tests/project/test_docs_scale.py`` fails where the page is not what the plan says now.
"""

from __future__ import annotations

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

DOCS = Path(__file__).resolve().parent.parent
PAGE, PICTURE = DOCS / "scale.md", DOCS / "scale.png"
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


def row_of(size: dict[str, Any]) -> str:
    """A line of the table: of the form that "auto" chooses."""
    phases = size["schemes"][size["auto"]]
    dispatch, combine = (phases[phase]["time"]["total_us"] for phase in ("dispatch", "combine"))
    whole = size["layer"]["total_us"]
    way = "stores in its own memory" if size["ranks"] == 1 else "NVLink"
    if size["nodes"] > 1:
        way = "NVSHMEM, two levels" if size["auto"] == "node" else "NVSHMEM, one level"
    memory = size["memory"]["two_levels" if size["auto"] == "node" else "symmetric"] / 1e9
    network = sum(phases[phase]["links"]["network"] for phase in phases) / 1e6
    cells = [
        str(size['ranks']) + ('\\*' if size['extrapolated'] else ''), str(size["nodes"]), way,
        str(size["experts_per_rank"]), f"{memory:.2f}",
        f"{network:.1f}" if size["nodes"] > 1 else "–", us(dispatch), us(size["layer"]["experts"]["total_us"]),
        us(combine), us(whole[size["auto"]]), us(whole["rank"]) if size["auto"] == "node" else "–",
        f"{100 * (dispatch + combine) / whole[size['auto']]:.0f} %",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def tables() -> str:
    """What stands between the marks."""
    head = (
        "| GPUs | nodes | rows travel by | experts a GPU | memory, GB | network, MB | dispatch | experts | combine "
        "| **layer** | with one level | communication |\n"
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
    )
    parts = []
    for tokens, title in CASES.items():
        rows = "\n".join(row_of(size) for size in plan_of(tokens)["sizes"])
        parts.append(f"### {title}\n\n{head}{rows}\n")
    return "\n" + "\n".join([*parts, table_of_formats()]) + "\n"


def table_of_formats() -> str:
    """What rows that come home in fp8_block128 save, in the form that "auto" chooses for them."""
    head = (
        "### Rows home in 8 bits\n\n"
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


if __name__ == "__main__":
    from moelink.tools.plots.scale import draw_scale

    PAGE.write_text(written(PAGE.read_text()))
    draw_scale({title: plan_of(tokens) for tokens, title in CASES.items()}, PICTURE)
