"""Benchmarks: dispatch and combine, found correct, then measured against their peers and against the wire.

``moelink bench`` runs the presets and draws results; the package ``layer`` holds those of the whole layer. Every other
file of ``benchmarks/results`` comes from a script of :data:`moelink_bench.names.SCRIPTS`, started with ``moelink bench
NAME`` or ``python -m moelink_bench.NAME``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moelink_bench.presets import PRESETS, Case, Plan, Settings, make_plan
    from moelink_bench.run import run_bench

__all__ = ["PRESETS", "Case", "Plan", "Settings", "make_plan", "run_bench"]

if not TYPE_CHECKING:  # a type checker takes any name if it sees __getattr__

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use: the command line begins without torch."""
        if name not in __all__:
            raise AttributeError(f"module 'moelink_bench' has no attribute {name!r}")
        return getattr(importlib.import_module(f"moelink_bench.{'run' if name == 'run_bench' else 'presets'}"), name)
