"""Start the fork server from which the ranks of tests come, with loaded what nearly every rank imports.

A rank that imports torch, Triton and the transports itself takes a second of processor time for that, and starts
without the faster interpreter. Here the server imports them once for each worker of the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.forkserver import ensure_running

from tests.support.paths import ROOT

PRELOADED = [
    "torch",
    "torch.distributed",
    "tests.support.fast_kernels",
    "moelink.initialize",
    "moelink.contract",
    "moelink.memory.posix",
    "moelink.nn",
    "moelink.ops.library",
    "moelink.transports.collective.transport",
    "moelink.transports.symmetric.transport",
    "tests.support.rewritten_kernels",
]


def start() -> None:
    """Start the server of this process. It takes its module search path and its environment from now.

    Kernels are interpreted in all ranks of a server or in none, as Triton reads ``TRITON_INTERPRET`` when it is loaded.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    try:
        ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def missing(rank: int, world_size: int) -> list[str]:
    """Return the names of the modules that a rank has not loaded when it starts; an import error of the server is
    silent."""
    return [name for name in PRELOADED if name not in sys.modules]
