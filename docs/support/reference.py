"""Writes the reference pages that are made of code: the command line's and the environment variables'.

``python docs/support/reference.py`` (``make reference``) writes ``docs/reference/cli.md`` and ``environment.md``;
``tests/project/test_docs.py`` fails where they are out of date. Needs the extra ``moelink[cli]``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

import moelink.__main__
from moelink.env import VARIABLES

REFERENCE = Path(__file__).resolve().parent.parent / "reference"
MADE = "<!-- Made by docs/support/reference.py (make reference). -->\n"


def application() -> typer.Typer:
    """The application of ``python -m moelink``."""
    app: typer.Typer = importlib.import_module(f"{moelink.__main__.main.__module__}.app").app
    return app


def cell(text: object) -> str:
    """Text of a table's cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command, those of groups before those of what is in them."""
    yield path
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from paths(child, (*path, name))


def cli_page() -> str:
    """The page of the commands: the ``--help`` of each."""
    sections, app = [], application()
    for words in paths(typer.main.get_command(app)):
        result = CliRunner().invoke(app, [*words, "--help"], prog_name="moelink", terminal_width=88)
        if result.exit_code:
            raise RuntimeError(f"moelink {' '.join(words)} --help: expected exit status 0, got {result.exit_code}")
        text = "\n".join(line.rstrip() for line in result.output.strip().splitlines())
        sections.append(f"## {' '.join(('moelink', *words))}\n\n```text\n{text}\n```\n")
    return f"""{MADE}
# Command line

`moelink`, or `python -m moelink`, needs the extra `moelink[cli]`. Reports go to stdout, progress and errors to stderr.
`moelink --install-completion` installs completion for your shell.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | a problem was found, a check failed, or a rank or the machine failed |
| 2 | refused arguments or files; no rank was started |
| 3 | `moelink bench --speed-gate`: a comparison was lost |

""" + "\n".join(sections)


def environment_page() -> str:
    """The page of the environment variables."""
    rows = "\n".join(
        f"| `{v.name}` | {f'`{v.default}`' if v.default else 'not set'} | {cell(v.meaning)} |" for v in VARIABLES
    )
    return f"""{MADE}
# Environment variables

A variable never changes results, only resources and diagnostics; those that switch a plugin on put moelink in the place
of what a framework would have used. `moelink env --full` shows all of them, `moelink env` those that are set.

| variable | default | meaning |
|---|---|---|
{rows}

torchrun sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`; `moelink.init` reads them. Without
them it makes a communicator of one rank. `TRITON_INTERPRET=1` makes Triton interpret the kernels on a CPU, with
`transport="symmetric"` over shared memory; set it before `triton` is imported.
"""


PAGES = {"cli.md": cli_page, "environment.md": environment_page}


def main() -> None:
    """Write the pages."""
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(make())


if __name__ == "__main__":
    main()
