"""Documents of ``moelink plan`` and of its commands as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moelink.levels import ASSUMED
from moelink.tools.cli.console import quantity, table

PHASES = ("dispatch", "combine")
TITLES = {"rank": "One copy per (token, rank)", "node": "One copy per (token, node)"}
LEVELS = {"rank": "layer, 1 level", "node": "2 levels"}
NAMES = {
    "floor_us": "latency",
    "per_peer_us": "latency per peer",
    "nvlink_gb_per_s": "NVLink",
    "network_gb_per_s": "network",
    "memory_gb_per_s": "memory",
    "quantising_gb_per_s": "quantising",
    "hop_us": "hop between nodes",
}
OPTIONS = {
    "floor_us": "--latency, us of a dispatch or combine that moves nothing",
    "nvlink_gb_per_s": "--nvlink, GB/s of a rank's NVLink in one direction",
    "network_gb_per_s": "--net, GB/s of a rank's network in one direction",
}

MULTI_NODE = """\
Between nodes moelink takes the collective transport (NCCL, gloo) unless told otherwise; its symmetric
one, over NVSHMEM (ranks_per_node), has run on one machine that played several, with two_level=True as well."""

AUTO = (
    'auto    what two_level="auto" chooses, by rates of its own: '
    f"{ASSUMED.nvlink_gb_per_s:g} GB/s of NVLink, {ASSUMED.network_gb_per_s:g} of network, {ASSUMED.forward_us:g} us "
    "of forwarding"
)
"""Its rates are constants of moelink.levels, not of this plan."""

LEGEND = """\
bytes   of one call, expected, over the busier direction of the busiest rank's link; memory is one rank's
busiest / placed   rows of the busiest rank over the mean: experts by number, and placed by load (--redundant)
symmetric / two levels / collective   block or staging of that transport, and the outputs of a dispatch and a combine
limit   the largest part of the predicted time; time = latency + slower of NVLink and network + memory +
        quantising (docs/plan.md); the faster link is hidden behind the slower one
