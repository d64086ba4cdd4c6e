"""Result files: their first fields, and how they are written. :mod:`moelink.tools.results` reads them.

Every result names its commit, versions, machine and the variables that change how fast things are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import moelink
from moelink.errors import ConfigError
from moelink.tools import common
from moelink.tools.results import SCHEMA_VERSION

PACKAGES = (*common.PACKAGES, "flashinfer")

VARIABLES = (
    "CUDA_LAUNCH_BLOCKING", "MOELINK_DEBUG", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NVSHMEM_DISABLE_NVLS",
    "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "TRITON_INTERPRET",
)  # fmt: skip


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in the folder of the package; None when it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(moelink.__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def find_commit() -> str | None:
    """Return the commit that the package was checked out from; None when it is not in a repository of its own."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # installed somewhere inside somebody else's repository
    return _git("rev-parse", "--verify", "--quiet", "HEAD") or None


def is_dirty() -> bool | None:
    """Return whether files of the package differ from the commit; None without a commit."""
    changes = _git("status", "--porcelain", "--", ".")
    return None if changes is None else bool(changes)


def processor() -> str:
    """Return the model name of the processor, or the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def provenance(commit: str | None = None, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return where a result comes from; ``commit`` replaces what git says, on machines without a repository."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = find_commit() if commit is None else None
    return {
        "commit": found if commit is None else commit,
        "dirty": is_dirty() if found else None,
        "versions": {**common.versions(PACKAGES), "cuda": torch.version.cuda, "nccl": common.nccl_version()},
        "host": {"processor": processor(), "cores": cores, "system": f"{platform.system()} {platform.machine()}"},
        "variables": {name: environ[name] for name in VARIABLES if name in environ},
    }


def command_line(program: str, arguments: Sequence[str]) -> str:
    """Return the command to record: ``program`` and its arguments, of absolute paths only the file name.

    Example: ``bench --out /home/me/runs/decode.json`` of "moelink" is ``moelink bench --out decode.json``.
    """
    words = (Path(word).name if os.path.isabs(word) else word for word in arguments)
    return f"{program} {shlex.join(words)}".rstrip()


def repository() -> Path:
    """Return the repository that the package stands in.

    Raises:
        ConfigError: the package is installed elsewhere.
    """
    root = Path(moelink.__file__).resolve().parents[2]
    if not (root / "benchmarks" / "results").is_dir():
        raise ConfigError("repository", "moelink run from a clone (pip install -e .), or --out", str(root))
    return root


def results_folder() -> Path:
    """Return ``benchmarks/results`` of :func:`repository`."""
    return repository() / "benchmarks" / "results"


def today() -> str:
    """Return the date in UTC, ``"2026-01-31"``."""
    return datetime.now(timezone.utc).date().isoformat()


def head(benchmark: str, *, command: str, commit: str | None = None) -> dict[str, Any]:
    """Return the fields that every result begins with; ``command`` is what was typed, of :func:`command_line`."""
    made = {"schema_version": SCHEMA_VERSION, "benchmark": benchmark, "date": today(), "command": command}
    return {**made, **provenance(commit)}


def run_head(
    benchmark: str, plan: Any, devices: Sequence[str], gate: Mapping[str, Any], command: str, commit: str | None
) -> dict[str, Any]:
    """Return the fields of a preset's result without figures: its head, and ``plan``, ``devices`` by rank, ``gate``."""
    return {
        **head(benchmark, command=command, commit=commit), "preset": plan.preset, "device": plan.device,
        "devices": list(devices), "ranks": len(devices), "settings": to_document(plan.settings), "gate": gate,
    }  # fmt: skip


def device_names(device: str) -> list[str]:
    """Return the names of what a result of this process ran on: that of the CUDA device, or ``["CPU"]``."""
    return [torch.cuda.get_device_name() if device == "cuda" else "CPU"]


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]], *, text: int = 1, gap: str = "") -> str:
    """Return a table in Markdown, whose first ``text`` columns are text; ``gap`` is around the parts of its rule."""
    rule = f"{gap}|{gap}".join([*["---"] * text, *["---:"] * (len(heads) - text)])
    head, *rows = (f"| {' | '.join(row)} |" for row in (heads, *lines))
    return "\n".join([head, f"|{gap}{rule}{gap}|", *rows])


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write a document as JSON; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def to_document(value: object) -> object:
    """Return ``value`` with its dataclasses, mappings and sequences as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_document(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_document(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_document(entry) for entry in value]
    return value
