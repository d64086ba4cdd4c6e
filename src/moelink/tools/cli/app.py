"""The commands: arguments in, library calls, reports out. Data goes to stdout, progress and errors to stderr."""

import dataclasses
import json
import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from moelink.errors import MoelinkError
from moelink.testing import RankFailedError, RankHungError
from moelink.tools.cli import render
from moelink.tools.cli.bench import bench_app
from moelink.tools.cli.environment import inspect_environment
from moelink.tools.cli.plan import plan_app
from moelink.tools.cli.plot import plot
from moelink.tools.cli.progress import progress_on_stderr
from moelink.tools.demo import FORMATS, DemoConfig, DemoReport, LayerConfig, run_demo
from moelink.tools.demo.data import bundled_text

app = typer.Typer(
    name="moelink",
    help="Expert-parallel dispatch and combine for Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(bench_app, name="bench")
app.add_typer(plan_app, name="plan")
app.command()(plot)

JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


class Transport(str, Enum):
    """Choices of --transport."""

    auto = "auto"
    collective = "collective"
    symmetric = "symmetric"


class Device(str, Enum):
    """Choices of --device."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def to_json(report: Any) -> str:
    """A report, and the properties that its tables show, as JSON text."""
    return json.dumps(report, indent=2)


def demo_document(report: DemoReport) -> dict[str, Any]:
    """The JSON form of a demo report: its fields, plus the verdicts."""
    document = dataclasses.asdict(report)
    for entry, result in zip(document["formats"], report.formats, strict=True):
        entry |= {"tolerance_error": result.tolerance_error, "wire_ratio": result.wire_ratio, "passed": result.passed}
    totals = {"tokens_per_expert": report.tokens_per_expert, "expert_owners": report.expert_owners}
    return {"schema_version": 1, **document, **totals, "passed": report.passed}


@app.command()
def demo(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes, one rank each. Default: torchrun's world size, or 4.")
    ] = None,
    format: Annotated[list[str] | None, typer.Option(help="Dispatch format; may be repeated. Default: all.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text file. Default: Alice's Adventures in Wonderland."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens (bytes of text) per rank.")] = 512,
    transport: Annotated[Transport, typer.Option(help="How bytes travel.")] = Transport.auto,
    device: Annotated[Device, typer.Option(help="Where ranks compute.")] = Device.auto,
    experts: Annotated[int, typer.Option(min=1, help="Experts over all ranks.")] = 32,
    topk: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 8,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 384,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all weights.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Run text through an expert-parallel layer and compare it with the layer in one process.

    Start it as it is (ranks are processes), or with torchrun on one host or several. Exits with 1 when an error exceeds
    what the format and the roundings allow.
    """
    if topk > experts:
        raise typer.BadParameter(f"at most the number of experts ({experts})", param_hint="--topk")
    layer = LayerConfig(num_experts=experts, topk=topk, hidden_size=hidden, seed=seed)
    config = DemoConfig(
        ranks=ranks or int(os.environ.get("WORLD_SIZE", "4")), tokens_per_rank=tokens,
        formats=tuple(format or FORMATS), transport=transport.value,
        device=device.value, layer=layer,
    )  # fmt: skip
    with progress_on_stderr() as progress:
        report = run_demo(config, text.read_bytes() if text else bundled_text(), progress)
    if report is None:  # another rank of the launcher reports
        return
    if json_output:
        typer.echo(to_json(demo_document(report)))
    else:
        console = render.make_console()
        console.print(render.demo_view(console, report))
    if not report.passed:
        failed = ", ".join(result.format for result in report.formats if not result.passed)
        typer.echo(
            f"moelink: the sharded layer differs from the unsharded one by more than allowed: {failed}", err=True
        )
        raise typer.Exit(1)


@app.command()
def env(json_output: JsonOption = False) -> None:
    """Show versions, devices, the transport that would be chosen, and every MOELINK_* variable."""
    report = inspect_environment()
    if json_output:
        typer.echo(to_json({"schema_version": 1, **dataclasses.asdict(report)}))
        return
    console = render.make_console()
    console.print(render.environment_view(console, report))


def run() -> int:
    """Run the command line of this process; errors of moelink and of ranks go to stderr and give exit status 1."""
    try:
        app()
    except (MoelinkError, RankFailedError, RankHungError) as error:
        typer.echo(f"moelink: {error}", err=True)
        return 1
    return 0
