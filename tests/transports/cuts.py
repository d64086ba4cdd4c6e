"""Cut launches in other ways than usual: programs of each role, tokens and messages at a time, blocks of columns.

Results do not depend on it. Configurations of many tokens or of long rows are cut so; here those of few tokens are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from moelink.formats import get_format
from moelink.kernels.launch import constants
from moelink.kernels.launch import own_rows as staying
from moelink.kernels.launch.grid import Launch
from moelink.memory import workspace as workspaces
from moelink.transports.symmetric import combine as combining
from moelink.transports.symmetric import plans as dispatching
from tests.support.setups import Draw

LAUNCHES: dict[str, tuple[Launch, Launch, dict[str, int]]] = {
    "one": (Launch(1, 1), Launch(1, 1), {"TOKENS_PER_BATCH": 2, "MESSAGES_PER_STEP": 2}),
    "few": (Launch(2, 9), Launch(9, 2), {"TOKENS_PER_BATCH": 1, "MESSAGES_PER_STEP": 4}),
    "many": (Launch(20, 16), Launch(16, 20), {"TOKENS_PER_BATCH": 4, "MESSAGES_PER_STEP": 1}),
}
"""Programs that send and that receive, of dispatch and of combine; tokens and messages at a time."""

COLUMNS = 16
"""Of a block, unless a group of the combine format has more."""
SIZES: dict[str, dict[str, int]] = {
    "parts": {"MANY_COPIES": 2},
    "whole": {"FEW_TOKENS": 2},
    "flags": {"LAMPORT_BYTES": 0, "LAMPORT_BYTES_OF_COPIES": 0, "MANY_COPIES": 2, "FEW_TOKENS": 2},
}
"""Limits of ``moelink.memory.workspace``: rows that travel in parts; whole rows of several blocks; sums with flags."""


@contextlib.contextmanager
def applied(draw: Draw) -> Iterator[None]:
    """Cut launches as ``draw`` says, for as long as the context lasts."""
    cut, home = draw.cut, draw.combine_format
    with contextlib.ExitStack() as stack:

        def replace(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        def changed(make: Callable[..., Any], **fields: int) -> Callable[..., Any]:
            return lambda *args, **kind: dataclasses.replace(make(*args, **kind), **fields)

        _forget()
        stack.callback(_forget)
        for name, size in SIZES.get(cut, {}).items():
            replace(workspaces, name, size)
        if cut in ("parts", "whole"):
            replace(workspaces, "COMBINE_BLOCK", COLUMNS if home is None else get_format(home).group)
        if cut == "parts":
            replace(combining, "combine_launch", lambda space, *args, **kind: Launch(3, 40, spread=space.combine_parts))
        if cut == "at_once":
            make = dispatching.dispatch_spec
            replace(dispatching, "dispatch_spec", lambda *args, **kind: make(*args, **kind, later=False))
        if cut in LAUNCHES:
            dispatch, combine, fields = LAUNCHES[cut]
            replace(dispatching, "dispatch_launch", lambda *args, **kind: dispatch)
            replace(combining, "combine_launch", lambda *args, **kind: combine)
            replace(dispatching, "dispatch_spec", changed(dispatching.dispatch_spec, **fields))
        yield


def _forget() -> None:
    """What was chosen for an equal configuration depends on the sizes."""
    constants.combine_spec.cache_clear()
    staying.with_own_rows.cache_clear()
