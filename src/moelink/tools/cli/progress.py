"""Progress of a command: on stderr, so that stdout holds data only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moelink.tools.cli import render


@contextmanager
def progress_on_stderr() -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, one line a step elsewhere; nothing on other ranks of a launcher than rank 0."""
    if os.environ.get("RANK", "0") != "0":
        yield lambda message: None
        return
    console = render.make_console(stderr=True)
    if not console.is_terminal:
        yield lambda message: console.print(message, markup=False)
        return
    with console.status("") as status:
        yield lambda message: status.update(message)
