"""``moelink plan``, ``moelink plan check`` and ``moelink plan fit``, and their documents as text."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moelink.tools.bench.contenders import SYMMETRIC
from moelink.tools.cli.console import drawing, make_console, quantity, table, to_json, write_json
from moelink.tools.plan import (
    Constants,
    Layer,
    load_constants,
    make_plan,
    make_routing,
    packaged_constants,
    parse_ranks,
    to_document,
)
from moelink.tools.plan import fit as fitting

plan_app = typer.Typer(
    invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
OutOption = Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")]
ConstantsOption = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Measured constants, a file of moelink plan fit."),
]
ResultsArgument = Annotated[
    list[Path], typer.Argument(exists=True, dir_okay=False, help="JSON files of moelink bench.")
]
ContenderOption = Annotated[str, typer.Option(help="Whose times: a contender of the bench.")]


class Transport(str, Enum):
    """Choices of --transport."""

    symmetric = "symmetric"
    collective = "collective"


@plan_app.callback()
def plan(
    context: typer.Context,
    experts: Annotated[int, typer.Option(min=1, help="Experts over all ranks.")] = 256,
    topk: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 8,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 7168,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per rank and call.")] = 128,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks: 8, or 2,4,24, or 8..2048 (doubling).")] = "8..64",
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks that share NVLink.")] = 8,
    format: Annotated[str, typer.Option(help="Dispatch format.")] = "fp8_block128",
    combine_format: Annotated[
        str | None, typer.Option(help="Format in which rows come home: fp8_block128 or mxfp8. Default: bf16.")
    ] = None,
    capacity: Annotated[int | None, typer.Option(min=0, help="Rows of dispatch's output. Default: worst case.")] = None,
    transport: Annotated[Transport, typer.Option(help="Whose messages are counted.")] = Transport.symmetric,
    routing: Annotated[str, typer.Option(help="uniform, zipf, or a .npy file of topk_ids [tokens, topk].")] = "uniform",
    redundant: Annotated[int, typer.Option(min=0, help="More physical experts, to place experts by load.")] = 0,
    nvlink: Annotated[float | None, typer.Option(help="Assume: GB/s of a rank's NVLink, one direction.")] = None,
    net: Annotated[float | None, typer.Option(help="Assume: GB/s of a rank's network, one direction.")] = None,
    latency: Annotated[
        float | None, typer.Option(help="Assume: us of a dispatch or combine that moves nothing.")
    ] = None,
    hop: Annotated[float | None, typer.Option(help="Assume: us more per phase on several nodes.")] = None,
    memory: Annotated[
        float | None, typer.Option(help="Assume: GB/s of a rank's own memory. Default: left out.")
    ] = None,
    constants: ConstantsOption = None,
    out: OutOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result there (.png or .svg).")] = None,
    json_output: JsonOption = False,
) -> None:
    """Memory, bytes by link and predicted time at sizes that you do not have yet.

    Times need constants: measured ones (--constants, or those of the package) or assumptions (--nvlink, --net,
    --latency), which replace measured ones; the output says which is which. Without them there are bytes and memory.
    """
    if context.invoked_subcommand is not None:
        return
    layer = Layer(
        num_experts=experts, topk=topk, hidden_size=hidden, tokens=tokens, dispatch_format=format,
        combine_format=combine_format, capacity=capacity, transport=transport.value,
    )  # fmt: skip
    chosen = read_constants(constants).assume({
        "floor_us": (latency, "--latency"),
        "nvlink_gb_per_s": (nvlink, "--nvlink"),
        "network_gb_per_s": (net, "--net"),
        "memory_gb_per_s": (memory, "--memory"),
        "hop_us": (hop, "--hop"),
    })  # fmt: skip
    result = make_plan(
        layer, parse_ranks(ranks), ranks_per_node=ranks_per_node,
        routing=make_routing(routing, num_experts=experts, topk=topk), constants=chosen, redundant=redundant,
    )  # fmt: skip
    document = to_document(result)
    write_json(document, out)
    if plot is not None:
        draw(document, plot)
    if json_output:
        typer.echo(to_json(document))
        return
    console = make_console()
    console.print(plan_view(console, document))


@plan_app.command()
def check(
    results: ResultsArgument,
    constants: ConstantsOption = None,
    contender: ContenderOption = SYMMETRIC,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Only cases of so many tokens; may be repeated.")
    ] = None,
    within: Annotated[float, typer.Option(min=0, help="Per cent that a prediction may be off.")] = 15.0,
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Hold predictions against measured times; exit status 1 when one is further off than --within."""
    points = fitting.load_points(results, contender=contender)
    wanted = [point for point in points if not tokens or point.layer.tokens in tokens]
    comparisons = fitting.compare(wanted, read_constants(constants))
    document = fitting.to_document(comparisons)
    write_json(document, out)
    if json_output:
        typer.echo(to_json(document))
    else:
        console = make_console()
        console.print(check_view(console, document))
    error = document["largest_error"]
    if error is None or any(row["error"] is None for row in document["rows"]):
        reason = "no such case in these results" if not wanted else "constants are missing; give --constants"
        typer.echo(f"moelink: not everything could be compared: {reason}", err=True)
        raise typer.Exit(1)
    if 100 * error > within:
        typer.echo(f"moelink: a prediction is {100 * error:.1f} % off, {within:g} % allowed", err=True)
        raise typer.Exit(1)


