"""Where and from what a result comes: commit, versions, machine, variables that change how fast things are."""

from __future__ import annotations

import importlib
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import moelink

PACKAGES = ("torch", "triton", "numpy", "flashinfer")

VARIABLES = (
    "CUDA_LAUNCH_BLOCKING", "MOELINK_DEBUG", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NVSHMEM_DISABLE_NVLS",
    "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "TRITON_INTERPRET",
)  # fmt: skip


def _git(*arguments: str) -> str | None:
    """Output of a git command in the folder of the package; None without git, repository, or success."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(moelink.__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def find_commit() -> str | None:
    """The commit that the package was checked out from, None when it is not in a repository of its own."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # installed somewhere inside somebody else's repository
    return _git("rev-parse", "--verify", "--quiet", "HEAD") or None


def is_dirty() -> bool | None:
    """Files of the package differ from the commit; None where there is none."""
    changes = _git("status", "--porcelain", "--", ".")
    return None if changes is None else bool(changes)


def version_of(package: str) -> str | None:
    """Version of an installed package by its metadata, else by its ``__version__``; None when it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    try:
        return str(importlib.import_module(package).__version__)
    except (ImportError, AttributeError):
        return None


def nccl_version() -> str | None:
    """NCCL's version where torch was built with it."""
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    except (AttributeError, RuntimeError, ImportError):
        return None


def processor() -> str:
    """Model name of the processor, or the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def collect(commit: str | None, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The head of a result. ``commit`` replaces what git would say (on machines without a repository)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = find_commit() if commit is None else None
    return {
        "commit": found if commit is None else commit,
        "dirty": is_dirty() if found else None,
        "versions": {
            "moelink": moelink.__version__,
            "python": platform.python_version(),
            **{name: version_of(name) for name in PACKAGES},
            "cuda": torch.version.cuda,
            "nccl": nccl_version(),
        },
        "host": {"processor": processor(), "cores": cores, "system": f"{platform.system()} {platform.machine()}"},
        "variables": {name: environ[name] for name in VARIABLES if name in environ},
    }


def command_line(program: str, arguments: Sequence[str]) -> str:
    """The command to record: ``program`` and what was typed after it, but for folders that only this machine has.

    Example: ``bench --out /home/me/runs/decode.json`` of "moelink" is ``moelink bench --out decode.json``.
    """
    words = (Path(word).name if os.path.isabs(word) else word for word in arguments)
    return f"{program} {shlex.join(words)}"
