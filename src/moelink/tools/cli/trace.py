"""``moelink trace``: a pair of dispatch and combine, CTA by CTA."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moelink.tools.cli.console import (
    DeviceOption,
    JsonOption,
    check_topk,
    check_writable,
    drawing,
    format_option,
    place_of,
    progress_on_stderr,
)


def trace(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes, one rank each. Default: the CUDA devices; 2 on CPUs.")
    ] = None,
    device: DeviceOption = "auto",
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per rank. Default: 128; 8 on CPUs.")] = None,
    pairs: Annotated[int, typer.Option(min=1, max=16, help="Pairs of dispatch and combine.")] = 8,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts over all ranks. Default: 256; 8 on CPUs.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts per token. Default: 8; 2 on CPUs.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size. Default: 7168; 256 on CPUs.")] = None,
    format: Annotated[str, format_option("Dispatch format.")] = "bf16",
    graph: Annotated[
        bool | None, typer.Option(help="Replay a CUDA graph of the pair. Default: on CUDA devices.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the trace there, as JSON for ui.perfetto.dev.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the last pair there (.png or .svg).")] = None,
    json_output: JsonOption = False,
) -> None:
    """Trace when CTAs of dispatch and combine read, wait and store.

    Prints median and worst of each moment, and the slowest peers; with --json the trace, as --out writes it, and in it
    the same figures as "summary". Start it as it is (ranks are processes of this machine), or with torchrun on one
    host. On CPUs stamps are steps, not times: the number of a stamp among all.
    """
    check_writable(out=out, plot=plot)
    kind, count = place_of(device, ranks, on_cpus=2)
    on_gpu = kind == "cuda"
    if graph and not on_gpu:
        raise typer.BadParameter("expected ranks on CUDA devices, got ranks on CPUs", param_hint="--graph")
    experts, topk = experts or (256 if on_gpu else 8), topk or (8 if on_gpu else 2)
    check_topk(topk, experts)
    from moelink.tools.trace import TraceConfig, run_trace
    from moelink.tracing.trace import to_text, write

    config = TraceConfig(
        ranks=count, device=kind, tokens=tokens or (128 if on_gpu else 8), pairs=pairs, experts=experts, topk=topk,
        hidden=hidden or (7168 if on_gpu else 256), format=format, graph=on_gpu and graph is not False,
    )  # fmt: skip
    with progress_on_stderr() as progress:
        found = run_trace(config, progress)
    if found is None:  # another rank of the launcher reports
        return
    if out is not None:
        write(found.document, out)
    if plot is not None:
        from moelink.tools.trace.timeline import draw_trace

        with drawing(plot):
            draw_trace(found.document, plot)
    typer.echo(to_text(found.document) if json_output else found.table)
