"""Define the commands: parse arguments, call the library, print reports.

Data goes to stdout, progress and errors to stderr. Files of commands import torch, and all that needs it, inside of
functions, so that help, versions, completion and refused arguments take a fraction of a second.

Exit status 0: done; 1: a problem was found, or a rank or the machine failed; 2: refused arguments, before ranks start.
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

import moelink
from moelink.errors import ArgumentError, ConfigError, MoelinkError, UnsupportedError
from moelink.tools.cli.console import (
    DeviceOption,
    JsonOption,
    TransportOption,
    bar,
    check_topk,
    check_writable,
    drawing,
    format_option,
    place_of,
    progress_on_stderr,
    quantity,
    show,
    table,
)
from moelink.tools.cli.doctor import doctor
from moelink.tools.cli.environment import env
from moelink.tools.cli.plan import plan_app
from moelink.tools.cli.trace import trace

if TYPE_CHECKING:
    from moelink.tools.demo import DemoReport

app = typer.Typer(
    name="moelink",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moelink {moelink.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Expert-parallel dispatch and combine for Mixture-of-Experts models."""


COMMANDS = "moelink.commands"
"""Group of the entry points by which other distributions bring commands: each is a ``typer.Typer``, by its name."""
_brought = {point.name: point for point in entry_points(group=COMMANDS)}
for _name, _point in _brought.items():
    app.add_typer(_point.load(), name=_name)
if "bench" not in _brought:

    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def bench() -> None:
        """Measure calls and layers (of the distribution moelink-bench)."""
        raise UnsupportedError(
            "bench: expected the distribution moelink-bench, got none; run pip install ./benchmarks in a clone"
        )


app.add_typer(plan_app, name="plan")
app.command()(env)
app.command()(doctor)
app.command()(trace)


def demo_document(report: DemoReport) -> dict[str, Any]:
    """Return the JSON form of a demo report: its fields and the verdicts."""
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
    format: Annotated[list[str] | None, format_option("Dispatch format; may be repeated. Default: seven.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text file. Default: Alice's Adventures in Wonderland."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens (bytes of text) per rank.")] = 512,
    transport: TransportOption = "auto",
    device: DeviceOption = "auto",
    experts: Annotated[int, typer.Option(min=1, help="Experts over all ranks.")] = 32,
    topk: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 8,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 384,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all weights.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Run text through a layer on several ranks and check the result.

    The result is compared with that of the layer in one process. Start it as it is (ranks are processes), or with
    torchrun on one host or several. Exits with 1 if an error exceeds the tolerance of the format and the roundings.
    """
    check_topk(topk, experts)
    from moelink.tools.demo import FORMATS, DemoConfig, LayerConfig, bundled_text, run_demo

    layer = LayerConfig(num_experts=experts, topk=topk, hidden_size=hidden, seed=seed)
    config = DemoConfig(
        ranks=place_of("cpu", ranks, on_cpus=4)[1], tokens_per_rank=tokens, formats=tuple(format or FORMATS),
        transport=transport, device=device, layer=layer,
    )  # fmt: skip
    with progress_on_stderr() as progress:
        report = run_demo(config, text.read_bytes() if text else bundled_text(), progress)
    if report is None:  # another rank of the launcher reports
        return
    show(demo_document(report), lambda console: demo_view(console, report), as_json=json_output)
    if not report.passed:
        failed = ", ".join(result.format for result in report.formats if not result.passed)
        typer.echo(
            f"moelink: the sharded layer differs from the unsharded one by more than allowed: {failed}", err=True
        )
        raise typer.Exit(1)


def experts_table(console: Console, report: DemoReport) -> Table:
    """Render tokens per expert as bars, with the rank that owns each expert."""
    counts = report.tokens_per_expert
    grid = table(console, f"Tokens per expert ({report.num_tokens} bytes of text, top-{report.config.layer.topk})")
    grid.add_column("rank", justify="right")
    grid.add_column("expert", justify="right")
    grid.add_column("tokens", justify="right")
    grid.add_column("", style="cyan")
    owners = report.expert_owners
    for expert, count in enumerate(counts):
        first = expert == 0 or owners[expert] != owners[expert - 1]
        grid.add_row(str(owners[expert]) if first else "", str(expert), str(count), bar(console, count, max(counts)))
    return grid


def formats_table(console: Console, report: DemoReport) -> Table:
    """Render bytes and errors of every format."""
    grid = table(console, f"Formats ({report.config.ranks} ranks, {report.formats[0].transport} transport)")
    for name in ("format", "dispatch", "combine", "one copy per expert", "ratio", "rounding", "precision", ""):
        grid.add_column(name, justify="left" if name in ("format", "") else "right")
    for result in report.formats:
        copies = result.copies_dispatch_bytes + result.copies_combine_bytes
        verdict = Text("ok", "green") if result.passed else Text("FAILED", "bold red")
        grid.add_row(
            result.format, quantity(result.dispatch_bytes), quantity(result.combine_bytes), quantity(copies),
            f"{result.wire_ratio:.2f}", f"{result.rounding_error:.2g}", f"{result.tolerance_error:.2g}", verdict,
        )  # fmt: skip
    return grid


DEMO_LEGEND = """\
dispatch, combine     bytes that left the ranks, as counted by the transport (ids and weights included)
one copy per expert   the same rows sent once per (token, expert) instead of once per (token, rank); ratio = ours / that
rounding              largest difference from the layer in one process with the same quantised input, in units of the
                      bound of combine's three roundings (at most 1)
precision             difference from the layer in one process in full precision, in units of the format's tolerance
                      (at most 1)"""


def demo_view(console: Console, report: DemoReport) -> RenderableType:
    """Render the whole report."""
    pairs, messages = report.remote_copies, report.remote_messages
    summary = f"{pairs} (token, expert) pairs cross ranks; moelink sends {messages} messages, one per (token, rank)."
    return Group(
        experts_table(console, report), "", summary, "", formats_table(console, report), "", Text(DEMO_LEGEND, "dim")
    )


@app.command()
def plot(
    reports: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="JSON of moelink.nn.save_load, one file a rank.")
    ],
    out: Annotated[Path, typer.Option(help="Picture to write (.png or .svg).")],
    along: Annotated[
        Literal["steps", "layers"] | None,
        typer.Option(help="Columns of the heat map. Default: steps when there is one layer to show."),
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Show this layer only.")] = None,
) -> None:
    """Draw the routes of tokens, and the load of each rank.

    Routes are a heat map of experts over steps or layers. Give the files of all ranks of a run to see all tokens; of
    some, to see theirs.
    """
    check_writable(picture=out)
    from moelink.tools.plots.maps import draw_load, load_layers

    layers = load_layers(reports)
    with drawing(out):
        draw_load(layers, out, along=along, layer=layer)


def run(command: typer.Typer = app) -> int:
    """Run the command line of this process. An error of moelink is a line on stderr, a rank's also its traceback.

    Returns:
        the exit status: 2 for settings and arguments that moelink refuses, as for those that typer does; 1 for all
        other errors.
    """
    try:
        command()
    except SystemExit:  # before the last clause, which imports torch
        raise
    except MoelinkError as error:
        typer.echo(f"moelink: {error}", err=True)
        return 2 if isinstance(error, (ConfigError, ArgumentError)) else 1
    except _errors_of_ranks() as error:
        typer.echo(f"moelink: {error}", err=True)
        return 1
    return 0


def _errors_of_ranks() -> tuple[type[Exception], ...]:
    from moelink.testing import RankFailedError, RankHungError

    return RankFailedError, RankHungError