hidden  weights that experts read while they compute, or products that end before their weights are read
layer   dispatch, experts of the slowest rank and combine, one after the other; without routing and shared experts"""


def us(value: float | None) -> str:
    """Render ``12.3``; a dash without a value."""
    return "-" if value is None else f"{value:.1f}"


def sizes_table(console: Console, document: dict[str, Any]) -> Table:
    """Render the routes of tokens and the memory for them."""
    layer = document["layer"]
    home = "" if layer["combine_format"] is None else f", {layer['combine_format']} home"
    title = (
        f"Sizes ({layer['tokens']} tokens a rank, top-{layer['topk']} of {layer['num_experts']} experts, hidden size "
        f"{layer['hidden_size']}, {layer['dispatch_format']}{home}, {document['routing']})"
    )
    grid = table(console, title)
    names = ("ranks", "nodes", "experts a rank", "ranks a token", "nodes a token")
    kinds = ("symmetric", "two_levels", "collective")
    held = [name for name in kinds if any(size["memory"][name] is not None for size in document["sizes"])]
    for name in (*names, *held, "busiest", "placed"):
        grid.add_column(name.replace("_", " "), justify="right")
    for size in document["sizes"]:
        grid.add_row(
            str(size["ranks"]), str(size["nodes"]), str(size["experts_per_rank"]), f"{size['ranks_per_token']:.2f}",
            f"{size['nodes_per_token']:.2f}",
            *("-" if size["memory"][name] is None else quantity(size["memory"][name]) for name in held),
            f"{size['imbalance']:.2f}",
            "-" if size["imbalance_placed"] is None else f"{size['imbalance_placed']:.2f}",
        )  # fmt: skip
    return grid


def scheme_table(console: Console, document: dict[str, Any], copies: str) -> Table:
    """Render bytes and times of one scheme."""
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
    """Render every constant with its source, and the missing ones."""
    entry = document["constants"]
    phases, sources = entry["phases"], entry["sources"]
    text = Text()
    if not sources:
        text.append("No times: no constant of the model is fitted or given.\n", "bold")
    elif not entry["measured"]:
        text.append("Times rest on assumptions given on the command line; constants marked fitted do not.\n", "bold")
    for name, source in sources.items():
        unit = "us" if name.endswith("_us") else "GB/s"
        values = [phases[phase][name] for phase in PHASES]
        shown = (
            f"{values[0]:.4g}"
            if values[0] == values[1]
            else " / ".join("-" if v is None else f"{v:.4g}" for v in values)
        )
        text.append(f"{NAMES[name]:<18}{shown} {unit}   {source}\n")
    if any(size["nodes"] > 1 for size in document["sizes"]) and "node" in document["copies"]:
        text.append(f"{'forwarding':<18}{entry['forward_us']:g} us   {entry['forward_source']}\n")
    if entry["description"]:
        text.append(f"measured on {entry['description']}\n", "dim")
    experts, layer = document["experts"], document["layer"]
    found = experts["constants"].get(layer["expert_format"])
    if layer["intermediate_size"] is not None and found is None:
        text.append(f"No time of experts: no constants of {layer['expert_format']}; see moelink plan fit-experts.\n")
    elif layer["intermediate_size"] is not None:
        text.append(
            f"{'experts':<18}{found['weights_gb_per_s']:.4g} GB/s of weights, {found['tflop_per_s']:.4g} TFLOP/s   "
            f"{experts['source']}\n"
        )
        text.append(f"measured on {experts['description']}\n", "dim")
    missing = {
        name
        for size in document["sizes"]
        for scheme in size["schemes"].values()
        for phase in scheme.values()
        for name in phase["time"]["missing"]
    }
    for name in OPTIONS:
        if name in missing:
            text.append(
                f"Times are missing (-): no fitted constant for {NAMES[name]}, because no run that shows it was "
                f"measured; give {OPTIONS[name]}.\n"
            )
    return text


def plan_notes(document: dict[str, Any], *, compare: bool) -> Text:
    """Render notes on these sizes."""
    lines = [LEGEND]
    if compare:
        lines.append(AUTO)
    sizes = document["sizes"]
    if any(size["nodes"] > 1 for size in sizes):
        lines.append(MULTI_NODE)
    idle = [size["ranks"] for size in sizes if size["idle_ranks"]]
    if idle:
        lines.append(f"With {', '.join(map(str, idle))} ranks there are more ranks than experts: some own none.")
    if any(size["extrapolated"] for size in sizes):
        fitted = ", ".join(map(str, document["constants"]["fitted_ranks"]))
        lines.append(f"* extrapolated: the constants were fitted to {fitted} ranks.")
    return Text("\n".join(lines), "dim")


def number_of(value: float | None) -> str:
    """Render three or four digits: ``12.3``, ``1234``; a dash without a value."""
    return "-" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def layer_table(console: Console, document: dict[str, Any]) -> Table:
    """Render the experts' time and the layer's."""
    layer = document["layer"]
    grid = table(
        console,
        f"Experts of intermediate size {layer['intermediate_size']} in {layer['expert_format']}, and the layer, us",
    )
    names = ("ranks", "rows", "latency", "weights", "arithmetic", "moving rows", "activation", "experts")
    for name in names:
        grid.add_column(name, justify="right")
    grid.add_column("limit")
    for copies in document["copies"]:
        grid.add_column(LEVELS[copies], justify="right")
    for size in document["sizes"]:
        entry = size["layer"]
        time = entry["experts"] or {}
        parts = ("latency_us", "weights_us", "arithmetic_us", "rows_us", "activation_us", "total_us")
        shown = {part: number_of(time.get(part)) for part in parts}
        shown |= {part: "hidden" for part in ("weights_us", "arithmetic_us") if time.get(part) == 0}
        grid.add_row(
            str(size["ranks"]), f"{entry['rows']:.0f}", *shown.values(),
            time.get("limit", "-"), *(number_of(entry["total_us"][copies]) for copies in document["copies"]),
        )  # fmt: skip
    return grid


def fewer(size: dict[str, Any]) -> float | None:
    """Return how many times fewer network bytes two levels send, of dispatch and combine; None on one node."""
    one, two = (
        sum(size["schemes"][copies][phase]["links"]["network"] for phase in PHASES) for copies in ("rank", "node")
    )
    return one / two if two else None


def compare_table(console: Console, document: dict[str, Any]) -> Table:
    """Render one level and two side by side: network bytes, and times."""
    grid = table(
        console, "Network bytes and us of one level (1: a copy per token and rank) and of two (2: per token and node)"
    )
    for name in ("ranks", "nodes"):
        grid.add_column(name, justify="right")
    for phase in PHASES:
        for name in (f"{phase} 1", "2", "us 1", "2"):
            grid.add_column(name, justify="right", no_wrap=True)
    with_layer = document["layer"]["intermediate_size"] is not None
    for name in ("fewer", *(("layer us 1", "2") if with_layer else ()), "auto"):
        grid.add_column(name, justify="right", no_wrap=True)
    for size in document["sizes"]:
        cells = [str(size["ranks"]), str(size["nodes"])]
        for phase in PHASES:
            entries = [size["schemes"][copies][phase] for copies in ("rank", "node")]
            cells += [quantity(round(entry["links"]["network"])) for entry in entries]
            cells += [number_of(entry["time"]["total_us"]) for entry in entries]
        ratio = fewer(size)
        cells.append("-" if ratio is None else f"{ratio:.2f} x")
        if with_layer:
            cells += [number_of(size["layer"]["total_us"][copies]) for copies in ("rank", "node")]
        grid.add_row(*cells, "-" if ratio is None else "1" if size["auto"] == "rank" else "2")
    return grid


def plan_view(console: Console, document: dict[str, Any], *, compare: bool = False) -> RenderableType:
    """Render the whole plan; with ``compare`` one and two levels in one table instead of a table for each."""
    parts: list[RenderableType] = [sizes_table(console, document), ""]
    if compare:
        parts += [compare_table(console, document), ""]
    else:
        parts += [part for copies in document["copies"] for part in (scheme_table(console, document, copies), "")]
    if document["layer"]["intermediate_size"] is not None:
        parts += [layer_table(console, document), ""]
    return Group(*parts, constants_text(document), plan_notes(document, compare=compare))


def check_view(console: Console, document: dict[str, Any]) -> RenderableType:
    """Render measured and predicted times side by side."""
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
