"""Files that commands write: results as JSON, and pictures."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from moelink.errors import MoelinkError


def write_json(document: dict[str, Any], path: Path | None) -> None:
    """Write a document where one is asked for; folders are made. One line and exit status 1 where that cannot be."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def check_writable(*paths: Path | None) -> None:
    """Refuse paths that cannot be written, before the work whose result is to go there; folders are made."""
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
    """A block that draws into ``path``, whose folders are made.

    One line and exit status 1 without matplotlib, or for what cannot be drawn (a suffix that is not known, no data).
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
