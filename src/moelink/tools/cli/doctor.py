"""``moelink doctor``: an examination as tables, with problems in red, and a line of advice for each."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moelink.tools.cli.console import (
    Device,
    JsonOption,
    OutOption,
    Transport,
    check_writable,
    progress_on_stderr,
    quantity,
    show,
    table,
    write_json,
)
from moelink.tools.doctor import Examination, Problem, diagnose, run_doctor
from moelink.tools.doctor.formats import FORMATS
from moelink.tools.doctor.pairs import link_of

SCHEMA_VERSION = 1
RED = "bold red"


def doctor(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start here. Default: the CUDA devices; 4 on CPUs.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where ranks are; auto: on CUDA devices if there are.")] = Device.auto,
    format: Annotated[list[str] | None, typer.Option(help="Format to try; may be repeated. Default: all.")] = None,
    transport: Annotated[Transport, typer.Option(help="Transport to try formats over.")] = Transport.auto,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which it reports its findings.")] = 60.0,
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Examine the machines of a job before it starts; exit status 1 when something is wrong.

    Run it as the job: under torchrun on all machines, or alone for the devices of this one. It compares versions, tests
    the connections of ranks, measures every pair, and sends tokens through every format and back.
    """
    check_writable(out)
    kind = device.kind
    count = ranks or (torch.cuda.device_count() if kind == "cuda" else 4)
    with progress_on_stderr() as progress:
        progress(f"examining {os.environ.get('WORLD_SIZE', count)} ranks")
        found = run_doctor(
            count, device=kind, formats=tuple(format or FORMATS), transport=transport.value, timeout=timeout
        )
    if found is None:  # another rank of the launcher reports
        return
    problems = diagnose(found)
    document = to_document(found, problems)
    write_json(document, out)
    show(document, lambda console: doctor_view(console, found, problems), as_json=json_output)
    if problems:
        raise typer.Exit(1)


def to_document(found: Examination, problems: list[Problem]) -> dict[str, Any]:
    """Return the JSON form."""
    fields = dataclasses.asdict(found)
    fields["broken"] = [{"ranks": list(pair), "reason": why} for pair, why in (found.broken or {}).items()]
    return {
        "schema_version": SCHEMA_VERSION, "report": "moelink doctor", **fields,
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }  # fmt: skip


def _marked(text: str, where: str, problems: list[Problem]) -> Text:
    """Render ``text``, in red if there is a problem at ``where``."""
    return Text(text, RED if any(problem.where == where for problem in problems) else "")


def ranks_table(console: Console, found: Examination, problems: list[Problem]) -> Table:
    """Render the facts of each rank."""
    grid = table(console, "Ranks")
    for name in ("rank", "host", "device", "memory free", "moelink", "torch", "triton", "python", "NVSHMEM", "network"):
        grid.add_column(name, justify="right" if name in ("rank", "memory free") else "left")
    for rank, facts in enumerate(found.facts):
        label = _marked(str(rank), f"rank {rank}", problems)
        if facts is None:
            grid.add_row(label, *["-"] * 9)
            continue
        versions, device = facts["versions"], facts["device"]
        grid.add_row(
            label, Text(facts["host"]), Text(device["name"]), quantity(int(device["free"])),
            *[Text(versions.get(name) or "-") for name in ("moelink", "torch", "triton", "python")],
            "yes" if facts["nvshmem"] else "no", Text(", ".join(facts["network"]) or "-"),
        )  # fmt: skip
    return grid


def pairs_table(console: Console, found: Examination, problems: list[Problem]) -> Table:
    """Render the measurements of each pair of ranks."""
    grid = table(console, "Pairs")
    for name in ("ranks", "link", "latency, us", "GB/s"):
        grid.add_column(name, justify="left" if name == "link" else "right")
    for pair in found.pairs:
        one, other = found.facts[pair.first], found.facts[pair.second]
        assert one is not None
        assert other is not None
        where = f"ranks {pair.first} and {pair.second}"
        grid.add_row(
            *[
                _marked(text, where, problems)
                for text in (
                    f"{pair.first} - {pair.second}", link_of(one, other), f"{pair.latency_us:.0f}",
                    f"{pair.gb_per_s:.3g}",
                )
            ]
        )  # fmt: skip
    for (first, second), _ in (found.broken or {}).items():
        grid.add_row(Text(f"{first} - {second}", RED), *[Text("-", RED)] * 3)
    return grid


def doctor_view(console: Console, found: Examination, problems: list[Problem]) -> RenderableType:
    """Render the whole examination."""
    parts: list[RenderableType] = [ranks_table(console, found, problems), ""]
    if found.pairs or found.broken:
        parts += [pairs_table(console, found, problems), ""]
    if found.formats:
        names = dict.fromkeys(name for each in found.formats for name in each or {})
        words = [_marked(name, f"format {name}", problems) for name in names]
        parts += [Text("Formats there and back: ").append_text(Text(", ").join(words)), ""]
    if problems:
        parts += [Text(f"{problem.where}: {problem.what}").append(f"\n  {problem.advice}\n") for problem in problems]
    else:
        parts.append(Text("Nothing is wrong.", "green"))
    return Group(*parts)
