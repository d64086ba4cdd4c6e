"""``moelink doctor``: an examination as tables, with problems in red, and a line of advice for each."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moelink.tools.cli.console import (
    DeviceOption,
    JsonOption,
    OutOption,
    TransportOption,
    check_writable,
    format_option,
    place_of,
    progress_on_stderr,
    quantity,
    show,
    table,
    write_json,
)

if TYPE_CHECKING:
    from moelink.tools.doctor import Examination, Problem
    from moelink.tools.doctor.pairs import Pair

SCHEMA_VERSION = 1
RED = "bold red"


def doctor(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start here. Default: the CUDA devices; 4 on CPUs.")
    ] = None,
    device: DeviceOption = "auto",
    format: Annotated[list[str] | None, format_option("Format to try; may be repeated. Default: six.")] = None,
    transport: TransportOption = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which it reports its findings.")] = 60.0,
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Examine the machines of a job before it starts.

    The exit status is 1 if something is wrong. Run it as the job: under torchrun on all machines, or alone for the
    devices of this one. It compares versions, tests the connections of ranks, measures every pair, and sends tokens
    through every format and back. It measures a pair that looks slow twice more before it reports the pair.
    """
    check_writable(out=out)
    kind, count = place_of(device, ranks, on_cpus=4)
    from moelink.tools.doctor import diagnose, run_doctor
    from moelink.tools.doctor.formats import FORMATS

    with progress_on_stderr() as progress:
        progress(f"examining {count} ranks")
        found = run_doctor(
            count, device=kind, formats=tuple(format or FORMATS), transport=transport, timeout=timeout,
            progress=progress,
        )  # fmt: skip
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


MOST_BLOCKS, CELL = 16, 7
"""Most rows of the matrix of pairs, and the columns of the terminal that a cell takes."""


def pairs_table(console: Console, found: Examination, problems: list[Problem]) -> RenderableType:
    """Render the measurements of all pairs as a matrix of ranks: rates above the diagonal, latencies below it.

    If the ranks are too many for the terminal, a row and a column are a block of consecutive ranks, and a cell has the
    lowest rate or the highest latency of its pairs.
    """
    ranks = len(found.facts)
    size = -(-ranks // max(2, min(MOST_BLOCKS, (console.width - 10) // CELL)))
    names = [str(begin) if size == 1 else f"{begin}-{min(begin + size, ranks) - 1}" for begin in range(0, ranks, size)]
    rates: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    latencies: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for pair in found.pairs:
        rates[pair.first // size, pair.second // size].append(pair.gb_per_s)
        latencies[pair.second // size, pair.first // size].append(pair.latency_us)
    named = {problem.where for problem in problems}
    wrong = {
        cell
        for first, second in itertools.combinations(range(ranks), 2)
        if f"ranks {first} and {second}" in named
        for cell in ((first // size, second // size), (second // size, first // size))
    }
    grid = table(console, "Pairs")
    grid.add_column("", justify="right")
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    for row, name in enumerate(names):
        cells = []
        for column in range(len(names)):
            # Inside a block are pairs of both kinds; the diagonal shows their rates.
            worst = [f"{min(rates[row, column]):.3g}"] if rates[row, column] else []
            if row > column and latencies[row, column]:
                worst = [f"{max(latencies[row, column]):.0f}"]
            cells.append(Text("".join(worst) or "-", RED if (row, column) in wrong else ""))
        grid.add_row(name, *cells)
    # A title is wrapped at the width of its table.
    legend = "GB/s above the diagonal, latency in us below it" + "; worst of a block" * (size > 1)
    return Group(grid, Text(legend, "dim"))


def links_text(found: Examination) -> Text:
    """Render the rates and latencies of each kind of link, and the number of pairs that were measured again."""
    from moelink.tools.doctor.pairs import link_of

    by_link: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair in found.pairs:
        one, other = found.facts[pair.first], found.facts[pair.second]
        assert one is not None
        assert other is not None
        by_link[link_of(one, other)].append(pair)
    lines = []
    for link, pairs in by_link.items():
        rates, latencies = [each.gb_per_s for each in pairs], [each.latency_us for each in pairs]
        again = sum(each.samples > 1 for each in pairs)
        lines.append(
            f"{link}: {len(pairs)} pair{'s' * (len(pairs) > 1)}, {min(rates):.3g} to {max(rates):.3g} GB/s (median "
            f"{statistics.median(rates):.3g}), {min(latencies):.0f} to {max(latencies):.0f} us (median "
            f"{statistics.median(latencies):.0f})" + f"; measured again because they looked slow: {again}" * (again > 0)
        )
    return Text("\n".join(lines))


def doctor_view(console: Console, found: Examination, problems: list[Problem]) -> RenderableType:
    """Render the whole examination."""
    parts: list[RenderableType] = [ranks_table(console, found, problems), ""]
    if found.pairs or found.broken:
        parts += [pairs_table(console, found, problems), links_text(found), ""]
    if found.formats:
        names = dict.fromkeys(name for each in found.formats for name in each or {})
        words = [_marked(name, f"format {name}", problems) for name in names]
        parts += [Text("Formats there and back: ").append_text(Text(", ").join(words)), ""]
    if problems:
        parts += [Text(f"{problem.where}: {problem.what}").append(f"\n  {problem.advice}\n") for problem in problems]
    else:
        parts.append(Text("Nothing is wrong.", "green"))
    return Group(*parts)
