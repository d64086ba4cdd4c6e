"""``moelink plan``, ``moelink plan check`` and ``moelink plan fit``."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from moelink.tools.bench.contenders import SYMMETRIC
from moelink.tools.cli import render
from moelink.tools.cli.files import drawing, write_json
from moelink.tools.cli.plan_view import check_view, plan_view
from moelink.tools.plan import (
    Constants,
    Layer,
    load_constants,
    make_plan,
    make_routing,
    measured,
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
    capacity: Annotated[int | None, typer.Option(min=0, help="Rows of dispatch's output. Default: worst case.")] = None,
    transport: Annotated[Transport, typer.Option(help="Whose messages are counted.")] = Transport.symmetric,
    routing: Annotated[str, typer.Option(help="uniform, zipf, or a .npy file of topk_ids [tokens, topk].")] = "uniform",
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
        num_experts=experts, topk=topk, hidden_size=hidden, tokens=tokens, dispatch_format=format, capacity=capacity,
        transport=transport.value,
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
        routing=make_routing(routing, num_experts=experts, topk=topk), constants=chosen,
    )  # fmt: skip
    document = to_document(result)
    write_json(document, out)
    if plot is not None:
        draw(document, plot)
    if json_output:
        typer.echo(json.dumps(document, indent=2))
        return
    console = render.make_console()
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
    points = measured.load_points(results, contender=contender)
    wanted = [point for point in points if not tokens or point.layer.tokens in tokens]
    comparisons = measured.compare(wanted, read_constants(constants))
    document = measured.to_document(comparisons)
    write_json(document, out)
    if json_output:
        typer.echo(json.dumps(document, indent=2))
    else:
        console = render.make_console()
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
    points = measured.load_points(results, contender=contender)
    document = fitting.fit(points, contender=contender)
    write_json(document, out)
    if json_output:
        typer.echo(json.dumps(document, indent=2))
        return
    console = render.make_console()
    comparisons = measured.compare(points, fitting.constants_of(document))
    console.print(check_view(console, measured.to_document(comparisons)))


def read_constants(path: Path | None) -> Constants:
    """The constants of ``path``, or those of the package."""
    return packaged_constants() if path is None else load_constants(path)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a plan; one line and exit status 1 where that cannot be done."""
    from moelink.tools.plan.plots import draw_plan

    with drawing(path):
        draw_plan(document, path)
