"""Parts of all commands: choices of options, consoles and tables, progress on stderr, output files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from moelink.errors import MoelinkError

PLAIN_WIDTH = 120
"""Columns of output that does not go to a terminal."""

BAR = 40
"""Columns of the longest bar."""


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

    @property
    def kind(self) -> str:
        """The kind of device; of auto, "cuda" if there is a device."""
        if self is Device.auto:
            return "cuda" if torch.cuda.is_available() else "cpu"
        return str(self.value)


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


def check_writable(*paths: Path | None) -> None:
    """Refuse paths that cannot be written, before the work for them starts; folders are made."""
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            path.open("ab").close()
            if new:
                path.unlink()
        except OSError as error:
            raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> typer.Exit:
    typer.echo(f"moelink: cannot write {path}: {error.strerror or error}", err=True)
    return typer.Exit(1)


@contextmanager
def drawing(path: Path) -> Iterator[None]:
    """Make the folders of ``path`` for a block that draws into it.

    One line and exit status 1 without matplotlib, or if drawing fails (an unknown suffix, no data).
    Errors of moelink go on as they are.
    """
    check_writable(path)
    try:
        yield
    except MoelinkError:
        raise
    except OSError as error:
        raise _unwritable(path, error) from error
    except (ImportError, ValueError) as error:
        hint = " (pip install 'moelink[plot]')" if isinstance(error, ImportError) else ""
        typer.echo(f"moelink: cannot draw: {error}{hint}", err=True)
        raise typer.Exit(1) from error


@contextmanager
def progress_on_stderr() -> Iterator[Callable[[str], None]]:
    """Show steps: a spinner on a terminal, one line per step elsewhere, nothing on a launcher's ranks other than 0."""
    if os.environ.get("RANK", "0") != "0":
        yield lambda message: None
        return
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda message: console.print(message)
        return
    with console.status("") as status:
        yield lambda message: status.update(message)
