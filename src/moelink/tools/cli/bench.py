"""``moelink bench`` and ``moelink bench plot``."""

import json
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from moelink.errors import ConfigError
from moelink.tools.bench import PRESETS, make_plan, run_bench
from moelink.tools.bench.presets import LAYOUTS, DeviceKind
from moelink.tools.bench.provenance import command_line
from moelink.tools.cli import render
from moelink.tools.cli.bench_view import bench_view
from moelink.tools.cli.files import check_writable, drawing, write_json
from moelink.tools.cli.progress import progress_on_stderr
from moelink.tools.plan.measured import read_result

bench_app = typer.Typer(
    invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

Preset = Enum("Preset", {name: name for name in PRESETS}, type=str)  # type: ignore[misc]
LayoutName = Enum("LayoutName", {name: name for name in LAYOUTS}, type=str)  # type: ignore[misc]


def default_ranks(device: str) -> int:
    """A launcher's world size; else one rank a CUDA device, or two on a CPU."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return torch.cuda.device_count() if device == "cuda" else 2


@bench_app.callback()
def bench(
    context: typer.Context,
    preset: Annotated[Preset, typer.Option(help="What is measured.")] = Preset.decode,  # type: ignore[attr-defined]
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks. Default: the CUDA devices; 2 for smoke, which runs on CPUs.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens per rank instead of the preset's; may be repeated.")
    ] = None,
    format: Annotated[
        list[str] | None, typer.Option(help="Dispatch format instead of the preset's; may be repeated.")
    ] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts per token.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts over all ranks.")] = None,
    layout: Annotated[LayoutName | None, typer.Option(help="Layout of received rows instead of the preset's.")] = None,
    num_sms: Annotated[int | None, typer.Option(min=1, help="Multiprocessors that moelink may use.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples per figure.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of inputs and routing.")] = 0,
    peers: Annotated[bool, typer.Option(help="Measure libraries other than moelink too.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which the run is given up.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result there (.png or .svg).")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record, where there is no repository.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure dispatch and combine against their peers and against the wire.

    Nothing is timed before moelink's transports have returned the right bits; when they do not, no figure is shown and
    the exit status is 1. Start it as it is (ranks are processes), or with torchrun.
    """
    if context.invoked_subcommand is not None:
        return
    name = str(preset.value)
    device: DeviceKind = "cpu" if name == "smoke" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("preset", "smoke on a machine without a CUDA device", name)
    plan = make_plan(
        name, ranks=ranks or default_ranks(device), device=device, tokens=tokens or (), formats=format or (),
        samples=samples, seed=seed, peers=peers, timeout=timeout, hidden_size=hidden, topk=topk, num_experts=experts,
        num_sms=num_sms, layout=None if layout is None else layout.value,
    )  # fmt: skip
    check_writable(out, plot)
    with progress_on_stderr() as progress:
        document = run_bench(plan, commit=commit, command=command_line("moelink", sys.argv[1:]), progress=progress)
    if document is not None:
        show(document, out=out, plot=plot, json_output=json_output)


def show(document: dict[str, Any], *, out: Path | None, plot: Path | None, json_output: bool) -> None:
    """Print, write and draw a result, in this order, as a picture may fail; or say why there is none, and exit."""
    if not document["gate"]["passed"]:
        typer.echo(f"moelink: the correctness gate failed, no figures: {document['gate']['fault']}", err=True)
        raise typer.Exit(1)
    if json_output:
        typer.echo(json.dumps(document, indent=2))
    else:
        console = render.make_console()
        console.print(bench_view(console, document))
    write_json(document, out)
    if plot is not None:
        draw([document], plot)


@bench_app.command("plot")
def plot_results(
    results: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="JSON files of moelink bench.")],
    out: Annotated[Path, typer.Option(help="Picture to write (.png or .svg).")],
) -> None:
    """Draw results: latency against tokens with the wire's limit, share of the ceiling, scaling over ranks."""
    draw([read_result(path) for path in results], out)


def draw(documents: list[dict[str, Any]], path: Path) -> None:
    """Draw documents; one line and exit status 1 where that cannot be done."""
    from moelink.tools.bench.plots import draw_bench

    with drawing(path):
        draw_bench(documents, path)
