"""``moelink bench``, ``moelink bench plot``, and the scripts as subcommands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from moelink.errors import ConfigError
from moelink.tools.cli.console import (
    check_writable,
    drawing,
    format_option,
    make_console,
    place_of,
    progress_on_stderr,
    to_json,
    write_json,
)
from moelink.tools.results import LAYER_BENCHMARK, read_result
from moelink_bench.names import (
    CPU_PRESETS,
    PEERS,
    SCRIPTS,
    CaseName,
    DeviceKind,
    LayerPresetName,
    PeerName,
    PresetName,
    RolePresetName,
)

bench_app = typer.Typer(
    invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

# A list of options takes no Literal.
CaseChoice = Enum("CaseChoice", {name: name for name in get_args(CaseName)}, type=str)  # type: ignore[misc]
PeerChoice = Enum("PeerChoice", {name: name for name in get_args(PeerName)}, type=str)  # type: ignore[misc]


def refuse_options(preset: str, given: Mapping[str, object]) -> None:
    """Raise ConfigError for an option that has a value and means nothing to ``preset``."""
    for name, value in given.items():
        if value:
            raise ConfigError(name, f"nothing with --preset {preset}, which does not use it", value)


@bench_app.callback()
def bench(
    context: typer.Context,
    preset: Annotated[
        Literal[PresetName, LayerPresetName, RolePresetName], typer.Option(help="Name of the measurement.")
    ] = "decode",
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks; of presets of roles simulated on one device. Default: the CUDA devices; 2 for smoke ones.",
        ),
    ] = None,
    case: Annotated[
        list[CaseChoice] | None,  # type: ignore[valid-type]
        typer.Option(help="Model whose layer is measured, of the layer presets; may be repeated. Default: three."),
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens per rank instead of the preset's; may be repeated.")
    ] = None,
    format: Annotated[
        list[str] | None, format_option("Dispatch format instead of the preset's; may be repeated.")
    ] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts per token.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts over all ranks.")] = None,
    layout: Annotated[
        Literal["expert", "rank"] | None, typer.Option(help="Layout of received rows instead of the preset's.")
    ] = None,
    num_sms: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="SMs that moelink may use, instead of the preset's; may be repeated. sms and roles keep full speed.",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples per figure.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of inputs and routing.")] = 0,
    peers: Annotated[bool, typer.Option(help="Measure libraries other than moelink too.")] = True,
    peer: Annotated[
        list[PeerChoice] | None,  # type: ignore[valid-type]
        typer.Option(help="Only this library besides moelink; may be repeated. Default: all that the preset knows."),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="Only this way to compute the layer, by its name in tables; may be repeated. Default: all."),
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
    """Measure calls or a whole layer against peers and the wire.

    Nothing of moelink is timed before its results were found right; when they are not, no figure is shown and the exit
    status is 1. Start it as it is (ranks are processes), or with torchrun.

    Two comparisons count for the speed gate: like for like, that is quantised rows that stay by rank where they arrive,
    against FlashInfer, and the whole operation, that is rows by expert against FlashInfer with a permutation and a sum,
    and against all others.
    """
    if context.invoked_subcommand is not None:
        return
    name: Any = preset
    libraries = [one for one in PEERS if one in {str(chosen.value) for chosen in peer or ()}]
    if libraries and not peers:
        raise ConfigError("peer", "nothing with --no-peers", ", ".join(libraries))
    if name not in get_args(PresetName):
        refuse_options(name, {"peer": libraries, "speed-gate": speed_gate})
    if name in get_args(LayerPresetName):
        fixed = {"format": format, "hidden": hidden, "topk": topk, "layout": layout}
        refuse_options(name, {**fixed, "num-sms": num_sms})
    else:
        refuse_options(name, {"case": [str(one.value) for one in case or ()], "contender": contender})
    if name in get_args(RolePresetName):
        refuse_options(name, {"seed": seed, "plot": plot and str(plot)})
    check_writable(out=out, plot=plot)
    import torch

    from moelink_bench.document import command_line

    device: DeviceKind = "cpu" if name in CPU_PRESETS else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("preset", f"{' or '.join(CPU_PRESETS)} on a machine without a CUDA device", name)
    arguments = sys.argv[2:] if sys.argv[1:2] == ["bench"] else sys.argv[1:]  # the latter of python -m moelink_bench
    command = command_line("moelink bench", arguments)
    run: Callable[..., dict[str, Any] | None]
    plan: Any
    if name in get_args(LayerPresetName):
        from moelink_bench.layer import make_layer_plan, run_layer_bench

        world = place_of(device, ranks, on_cpus=2)[1]
        run, plan = run_layer_bench, make_layer_plan(
            name, ranks=world, device=device, cases=[str(one.value) for one in case or ()], tokens=tokens or (),
            experts=experts, samples=samples, seed=seed, contenders=contender or None, peers=peers, timeout=timeout,
        )  # fmt: skip
    elif name in get_args(RolePresetName):
        from moelink_bench.roles_preset import make_roles_plan, run_roles

        run, plan = run_roles, make_roles_plan(
            name, device=device, ranks=ranks, tokens=tokens or (), formats=format or (), rounds=samples, peers=peers,
            timeout=timeout, layout=layout, num_sms=num_sms or (), hidden=hidden, experts=experts, topk=topk,
        )  # fmt: skip
    else:
        from moelink_bench.presets import make_plan
        from moelink_bench.run import run_bench

        world = place_of(device, ranks, on_cpus=2)[1]
        run, plan = run_bench, make_plan(
            name, ranks=world, device=device, tokens=tokens or (), formats=format or (), samples=samples, seed=seed,
            peers=(libraries or PEERS) if peers else (), timeout=timeout, hidden_size=hidden, topk=topk,
            num_experts=experts, num_sms=num_sms, layout=layout,
        )  # fmt: skip
    with progress_on_stderr() as progress:
        noting = {} if name in get_args(RolePresetName) else {"note": lambda so_far: write_json(so_far, out)}
        document = run(plan, commit=commit, command=command, progress=progress, **noting)
    if document is not None:
        show(document, out=out, plot=plot, json_output=json_output)
        if speed_gate and document["speed_gate"]["passed"] is not True:
            from moelink_bench.comparisons import gate_line

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
        from moelink_bench.view import view

        console = make_console()
        console.print(view(console, document))
    write_json(document, out)
    if plot is not None:
        draw([document], plot)


@bench_app.command("plot")
def plot_results(
    results: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="JSON files of moelink bench.")],
    out: Annotated[Path, typer.Option(help="Picture to write (.png or .svg).")],
) -> None:
    """Draw results of bench as a picture.

    That is latency against tokens with the wire's limit, share of the ceiling, and scaling over ranks; of the layer
    (one result), the time of each contender by its parts.
    """
    check_writable(picture=out)
    from moelink_bench import picture
    from moelink_bench.layer import picture as layer_picture

    draw([read_result(path, {**picture.FORMS, **layer_picture.FORMS}) for path in results], out)


def draw(documents: list[dict[str, Any]], path: Path) -> None:
    """Draw documents; one line and exit status 1 where that cannot be done.

    Raises:
        ConfigError: a result of the layer is not alone.
    """
    from moelink_bench import picture
    from moelink_bench.layer import picture as layer_picture

    of_layer = [document["benchmark"] == LAYER_BENCHMARK for document in documents]
    if any(of_layer) and len(documents) > 1:
        raise ConfigError("results", "one result of the layer, or results of other presets", f"{len(documents)} files")
    with drawing(path):
        if any(of_layer):
            layer_picture.draw_layer(documents[0], path)
        else:
            picture.draw_bench(documents, path)


def _script(name: str) -> Callable[[typer.Context], None]:
    """Return the command of a script, which reads its arguments by itself, in a process of its own.

    Some choose Triton's interpreter before anything imports Triton, which this process has done.
    """

    def start(context: typer.Context) -> None:
        if {"-h", "--help"} & {*context.args}:
            from moelink_bench.script import main_of

            raise typer.Exit(main_of(name)(context.args))
        raise typer.Exit(subprocess.call([sys.executable, "-m", f"moelink_bench.{name}", *context.args]))

    return start


OWN_OPTIONS: dict[str, Any] = {
    "allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": [],
    "allow_interspersed_args": False,  # else the parser drops "--", which ends a list of sweep
}  # fmt: skip
for _name, _text in SCRIPTS.items():
    bench_app.command(_name, help=_text, context_settings=OWN_OPTIONS)(_script(_name))