@plan_app.command()
def fit(
    results: ResultsArgument,
    out: Annotated[Path, typer.Option(help="Constants file to write.")],
    contender: ContenderOption = SYMMETRIC,
    json_output: JsonOption = False,
) -> None:
    """Make constants of measured times, for --constants. More numbers of ranks and tokens make better ones."""
    points = fitting.load_points(results, contender=contender)
    document = fitting.fit(points, contender=contender)
    write_json(document, out)
    if json_output:
        typer.echo(to_json(document))
        return
    console = make_console()
    comparisons = fitting.compare(points, fitting.constants_of(document))
    console.print(check_view(console, fitting.to_document(comparisons)))


def read_constants(path: Path | None) -> Constants:
    """Return the constants of ``path``, or those of the package."""
    return packaged_constants() if path is None else load_constants(path)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a plan; one line and exit status 1 where that cannot be done."""
    from moelink.tools.plots.lines import draw_plan

    with drawing(path):
        draw_plan(document, path)


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
busiest / placed   rows of the busiest rank over the mean: experts by number, and placed by load (--redundant)
symmetric / collective   block or staging of that transport, and the outputs of a dispatch and a combine
limit   the largest part of the predicted time; time = latency + slower of NVLink and network + memory +
        quantising (docs/plan.md)"""


def us(value: float | None) -> str:
    """Render ``12.3``; a dash without a value."""
    return "-" if value is None else f"{value:.1f}"


def sizes_table(console: Console, document: dict[str, Any]) -> Table:
    """Render where tokens go and what memory that takes."""
    layer = document["layer"]
    home = "" if layer["combine_format"] is None else f", {layer['combine_format']} home"
    title = (
        f"Sizes ({layer['tokens']} tokens a rank, top-{layer['topk']} of {layer['num_experts']} experts, hidden size "
        f"{layer['hidden_size']}, {layer['dispatch_format']}{home}, {document['routing']})"
    )
    grid = table(console, title)
    names = ("ranks", "nodes", "experts a rank", "ranks a token", "nodes a token", "symmetric", "collective")
    for name in (*names, "busiest", "placed"):
        grid.add_column(name, justify="right")
    for size in document["sizes"]:
        grid.add_row(
            str(size["ranks"]), str(size["nodes"]), str(size["experts_per_rank"]), f"{size['ranks_per_token']:.2f}",
            f"{size['nodes_per_token']:.2f}", quantity(size["memory"]["symmetric"]),
            quantity(size["memory"]["collective"]), f"{size['imbalance']:.2f}",
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
    """Render every constant with its source, and what is missing."""
    entry = document["constants"]
    phases, sources = entry["phases"], entry["sources"]
    text = Text()
    if not sources:
        text.append("No times: no constant of the model is measured or given.\n", "bold")
    elif not entry["measured"]:
        text.append("Times rest on assumptions given on the command line; only what says so was fitting.\n", "bold")
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
    """Render what the reader should know about these sizes."""
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
    """Render the whole plan."""
    schemes = [part for copies in TITLES for part in (scheme_table(console, document, copies), "")]
    return Group(sizes_table(console, document), "", *schemes, constants_text(document), plan_notes(document))


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
