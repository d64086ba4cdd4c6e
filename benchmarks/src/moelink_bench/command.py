"""``moelink bench`` and ``moelink bench plot``, and a result as text. Every number comes from the document."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moelink.errors import ConfigError
from moelink.tools.cli.console import (
    check_writable,
    drawing,
    make_console,
    progress_on_stderr,
    quantity,
    table,
    to_json,
    write_json,
)
from moelink.tools.results import LAYER_BENCHMARK, ROLES_BENCHMARK, read_result
from moelink_bench import PRESETS, make_plan, picture, run_bench
from moelink_bench.comparisons import NEEDED, gate_line, summary, table_of
from moelink_bench.document import command_line
from moelink_bench.layer import LAYER_PRESETS, make_layer_plan, run_layer_bench
from moelink_bench.layer import picture as layer_picture
from moelink_bench.layer.plan import SHAPES
from moelink_bench.layer.view import layer_view, refuse_options
from moelink_bench.presets import LAYOUTS, PEERS, DeviceKind
from moelink_bench.published import published_lines
from moelink_bench.roles_preset import ROLE_PRESETS, make_roles_plan, run_roles
from moelink_bench.roles_view import roles_view
from moelink_bench.script import SCRIPTS, main_of
from moelink_bench.sm_shares import share_lines

bench_app = typer.Typer(
    invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

Preset = Enum("Preset", {name: name for name in (*PRESETS, *LAYER_PRESETS, *ROLE_PRESETS)}, type=str)  # type: ignore[misc]
CaseName = Enum("CaseName", {name: name for name in SHAPES}, type=str)  # type: ignore[misc]
CPU_PRESETS = ("smoke", "layer-smoke", "roles-smoke")
PeerChoice = Enum("PeerChoice", {name: name for name in PEERS}, type=str)  # type: ignore[misc]
LayoutName = Enum("LayoutName", {name: name for name in LAYOUTS}, type=str)  # type: ignore[misc]


def default_ranks(device: str) -> int:
    """Return the launcher's world size, else one rank per CUDA device, or two on a CPU."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return torch.cuda.device_count() if device == "cuda" else 2


