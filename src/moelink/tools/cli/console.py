"""Parts of all commands: choices of options, consoles and tables, progress on stderr, output files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from moelink.errors import MoelinkError
from moelink.names import BuiltInFormat, DeviceChoice, TransportName

PLAIN_WIDTH = 120
"""Columns of output that does not go to a terminal."""

BAR = 40
"""Columns of the longest bar."""


FORMATS: tuple[str, ...] = get_args(BuiltInFormat)
"""Names that --format takes."""


def format_option(help: str) -> Any:
    """Return an option that takes the name of a built-in format, or several."""
    return typer.Option(help=help, callback=_known_formats, autocompletion=lambda: list(FORMATS))


def _known_formats(value: Any) -> Any:
    for name in [value] if isinstance(value, str) else value or ():
        if name not in FORMATS:
            raise typer.BadParameter(f"expected one of {', '.join(FORMATS)}, got {name!r}")
    return value


def check_topk(topk: int, experts: int) -> None:
    """Refuse more experts of a token than there are."""
    if topk > experts:
        raise typer.BadParameter(f"expected at most the number of experts, {experts}, got {topk}", param_hint="--topk")


def place_of(device: DeviceChoice, ranks: int | None, on_cpus: int) -> tuple[str, int]:
    """Return the kind of the ranks' devices, "cuda" or "cpu", and the number of ranks.

    That number is a launcher's world size, or ``ranks``, or by default that of CUDA devices, and ``on_cpus`` on CPUs.
    Refuses another number than the launcher's, and more CUDA devices than the machine has.
    """
    import torch

    world, devices = os.environ.get("WORLD_SIZE"), torch.cuda.device_count()
    if world is not None and ranks not in (None, int(world)):
        raise typer.BadParameter(f"expected {world}, the launcher's, or no value, got {ranks}", param_hint="--ranks")
    kind = ("cuda" if devices else "cpu") if device == "auto" else device
    count = int(world) if world is not None else ranks or (devices if kind == "cuda" else on_cpus)
    if kind == "cuda" and (devices == 0 or (world is None and count > devices)):
        hint = "--device" if devices == 0 else "--ranks"
        raise typer.BadParameter(f"expected at most {devices} CUDA devices, got {max(1, count)}", param_hint=hint)
    return kind, count


def make_console(*, stderr: bool = False) -> Console:
    """Make a console on stdout or stderr. Honours NO_COLOR; without a terminal it writes plain lines of fixed width.

    Text is printed as it is: ``[x]`` is no markup, ``:x:`` no emoji. It may come from a stranger's file.
    """
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def table(console: Console, title: str) -> Table:
    """Make an empty table: rounded lines on a terminal, aligned columns elsewhere."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.ROUNDED if console.is_terminal else None,
        pad_edge=console.is_terminal,
    )  # fmt: skip


def quantity(count: int) -> str:
    """Render bytes in decimal units. ``quantity(1_234_567) == '1.23 MB'``, ``quantity(512) == '512 B'``."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def bar(console: Console, value: int, largest: int) -> str:
    """Render ``value`` as a bar, ``largest`` being the longest one."""
    columns = round(BAR * value / largest) if largest else 0
    return ("█" if console.is_terminal and console.encoding.startswith("utf") else "#") * columns


DeviceOption = Annotated[DeviceChoice, typer.Option(help="Device of each rank; auto: CUDA if the machine has any.")]
TransportOption = Annotated[TransportName, typer.Option(help="How bytes travel.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
OutOption = Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")]


def to_json(document: Any) -> str:
    """Return a report as JSON text."""
    return json.dumps(document, indent=2)


def show(document: Any, view: Callable[[Console], RenderableType], *, as_json: bool) -> None:
    """Print a report on stdout: as JSON, or as ``view`` renders it for a console."""
    if as_json:
        typer.echo(to_json(document))
    else:
        console = make_console()
        console.print(view(console))


def write_json(document: dict[str, Any], path: Path | None) -> None:
    """Write a document to ``path``, if any, and make its folders. One line and exit status 1 if that fails."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(document) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def check_writable(*, out: Path | None = None, plot: Path | None = None, picture: Path | None = None) -> None:
    """Refuse files that cannot be written, before the work for them starts. Makes their folders.

    ``out`` is the value of --out, ``plot`` and ``picture`` are pictures, those of --plot and of --out.
    """
    for hint, path in (("--out", out), ("--plot", plot), ("--out", picture)):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            path.open("ab").close()
            if new:
                path.unlink()
        except OSError as error:
            reason = f"cannot write {path}: {error.strerror or error}"
            raise typer.BadParameter(reason, param_hint=hint) from error
        if path in (plot, picture):
            _check_suffix(path, hint)


def _check_suffix(path: Path, hint: str) -> None:
    """Refuse a picture whose suffix matplotlib does not know. One line and exit status 1 without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        typer.echo(f"moelink: cannot draw: {error} (run pip install matplotlib)", err=True)
        raise typer.Exit(1) from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise typer.BadParameter(f"expected a file of {', '.join(known)}, got {str(path)!r}", param_hint=hint)


def _unwritable(path: Path, error: OSError) -> typer.Exit:
    typer.echo(f"moelink: cannot write {path}: {error.strerror or error}", err=True)
    return typer.Exit(1)


@contextmanager
def drawing(path: Path) -> Iterator[None]:
    """Run a block that draws into ``path``. One line and exit status 1 if that fails; errors of moelink pass."""
    try:
        yield
    except MoelinkError:
        raise
    except OSError as error:
        raise _unwritable(path, error) from error
    except ValueError as error:
        typer.echo(f"moelink: cannot draw: {error}", err=True)
        raise typer.Exit(1) from error


_STEPS = re.compile(r" \((\d+) of (\d+)\)$")


@contextmanager
def progress_on_stderr() -> Iterator[Callable[[str], None]]:
    """Show steps: a bar with the time left on a terminal, one line per step elsewhere, nothing on a launcher's ranks
    other than 0. ``(2 of 5)`` at the end of a step says how far the work is."""
    if os.environ.get("RANK", "0") != "0":
        yield lambda message: None
        return
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda message: console.print(message)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def step(message: str) -> None:
            found = _STEPS.search(message)
            how_far: dict[str, Any] = {} if found is None else {"completed": int(found[1]), "total": int(found[2])}
            bars.update(task, description=_STEPS.sub("", message), **how_far)

        yield step
