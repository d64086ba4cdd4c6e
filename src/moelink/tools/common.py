"""Parts of all tools: progress of ranks, received rows as numbers, and versions of installed packages."""

from __future__ import annotations

import importlib
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

import moelink
from moelink.formats import get_format
from moelink.output import DispatchOutput

Progress = Callable[[str], None]
"""Called with one sentence at each step, possibly from another thread. One that ends with ``(2 of 5)`` says how far the
work is."""

PACKAGES = ("torch", "triton", "numpy")
"""The packages that moelink needs."""


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Return the versions of moelink, Python and ``packages``; None for one that is not installed."""
    known = {name: version_of(name) for name in packages}
    return {"moelink": moelink.__version__, "python": platform.python_version(), **known}


def version_of(package: str) -> str | None:
    """Return a package's version by its metadata, else by its ``__version__``; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    try:
        return str(importlib.import_module(package).__version__)
    except (ImportError, AttributeError):
        return None


def nccl_version() -> str | None:
    """Return NCCL's version; None if torch was built without it."""
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    except (AttributeError, RuntimeError, ImportError):
        return None


def rank_device(kind: str, *, interprets: bool) -> torch.device:
    """Return the device of this rank, as torchrun's variables number it, and make it current. On a CPU, let Triton
    interpret kernels if the rank ``interprets`` them."""
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    if interprets:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return torch.device("cpu")


@contextmanager
def followed(progress: Progress) -> Iterator[str]:
    """Name a file whose lines are passed to ``progress`` as a rank writes them, while the block runs."""
    with tempfile.TemporaryDirectory(prefix="moelink-") as folder:
        path, stop = Path(folder) / "progress", threading.Event()
        path.touch()

        def follow() -> None:
            seen, ended = 0, False
            while not ended:
                ended = stop.wait(0.1)
                lines = path.read_text().splitlines()
                for line in lines[seen:]:
                    progress(line)
                seen = len(lines)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield str(path)
        finally:
            stop.set()
            thread.join()


class Steps:
    """Writes the steps of a rank to a file of :func:`followed`, if it has one: ``measuring pairs (3 of 9)``."""

    def __init__(self, path: str | None, total: int) -> None:
        self._path, self._total, self._ended = path, total, 0

    def end(self, name: str) -> None:
        """Count a step as done."""
        self._ended = min(self._ended + 1, self._total)
        if self._path is not None:
            with Path(self._path).open("a") as file:
                file.write(f"{name} ({self._ended} of {self._total})\n")


def row_major_scales(recv: DispatchOutput, *, format_name: str, hidden_size: int) -> Tensor | None:
    """Return the scales [row_offsets[-1], n] of the rows in use, in any layout, or None without scales."""
    fmt = get_format(format_name)
    if recv.scales is None or fmt.scale_layout is None:
        return None
    offsets = recv.row_offsets.long()
    total = int(offsets[-1])
    if recv.topk_ids is not None:  # layout "rank": scales are row-major already
        return recv.scales[:total]
    sizes = offsets[1:] - offsets[:-1]
    return fmt.scale_layout.gather(
        recv.scales, rows=torch.arange(total, device=sizes.device),
        groups=torch.repeat_interleave(torch.arange(sizes.numel(), device=sizes.device), sizes),
        row_offsets=recv.row_offsets, scale_width=fmt.scale_width(hidden_size),
    )  # fmt: skip


def dequantize_rows(recv: DispatchOutput, *, format_name: str, hidden_size: int) -> Tensor:
    """Return the received rows [row_offsets[-1], hidden_size] as fp32 or fp64: payload times scales."""
    scales = row_major_scales(recv, format_name=format_name, hidden_size=hidden_size)
    return get_format(format_name).dequantize(recv.tokens[: int(recv.row_offsets[-1])], scales)
