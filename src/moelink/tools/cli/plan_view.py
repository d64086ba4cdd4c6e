"""A plan, and a comparison with measured times, as text. Every number comes from the document."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moelink.tools.cli.render import quantity, table

PHASES = ("dispatch", "combine")
TITLES = {"rank": "One copy per (token, rank)", "node": "One copy per (token, node)"}
NAMES = {
    "floor_us": "latency",
    "per_peer_us": "latency per peer",
    "nvlink_gb_per_s": "NVLink",
    "network_gb_per_s": "network",
    "memory_gb_per_s": "memory",
    "quantising_gb_per_s": "quantising",
    "hop_us": "hop between nodes",
}
OPTIONS = {"floor_us": "--latency", "nvlink_gb_per_s": "--nvlink", "network_gb_per_s": "--net"}

LEGEND = """\
bytes   of one call, expected, over the busier direction of the busiest rank's link; memory is one rank's
symmetric / collective   block or staging of that transport, and the outputs of a dispatch and a combine
limit   the largest part of the predicted time; time = latency + slower of NVLink and network + memory +
        quantising (docs/plan.md)"""


def us(value: float | None) -> str:
    """``12.3``; a dash without a value."""
    return "-" if value is None else f"{value:.1f}"


def sizes_table(console: Console, document: dict[str, Any]) -> Table:
    """Where tokens go and what memory that takes."""
    layer = document["layer"]
    title = (
        f"Sizes ({layer['tokens']} tokens a rank, top-{layer['topk']} of {layer['num_experts']} experts, hidden size "
        f"{layer['hidden_size']}, {layer['dispatch_format']}, {document['routing']})"
    )
    grid = table(console, title)
    for name in ("ranks", "nodes", "experts a rank", "ranks a token", "nodes a token", "symmetric", "collective"):
        grid.add_column(name, justify="right")
    for size in document["sizes"]:
        grid.add_row(
            str(size["ranks"]), str(size["nodes"]), str(size["experts_per_rank"]), f"{size['ranks_per_token']:.2f}",
            f"{size['nodes_per_token']:.2f}", quantity(size["memory"]["symmetric"]),
            quantity(size["memory"]["collective"]),
        )  # fmt: skip
    return grid


def scheme_table(console: Console, document: dict[str, Any], copies: str) -> Table:
    """Bytes and times of one scheme."""
    grid = table(console, f"{TITLES[copies]}: {document['copies'][copies]}")
    grid.add_column("ranks", justify="right")
    for phase in PHASES:
        for name in (f"{phase}: NVLink", "network", "us", "limit"):
            grid.add_column(name, justify="left" if name == "limit" else "right")
    for size in document["sizes"]:
        cells = []
        for phase in PHASES:
            entry = size["schemes"][copies][phase]
            links, time = entry["links"], entry["time"]
            cells += [quantity(round(links["nvlink"])), quantity(round(links["network"])), us(time["total_us"])]
            cells.append((time["limit"] or time["busiest_link"] or "-") + "*" * size["extrapolated"])
        grid.add_row(str(size["ranks"]), *cells)
    return grid


def constants_text(document: dict[str, Any]) -> Text:
    """Every constant with its source, and what is missing."""
    entry = document["constants"]
    phases, sources = entry["phases"], entry["sources"]
    text = Text()
    if not sources:
        text.append("No times: no constant of the model is measured or given.\n", "bold")
    elif not entry["measured"]:
        text.append("Times rest on assumptions given on the command line; only what says so was measured.\n", "bold")
    for name, source in sources.items():
        unit = "us" if name.endswith("_us") else "GB/s"
        values = [phases[phase][name] for phase in PHASES]
        shown = (
            f"{values[0]:g}" if values[0] == values[1] else " / ".join("-" if v is None else f"{v:g}" for v in values)
        )
        text.append(f"{NAMES[name]:<18}{shown} {unit}   {source}\n")
    if entry["description"]:
        text.append(f"measured on {entry['description']}\n", "dim")
    missing = {
        name
        for size in document["sizes"]
        for scheme in size["schemes"].values()
        for phase in scheme.values()
        for name in phase["time"]["missing"]
    }
    if missing:
        text.append(
            f"Where a time is missing, give {', '.join(OPTIONS[name] for name in OPTIONS if name in missing)}.\n"
        )
    return text


def plan_notes(document: dict[str, Any]) -> Text:
    """What the reader should know about these sizes."""
    lines = [LEGEND]
    sizes = document["sizes"]
    if any(size["nodes"] > 1 for size in sizes):
        lines.append(
            "Between nodes moelink takes the collective transport (NCCL, gloo) unless told otherwise; its symmetric\n"
            "one, over NVSHMEM (ranks_per_node), has run on one machine that played several."
        )
    idle = [size["ranks"] for size in sizes if size["idle_ranks"]]
    if idle:
        lines.append(f"With {', '.join(map(str, idle))} ranks there are more ranks than experts: some own none.")
    if any(size["extrapolated"] for size in sizes):
        fitted = ", ".join(map(str, document["constants"]["fitted_ranks"]))
        lines.append(f"* extrapolated: the constants were fitted to {fitted} ranks.")
    return Text("\n".join(lines), "dim")


def plan_view(console: Console, document: dict[str, Any]) -> RenderableType:
    """The whole plan."""
    schemes = [part for copies in TITLES for part in (scheme_table(console, document, copies), "")]
    return Group(sizes_table(console, document), "", *schemes, constants_text(document), plan_notes(document))


def check_view(console: Console, document: dict[str, Any]) -> RenderableType:
    """Measured and predicted times side by side."""
    grid = table(console, "Measured and predicted, us")
    for name in ("file", "ranks", "tokens", "format", "routing", "phase", "by", "measured", "predicted", "error"):
        grid.add_column(
            name, justify="right" if name in ("ranks", "tokens", "measured", "predicted", "error") else "left"
        )
    for row in document["rows"]:
        error = "-" if row["error"] is None else f"{100 * row['error']:+.1f} %"
        grid.add_row(
            row["file"], str(row["ranks"]), str(row["tokens"]), row["format"], row["routing"], row["phase"],
            row["method"], us(row["measured_us"]), us(row["predicted_us"]), error,
        )  # fmt: skip
    largest = document["largest_error"]
    said = "no prediction" if largest is None else f"largest error {100 * largest:.1f} %"
    return Group(grid, Text(said, "bold"))
