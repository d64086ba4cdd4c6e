"""Benchmarks: dispatch and combine, found correct, then measured against their peers and against the wire.

``moelink bench`` runs the presets and draws results; the package ``layer`` holds those of the whole layer. Every other
file of ``benchmarks/results`` comes from a script, started with ``moelink bench NAME`` or ``python -m
moelink_bench.NAME``:

* ``collective``: the collective transport against a sort and ``all_to_all_single``, on CPU ranks
* ``sweep``: launch settings of the symmetric kernels, and pairs of dispatch and combine
* ``host``: host time of calls, and what the operator layer adds to it
* ``ncu``: hardware counters and stall reasons of each role
* ``roles``: the kernels of two source trees against each other, role by role, on one device (the preset ``roles``, of
  ``roles_preset``, measures one tree and FlashInfer)
* ``experts``: grouped products of experts in bf16 and in fp8, and launch settings of the fp8 kernel
* ``router``: a router's choice of experts against a chain of torch operators, and the router as a whole
* ``launchers``: the launchers of ``moelink.contract`` against a communicator
* ``frameworks``: dispatchers of frameworks against moelink's
* ``generate``: prefill and decode of a transformers model, with its own expert parallelism and with moelink
* ``serve``: a tiny model served by vLLM on two CPU ranks over moelink, against one process
* ``quotients``: corrections that a quotient of a bf16 element by an fp32 scale needs
* ``render``: the tables of README.md and docs that show results
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
