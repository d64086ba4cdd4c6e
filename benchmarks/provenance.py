"""Where and from what a result comes: commit, versions, machine. The same header in every result file."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import moelink
from moelink.tools.bench.provenance import processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/results"


def _git(*arguments: str) -> str:
    """Output of a git command in the repository, empty when there is none."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def collect() -> dict[str, Any]:
    """Commit (and whether files other than results differ from it), versions, host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "commit": _git("rev-parse", "--verify", "--quiet", "HEAD") or None,
        "dirty": bool(_git("status", "--porcelain", "--", ".", f":!{RESULTS}")),
        "versions": {
            "python": platform.python_version(),
            "moelink": moelink.__version__,
            **{name: metadata.version(name) for name in ("torch", "triton", "numpy")},
        },
        "host": {"processor": processor(), "cores": cores, "system": f"{platform.system()} {platform.machine()}"},
    }
