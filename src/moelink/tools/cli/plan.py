"""``moelink plan``, and its commands ``check``, ``fit`` and ``fit-experts``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moelink.errors import ConfigError
from moelink.tools.cli.console import (
    JsonOption,
    OutOption,
    check_topk,
    check_writable,
    drawing,
    format_option,
    show,
    write_json,
)
from moelink.tools.documents import printable
from moelink.tools.results import LAYER_BENCHMARK, SYMMETRIC, read_result

if TYPE_CHECKING:
    from moelink.tools.plan import Constants, MachineExperts

plan_app = typer.Typer(
    invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

ConstantsOption = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Measured constants, a file of moelink plan fit."),
]
ExpertsOption = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Constants of experts, a file of moelink plan fit-experts."),
]
ResultsArgument = Annotated[
    list[Path], typer.Argument(exists=True, dir_okay=False, help="JSON files of moelink bench.")
]
ContenderOption = Annotated[str, typer.Option(help="Whose times: a contender of the bench.")]


@plan_app.callback()
def plan(
    context: typer.Context,
    experts: Annotated[int, typer.Option(min=1, help="Experts over all ranks.")] = 256,
    topk: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 8,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 7168,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per rank and call.")] = 128,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks: 8, or 2,4,24, or 8..2048 (doubling).")] = "8..64",
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks that share NVLink.")] = 8,
    format: Annotated[str, format_option("Dispatch format.")] = "fp8_block128",
    combine_format: Annotated[
        Literal["fp8_block128", "mxfp8"] | None, typer.Option(help="Format in which rows come home. Default: bf16.")
    ] = None,
    capacity: Annotated[int | None, typer.Option(min=0, help="Rows of dispatch's output. Default: worst case.")] = None,
    transport: Annotated[
        Literal["symmetric", "collective"], typer.Option(help="Transport whose messages are counted.")
    ] = "symmetric",
    intermediate: Annotated[
        int, typer.Option(min=0, help="Columns of an expert's gate and of up; 0 leaves the experts out.")
    ] = 2048,
    expert_format: Annotated[
        Literal["bf16", "fp8_block128"], typer.Option(help="Format of the experts' weights and products.")
    ] = "fp8_block128",
    routing: Annotated[str, typer.Option(help="uniform, zipf, or a .npy file of topk_ids [tokens, topk].")] = "uniform",
    redundant: Annotated[int, typer.Option(min=0, help="More physical experts, to place experts by load.")] = 0,
    nvlink: Annotated[float | None, typer.Option(help="Assume: GB/s of a rank's NVLink, one direction.")] = None,
    net: Annotated[float | None, typer.Option(help="Assume: GB/s of a rank's network, one direction.")] = None,
    latency: Annotated[
        float | None, typer.Option(help="Assume: us of a dispatch or combine that moves nothing.")
    ] = None,
    hop: Annotated[float | None, typer.Option(help="Assume: us more per phase on several nodes.")] = None,
    forward: Annotated[
        float | None, typer.Option(help="Assume: us more per phase with two levels. Default: what auto assumes.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Assume: GB/s of a rank's own memory. Default: left out.")
    ] = None,
    constants: ConstantsOption = None,
    expert_constants: ExpertsOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Print one and two levels side by side.")] = False,
    out: OutOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result there (.png or .svg).")] = None,
    json_output: JsonOption = False,
) -> None:
    """Predict memory, bytes and times at sizes that you do not have.

    Times need constants: measured ones (--constants, or those of the package) or assumptions (--nvlink, --net,
    --latency), which replace measured ones; the output says which is which. Without them there are bytes and memory.
    """
    if context.invoked_subcommand is not None:
        return
    check_topk(topk, experts)
    check_writable(out=out, plot=plot)
    from moelink.tools.cli.plan_view import plan_view
    from moelink.tools.plan import Layer, make_plan, make_routing, parse_ranks, to_document

    layer = Layer(
        num_experts=experts, topk=topk, hidden_size=hidden, tokens=tokens, dispatch_format=format,
        combine_format=combine_format, capacity=capacity, transport=transport,
        intermediate_size=intermediate or None, expert_format=expert_format,
    )  # fmt: skip
    if compare and layer.transport != "symmetric":
        raise ConfigError("transport", "'symmetric' with --compare (the collective one has one level)", layer.transport)
    chosen = read_constants(constants).assume({
        "floor_us": (latency, "--latency"),
        "nvlink_gb_per_s": (nvlink, "--nvlink"),
        "network_gb_per_s": (net, "--net"),
        "memory_gb_per_s": (memory, "--memory"),
        "hop_us": (hop, "--hop"),
    })  # fmt: skip
    if forward is not None:
        chosen = chosen.forwarding(forward, "--forward")
    result = make_plan(
        layer, parse_ranks(ranks), ranks_per_node=ranks_per_node,
        routing=make_routing(routing, num_experts=experts, topk=topk), constants=chosen,
        experts=read_expert_constants(expert_constants), redundant=redundant,
    )  # fmt: skip
    document = to_document(result)
    write_json(document, out)
    if plot is not None:
        draw(document, plot)
    show(document, lambda console: plan_view(console, document, compare=compare), as_json=json_output)


@plan_app.command()
def check(
    results: ResultsArgument,
    constants: ConstantsOption = None,
    expert_constants: ExpertsOption = None,
    contender: ContenderOption = SYMMETRIC,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Only cases of so many tokens; may be repeated.")
    ] = None,
    within: Annotated[float, typer.Option(min=0, help="Per cent that a prediction may be off.")] = 15.0,
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Hold predictions against measured times.

    The exit status is 1 when one is further off than --within. Results of the layer's benchmark are compared as well:
    the experts, and all of the layer but its routing.
    """
    check_writable(out=out)
    from moelink.tools.cli.plan_view import check_view
    from moelink.tools.plan import experts_fit as layers_fit
    from moelink.tools.plan import fit as fitting
    from moelink.tools.plan.check_layer import compare_layer

    forms = {**fitting.FORMS, LAYER_BENCHMARK: layers_fit.FORMS[LAYER_BENCHMARK]}
    documents = {path: read_result(path, forms) for path in results}
    of_layers = {path: found for path, found in documents.items() if found["benchmark"] == LAYER_BENCHMARK}
    others = {path: found for path, found in documents.items() if path not in of_layers}
    points = fitting.all_points(others, contender=contender) if others else []
    wanted = [point for point in points if not tokens or point.layer.tokens in tokens]
    known, experts = read_constants(constants), read_expert_constants(expert_constants).formats
    layers = [
        compared
        for path, found in of_layers.items()
        for compared in compare_layer(found, printable(path.name), constants=known, experts=experts)
        if not tokens or compared.point.layer.tokens in tokens
    ]
    document = fitting.to_document([*fitting.compare(wanted, known), *layers])
    write_json(document, out)
    show(document, lambda console: check_view(console, document), as_json=json_output)
    error = document["largest_error"]
    if error is None or any(row["error"] is None for row in document["rows"]):
        reason = (
            "no such case in these results"
            if not document["rows"]
            else "constants are missing; give --constants or --expert-constants"
        )
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
    check_writable(out=out)
    from moelink.tools.cli.plan_view import check_view
    from moelink.tools.plan import fit as fitting

    points = fitting.load_points(results, contender=contender)
    document = fitting.fit(points, contender=contender)
    write_json(document, out)
    compared = fitting.to_document(fitting.compare(points, fitting.constants_of(document)))
    show(document, lambda console: check_view(console, compared), as_json=json_output)


@plan_app.command("fit-experts")
def fit_experts_command(
    results: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="JSON files of the benchmarks of experts and of layers."),
    ],
    out: Annotated[Path, typer.Option(help="File of constants to write, for --expert-constants.")],
) -> None:
    """Make constants of the experts' products of measured times."""
    check_writable(out=out)
    from moelink.tools.plan.experts_fit import fit_experts, load_expert_points

    document = fit_experts(load_expert_points(results))
    write_json(document, out)
    formats = ", ".join(document["formats"])
    typer.echo(f"{formats} on {document['machine']}: largest error {100 * document['largest_error']:.1f} %")


def read_constants(path: Path | None) -> Constants:
    """Return the constants of ``path``, or those of the package."""
    from moelink.tools.plan import load_constants, packaged_constants

    return packaged_constants() if path is None else load_constants(path)


def read_expert_constants(path: Path | None) -> MachineExperts:
    """Return the constants of experts of ``path``, or those of the package."""
    from moelink.tools.plan import load_expert_constants, packaged_expert_constants

    return packaged_expert_constants() if path is None else load_expert_constants(path)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a plan; one line and exit status 1 if that fails."""
    from moelink.tools.plots.plan import draw_plan

    with drawing(path):
        draw_plan(document, path)
