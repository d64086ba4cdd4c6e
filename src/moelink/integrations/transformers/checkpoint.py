"""A checkpoint in safetensors files, of which a rank reads its own tensors and no others.

Files are mapped, not read: only the bytes of the tensors (or slices) that are asked for leave the disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moelink.errors import MoelinkError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(MoelinkError, RuntimeError):
    """A checkpoint lacks a file or a tensor, or a tensor has another shape than the model.

    Raised on every rank when any rank meets it, before the model is used. Recover: complete the checkpoint (the message
    names the missing parts), then load again.
    """


def read_index(text: bytes, folder: Path) -> dict[str, str]:
    """Read the text of an index: the name of the file by the name of the tensor.

    File names are relative to ``folder`` and stay inside of it. (A file may be a link to a place outside, as in the
    cache of the Hugging Face hub; a user who may make links in the folder may also replace its files.)

    Raises:
        CheckpointError: the text is not the JSON of an index, or a file is named that is not in the folder.
    """
    where = f"checkpoint {folder / INDEX}"
    try:
        index = json.loads(text)
        files = index["weight_map"]
        if not (isinstance(files, dict) and all(isinstance(file, str) for file in files.values())):
            raise TypeError("weight_map is not a table of texts")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: expected JSON with weight_map, the file of each tensor, got another text "
            f"({type(error).__name__}: {error}); download the file again"
        ) from error
    for tensor, file in files.items():
        path = PurePosixPath(file)
        if path.suffix != ".safetensors" or path.is_absolute() or ".." in path.parts or not file.isprintable():
            raise CheckpointError(
                f"{where}: {tensor}: expected the name of a safetensors file in the folder, got {file!r}; load "
                "checkpoints from a source that you trust"
            )
    return files


@dataclass(frozen=True)
class LoadReport:
    """The tensors that one rank read of a checkpoint.

    Attributes:
        tensors: how many, whole or in part.
        nbytes: their bytes, as stored.
        files: names of the files they came from, sorted.
        other_ranks: how many tensors were left to other ranks.
        ignored: names of tensors that this model has no place for, sorted (such as layers for multi-token prediction).
    """

    tensors: int
    nbytes: int
    files: tuple[str, ...]
    other_ranks: int
    ignored: tuple[str, ...]


class Checkpoint:
    """The safetensors files in ``folder``, open for reading. Also a context manager.

    Raises:
        CheckpointError: the folder has neither ``model.safetensors`` nor an index of several files, or the index is
            malformed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._open_files: dict[str, Any] = {}
        self._files = self._where()
        self._read: dict[str, int] = {}

    def _where(self) -> dict[str, str]:
        """File name by tensor name."""
        if (self.folder / INDEX).is_file():
            return read_index((self.folder / INDEX).read_bytes(), self.folder)
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        raise CheckpointError(
            f"checkpoint: expected a folder with {SINGLE} or {INDEX}, got {self.folder}; download the model first, for "
            "instance with huggingface_hub.snapshot_download"
        )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def require(self, names: Iterable[str]) -> None:
        """Refuse, before anything is read, unless all tensors are listed and their files are there.

        Raises:
            CheckpointError: tensors or files are missing; it names them.
        """
        names = list(names)
        unlisted = [name for name in names if name not in self._files]
        if unlisted:
            raise CheckpointError(
                f"checkpoint {self.folder}: missing {_some(unlisted, 'tensor')}: expected all tensors of the model, "
                f"got {len(names) - len(unlisted)} of {len(names)}; complete the checkpoint"
            )
        missing = sorted({self._files[name] for name in names if not (self.folder / self._files[name]).is_file()})
        if missing:
            wanted = [name for name in names if self._files[name] in missing]
            lacking = f"{_some(missing, 'file')}, which should hold {_some(wanted, 'tensor')}"
            raise CheckpointError(
                f"checkpoint {self.folder}: missing {lacking}: expected all files that the index lists, got others "
                "only; complete the checkpoint"
            )
        for file in sorted({self._files[name] for name in names}):
            self._file(file)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors."""
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor ``name``; nothing of its values is read.

        Raises:
            CheckpointError: the indexed file lacks it, is missing or malformed.
        """
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of the tensor ``name`` in safetensors' words, such as "BF16"; raises as :meth:`shape`."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, rows: Sequence[slice] | None = None) -> Tensor:
        """The tensor ``name``, or ``rows`` of its first dimension, as stored; raises as :meth:`shape`. Threads may
        read at the same time once :meth:`require` has opened the files."""
        stored = self._slice(name)
        parts = [stored[...]] if rows is None else [stored[some] for some in rows]
        value: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._read[name] = value.nbytes
        return value

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            self.require([name])
        try:
            return self._file(self._files[name]).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"checkpoint {self.folder / self._files[name]}: {name}: expected a tensor, got this error: {error}; "
                "download the file again"
            ) from error

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            try:
                opened = safe_open(self.folder / name, "pt", device="cpu")
            except SafetensorError as error:
                raise CheckpointError(
                    f"checkpoint {self.folder / name}: expected a safetensors file, got this error: {error}; download "
                    "the file again"
                ) from error
            self._open_files[name] = self._stack.enter_context(opened)
        return self._open_files[name]

    def report(self, others: Iterable[str]) -> LoadReport:
        """Return a report of the tensors read so far; ``others`` are names of tensors of other ranks."""
        left = (set(others) & self._files.keys()) - self._read.keys()
        return LoadReport(
            tensors=len(self._read),
            nbytes=sum(self._read.values()),
            files=tuple(sorted({self._files[name] for name in self._read})),
            other_ranks=len(left),
            ignored=tuple(sorted(self._files.keys() - self._read.keys() - left)),
        )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _some(names: Sequence[str], what: str) -> str:
    """A sentence's worth of ``names``."""
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}{'s' if len(names) > 1 else ''} {shown}{more}"
