"""``moelink trace``: a pair of dispatch and combine, CTA by CTA."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from moelink.tools.cli.console import Device, check_writable, drawing, progress_on_stderr
from moelink.tools.trace import TraceConfig, run_trace
from moelink.tracing.trace import write


def trace(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes, one rank each. Default: the CUDA devices; 2 on CPUs.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where ranks are; auto: on CUDA devices if there are.")] = Device.auto,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per rank. Default: 128; 8 on CPUs.")] = None,
    pairs: Annotated[int, typer.Option(min=1, max=16, help="Pairs of dispatch and combine.")] = 8,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts over all ranks. Default: 256; 8 on CPUs.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts per token. Default: 8; 2 on CPUs.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size. Default: 7168; 256 on CPUs.")] = None,
    format: Annotated[str, typer.Option(help="Dispatch format.")] = "bf16",
    graph: Annotated[bool, typer.Option(help="On CUDA: replay a CUDA graph of the pair.")] = True,
    out: Annotated[Path | None, typer.Option(help="Write the trace there, as JSON for ui.perfetto.dev.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the last pair there (.png or .svg).")] = None,
) -> None:
    """Trace when each CTA reads, waits, stores and publishes in dispatch and combine.

    Prints median and worst of each moment, and the slowest peers. Start it as it is (ranks are processes of this
    machine), or with torchrun on one host. On CPUs stamps are steps, not times: the number of a stamp among all.
    """
    check_writable(out, plot)
    kind = device.kind
    on_gpu = kind == "cuda"
    count = ranks or int(os.environ.get("WORLD_SIZE", torch.cuda.device_count() if on_gpu else 2))
    config = TraceConfig(
        ranks=count, device=kind, tokens=tokens or (128 if on_gpu else 8), pairs=pairs,
        experts=experts or (256 if on_gpu else 8), topk=topk or (8 if on_gpu else 2),
        hidden=hidden or (7168 if on_gpu else 256), format=format, graph=graph,
    )  # fmt: skip
    with progress_on_stderr() as progress:
        progress(f"tracing {pairs} pairs on {count} ranks")
        found = run_trace(config)
    if found is None:  # another rank of the launcher reports
        return
    if out is not None:
        write(found.document, out)
    if plot is not None:
        from moelink.tools.trace.timeline import draw_trace

        with drawing(plot):
            draw_trace(found.document, plot)
    typer.echo(found.table)