@bench_app.callback()
def bench(
    context: typer.Context,
    preset: Annotated[Preset, typer.Option(help="What is measured.")] = Preset.decode,  # type: ignore[attr-defined]
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks; of presets of roles simulated on one device. Default: the CUDA devices; 2 for smoke ones.",
        ),
    ] = None,
    case: Annotated[
        list[CaseName] | None,  # type: ignore[valid-type]
        typer.Option(help="Model whose layer is measured, of the layer presets; may be repeated. Default: three."),
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
    num_sms: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="SMs that moelink may use, instead of the preset's; may be repeated. sms keeps its full speed."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples per figure.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of inputs and routing.")] = 0,
    peers: Annotated[bool, typer.Option(help="Measure libraries other than moelink too.")] = True,
    peer: Annotated[
        list[PeerChoice] | None,  # type: ignore[valid-type]
        typer.Option(help="Only this library besides moelink; may be repeated. Default: all that the preset knows."),
    ] = None,
    speed_gate: Annotated[
        bool,
        typer.Option(
            "--speed-gate",
            help="Exit with status 3 unless moelink is faster in both comparisons that count, at every size.",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which the run is given up.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result there (.png or .svg).")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record, where there is no repository.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure dispatch and combine, or the whole layer, against their peers and against the wire.

    Nothing of moelink is timed before its results were found right; when they are not, no figure is shown and the exit
    status is 1. Start it as it is (ranks are processes), or with torchrun.

    Two comparisons count for the speed gate: like for like, that is quantised rows that stay by rank where they arrive,
    against FlashInfer, and the whole operation, that is rows by expert against FlashInfer with a permutation and a sum,
    and against all others.
    """
    if context.invoked_subcommand is not None:
        return
    name = str(preset.value)
    device: DeviceKind = "cpu" if name in CPU_PRESETS else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("preset", f"{' or '.join(CPU_PRESETS)} on a machine without a CUDA device", name)
    arguments = sys.argv[2:] if sys.argv[1:2] == ["bench"] else sys.argv[1:]  # the latter of python -m moelink_bench
    world, command = ranks or default_ranks(device), command_line("moelink bench", arguments)
    libraries = [one for one in PEERS if one in {str(chosen.value) for chosen in peer or ()}]
    if libraries and not peers:
        raise ConfigError("peer", "nothing with --no-peers", ", ".join(libraries))
    if name not in PRESETS:
        refuse_options(name, {"peer": libraries, "speed-gate": speed_gate})
    if name in LAYER_PRESETS:
        fixed = {"format": format, "hidden": hidden, "topk": topk, "experts": experts, "layout": layout}
        refuse_options(name, {**fixed, "num-sms": num_sms})
        layer_plan = make_layer_plan(
            name, ranks=world, device=device, cases=[str(one.value) for one in case or ()], tokens=tokens or (),
            samples=samples, seed=seed, peers=peers, timeout=timeout,
        )  # fmt: skip
        check_writable(out, plot)
        with progress_on_stderr() as progress:
            document = run_layer_bench(layer_plan, commit=commit, command=command, progress=progress)
    elif name in ROLE_PRESETS:
        refuse_options(name, {"case": [str(one.value) for one in case or ()], "num-sms": num_sms, "seed": seed})
        roles_plan = make_roles_plan(
            name, device=device, ranks=ranks, tokens=tokens or (), formats=format or (), rounds=samples, peers=peers,
            timeout=timeout, layout=None if layout is None else layout.value, hidden=hidden, experts=experts, topk=topk,
        )  # fmt: skip
        if plot is not None:
            raise ConfigError("plot", f"nothing with --preset {name}, which is not drawn", str(plot))
        check_writable(out, plot)
        with progress_on_stderr() as progress:
            document = run_roles(roles_plan, commit=commit, command=command, progress=progress)
    else:
        refuse_options(name, {"case": [str(one.value) for one in case or ()]})
        plan = make_plan(
            name, ranks=world, device=device, tokens=tokens or (), formats=format or (), samples=samples, seed=seed,
            peers=(libraries or PEERS) if peers else (), timeout=timeout, hidden_size=hidden, topk=topk,
            num_experts=experts, num_sms=num_sms, layout=None if layout is None else layout.value,
        )  # fmt: skip
        check_writable(out, plot)
        with progress_on_stderr() as progress:
            document = run_bench(plan, commit=commit, command=command, progress=progress)
    if document is not None:
        show(document, out=out, plot=plot, json_output=json_output)
        if speed_gate and document["speed_gate"]["passed"] is not True:
            typer.echo(f"moelink: {gate_line(document)}", err=True)
            raise typer.Exit(3)


def show(document: dict[str, Any], *, out: Path | None, plot: Path | None, json_output: bool) -> None:
    """Print, write and draw a result, in this order, as a picture may fail; or say why there is none, and exit."""
    if not document["gate"]["passed"]:
        typer.echo(f"moelink: the correctness gate failed, no figures: {document['gate']['fault']}", err=True)
        raise typer.Exit(1)
    if json_output:
        typer.echo(to_json(document))
    else:
        console = make_console()
        view = {LAYER_BENCHMARK: layer_view, ROLES_BENCHMARK: roles_view}.get(document["benchmark"], bench_view)
        console.print(view(console, document))
    write_json(document, out)
    if plot is not None:
        draw([document], plot)


@bench_app.command("plot")
def plot_results(
    results: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="JSON files of moelink bench.")],
    out: Annotated[Path, typer.Option(help="Picture to write (.png or .svg).")],
) -> None:
    """Draw results: latency against tokens with the wire's limit, share of the ceiling, scaling over ranks; of the
    layer (one result), the time of each contender by its parts."""
    draw([read_result(path, {**picture.FORMS, **layer_picture.FORMS}) for path in results], out)


def draw(documents: list[dict[str, Any]], path: Path) -> None:
    """Draw documents; one line and exit status 1 where that cannot be done.

    Raises:
        ConfigError: a result of the layer is not alone.
    """
    of_layer = [document["benchmark"] == LAYER_BENCHMARK for document in documents]
    if any(of_layer) and len(documents) > 1:
        raise ConfigError("results", "one result of the layer, or results of other presets", f"{len(documents)} files")
    with drawing(path):
        if any(of_layer):
            layer_picture.draw_layer(documents[0], path)
        else:
            picture.draw_bench(documents, path)


def _script(name: str) -> Callable[[typer.Context], None]:
    """Return the command of a script, which reads its arguments by itself."""

    def start(context: typer.Context) -> None:
        raise typer.Exit(main_of(name)(context.args))

    return start


OWN_OPTIONS: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
for _name, _text in SCRIPTS.items():
    bench_app.command(_name, help=_text, context_settings=OWN_OPTIONS)(_script(_name))


PHASES = ("dispatch", "combine", "both")
METHODS = ("graph", "pairs", "eager", "kernel")


def cell(figure: dict[str, Any] | None) -> str:
    """Render ``12.3 (12.1-12.9)``: median, 20th and 80th percentile; a dash without a figure."""
    return "-" if figure is None else f"{figure['median']:.1f} ({figure['p20']:.1f}-{figure['p80']:.1f})"


def method_rows(row: dict[str, Any]) -> list[tuple[str, list[str], str, str]]:
    """Return (method, cells by phase, skew, shares) for every method that the row has.

    Shares of the ceiling stand with the first method that has figures of phases alone: they are made of those.
    """
    shares = [row["phases"].get(phase, {}).get("share_of_ceiling") for phase in PHASES[:2]]
    share = " / ".join("-" if value is None else f"{100 * value:.0f} %" for value in shares)
    rows = []
    for method in METHODS:
        figures = [row["phases"].get(phase, {}).get(method) for phase in PHASES]
        if any(figures):
            skew = figures[-1] or next(figure for figure in figures if figure)
            alone = any(figures[:2])
            rows.append((method, [cell(figure) for figure in figures], f"{skew['skew']:.1f}", share if alone else ""))
            share = "" if alone else share
    return rows


def case_table(console: Console, document: dict[str, Any], index: int) -> Table:
    """Render all contenders of one case."""
    entry = document["cases"][index]
    wire = " + ".join(quantity(round(entry[phase]["busiest"])) for phase in PHASES[:2])
    grid = table(console, f"{entry['label']}   (busiest link {wire}, {entry['copies']} inputs)")
    for name in ("contender", "by", "dispatch us", "combine us", "both us", "skew", "share of ceiling"):
        grid.add_column(
            name,
            justify="left" if name in ("contender", "by") else "right",
            overflow="fold",
            no_wrap=name == "contender",
        )
    for row in document["rows"]:
        if row["case"] != index:
            continue
        if row["reason"]:
            grid.add_row(row["contender"], "-", "not run")
            continue
        for line, (method, cells, skew, share) in enumerate(method_rows(row)):
            grid.add_row(row["contender"] if not line else "", method, *cells, skew, share)
    return grid


def notes(document: dict[str, Any]) -> Text:
    """Render what the numbers mean, and what contenders leave out."""
    lines = [document["method"], f"bytes: {document['bytes_formula']}"]
    left_out = dict.fromkeys((row["contender"], row["leaves_out"]) for row in document["rows"] if row["leaves_out"])
    lines += [f"{name} leaves out: {text}" for name, text in left_out]
    said = {
        (row["contender"], result["note"])
        for row in document["rows"]
        for result in row["phases"].values()
        if result["note"]
    }
    lines += [f"{name}: {note}" for name, note in sorted(said)]
    absent = {(row["contender"], row["reason"]) for row in document["rows"] if row["reason"]}
    lines += [f"{name} did not run: {reason}" for name, reason in sorted(absent)]
    return Text("\n".join(lines), "dim")


def verdict_lines(document: dict[str, Any]) -> Text:
    """Render one line per verdict."""
    text = Text()
    for verdict in document["verdicts"]:
        failed = verdict["faster"] is False or verdict["within_wire"] is False
        text.append(f"{verdict['text']}\n", "bold red" if failed else "")
    text.append(f"rule: {document['rule']}", "dim")
    return text


def grid_of(console: Console, title: str, heads: list[str], lines: list[list[str]]) -> Table:
    """Render lines as a table whose first column is text."""
    grid = table(console, title)
    for index, head in enumerate(heads):
        grid.add_column(head, justify="right" if index else "left", overflow="fold")
    for line in lines:
        grid.add_row(*line)
    return grid


def comparison_parts(console: Console, document: dict[str, Any]) -> list[RenderableType]:
    """Render the comparisons with FlashInfer, what the speed gate says, published figures, and shares of the speed."""
    if "speed_gate" not in document:  # older results have no comparisons
        return []
    heads, lines = table_of(document)
    parts: list[RenderableType] = []
    count = [index for index, head in enumerate(heads) if head in NEEDED]
    alone = [index for index in range(1, len(heads)) if index not in count]
    for title, columns in (("comparisons that count", count), ("comparisons that do not count", alone)):
        chosen = [[line[index] for index in (0, *columns)] for line in lines if any(line[i] != "–" for i in columns)]
        if chosen:
            parts += [grid_of(console, title, [heads[index] for index in (0, *columns)], chosen), ""]
    text = Text()
    for comparison in document["speed_gate"]["comparisons"]:
        text.append(f"{summary(comparison)}\n", "bold red" if comparison["passed"] is False else "")
    text.append(gate_line(document), "bold")
    parts += [text, ""]
    if document["published"]:
        parts += [Text("\n".join(published_lines(document["published"])), "dim"), ""]
    heads, lines = share_lines(document)
    if lines:
        parts += [grid_of(console, "share of the full speed", heads, lines), Text(document["sm_share_rule"], "dim"), ""]
    return parts


def head(document: dict[str, Any]) -> str:
    """Render machine, versions, ceiling and gate."""
    versions = document["versions"]
    ceiling = document["ceiling"]
    speed = f"{ceiling['gb_per_s']:.1f} GB/s out of each rank" if ceiling["gb_per_s"] else f"none: {ceiling['reason']}"
    commit = "no commit known" if not document["commit"] else f"commit {document['commit'][:12]}"
    return (
        f"{document['preset']}: {document['ranks']} ranks on {document['devices'][0]}, torch {versions['torch']}, "
        f"triton {versions['triton']}, {commit}{' with changes' if document['dirty'] else ''}, {document['date']}\n"
        f"correctness gate passed in {len(document['gate']['checked'])} cases\n"
        f"ceiling: {speed} ({ceiling['method']})"
    )


def bench_view(console: Console, document: dict[str, Any]) -> RenderableType:
    """Render the whole report of a run whose gate passed."""
    parts: list[RenderableType] = [head(document), ""]
    for index in range(len(document["cases"])):
        parts += [case_table(console, document, index), ""]
    return Group(*parts, *comparison_parts(console, document), notes(document), "", verdict_lines(document))
