"""Files that commands write: results as JSON, and pictures."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from moelink.errors import MoelinkError


def write_json(document: dict[str, Any], path: Path | None) -> None:
    """Write a document where one is asked for; folders are made."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n")


@contextmanager
def drawing(path: Path) -> Iterator[None]:
    """A block that draws into ``path``, whose folders are made.

    One line and exit status 1 without matplotlib, or for what cannot be drawn (a suffix that is not known, no data).
    Errors of moelink go on as they are.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except MoelinkError:
        raise
    except (ImportError, ValueError) as error:
        hint = " (pip install 'moelink[plot]')" if isinstance(error, ImportError) else ""
        typer.echo(f"moelink: cannot draw: {error}{hint}", err=True)
        raise typer.Exit(1) from error
