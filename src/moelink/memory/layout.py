"""Lay out bytes: regions with computed offsets, and the message that carries one token.

No other module multiplies sizes. Offsets and sizes are bytes; every part of a message starts on a multiple of 16, so
that rows can be moved in 16-byte pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moelink.arith import align_up
from moelink.errors import MoelinkError
from moelink.formats import Format

ALIGNMENT = 16
"""Every message part starts on a multiple of this many bytes."""

REGION_ALIGNMENT = 128
"""Every region starts on a multiple of this many bytes: a cache line, so that signals of two regions share none."""


def as_bytes(rows: Tensor) -> Tensor:
    """View [..., width] of any dtype as [..., width * itemsize] uint8; copy non-contiguous tensors.

    A contiguous tensor without elements, or of one column, may have strides with which torch cannot view it as another
    dtype; gradients of a rank without tokens are such tensors. So the strides of the shape are set first.
    """
    return rows.contiguous().view(-1).view(rows.shape).view(torch.uint8)


@dataclass(frozen=True)
class Region:
    """A named array inside a block of memory: ``shape`` elements of ``dtype`` from byte ``offset`` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes that the array occupies, without padding to the next region."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """First byte after the array."""
        return self.offset + self.nbytes

    def view(self, memory: Tensor) -> Tensor:
        """Return the region as a typed view of ``memory`` (one-dimensional uint8)."""
        if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() < self.end:
            size = f"{memory.numel()} {memory.dtype}"
            raise MoelinkError(
                f"region {self.name!r} [{self.offset}, {self.end}) does not fit memory of {size}: expected a flat "
                f"uint8 tensor of at least {self.end} bytes, got {size}; allocate the block for this configuration"
            )
        return memory[self.offset : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class RegionTable:
    """Regions packed one after the other. ``nbytes`` is the whole, rounded up to the region alignment."""

    regions: tuple[Region, ...]

    @classmethod
    def pack(cls, *parts: tuple[str, torch.dtype, tuple[int, ...]], alignment: int = REGION_ALIGNMENT) -> RegionTable:
        """Lay ``(name, dtype, shape)`` parts out in order, each on a multiple of ``alignment``.

        Example: an int32 [3] and a uint8 [5] with alignment 16 start at 0 and 16; the table has 32 bytes.
        """
        regions, offset = [], 0
        for name, dtype, shape in parts:
            regions.append(Region(name, dtype, shape, offset))
            offset = align_up(regions[-1].end, alignment)
        return cls(tuple(regions))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table."""
        return align_up(self.regions[-1].end, REGION_ALIGNMENT) if self.regions else 0

    def __getitem__(self, name: str) -> Region:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(f"no region {name!r}; there are {', '.join(r.name for r in self.regions)}")

    def __iter__(self) -> Iterator[Region]:
        return iter(self.regions)


@dataclass(frozen=True)
class HomeRow:
    """One row on its way home: ``payload`` and, in a combine format, ``scales`` from the next multiple of 16.

    ``format`` None: ``hidden_size`` elements of ``dtype``.

    Example: bf16, hidden 7168: 14336 bytes. fp8_block128: 56 scales of 4 bytes from byte 7168 on, 7392 bytes.
    """

    hidden_size: int
    dtype: torch.dtype
    format: Format | None = None

    @property
    def parts(self) -> RegionTable:
        """The parts of a row as regions."""
        fmt, hidden = self.format, self.hidden_size
        if fmt is None:
            return RegionTable.pack(("payload", self.dtype, (hidden,)))
        scales = ("scales", torch.uint8, (fmt.scale_bytes(hidden),))
        return RegionTable.pack(("payload", torch.uint8, (fmt.payload_bytes(hidden),)), scales, alignment=ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of a row, without padding behind it."""
        return self.parts.regions[-1].end


@dataclass(frozen=True)
class DispatchMessage:
    """One token on the wire; messages to different ranks differ in the expert ids only.

    Parts, in order, each padded to 16 bytes: ``payload``, ``scales``, ``token`` (source token, int32), ``ids`` (topk
    int32 expert ids local to the destination, -1 elsewhere), ``weights`` (topk router weights, when they travel).
    Parts that do not travel have no bytes.

    Example: fp8_block128, hidden 7168, topk 8 with weights: payload at 0, scales at 7168, token at 7392, ids at 7408,
    weights at 7440, 7472 bytes in all.
    """

    format: Format
    hidden_size: int
    topk: int
    with_ids: bool = True
    weight_dtype: torch.dtype | None = None

    @property
    def parts(self) -> RegionTable:
        """The parts of one message as regions."""
        fmt, hidden = self.format, self.hidden_size
        parts: list[tuple[str, torch.dtype, tuple[int, ...]]] = [("payload", torch.uint8, (fmt.payload_bytes(hidden),))]
        if fmt.scale_bytes(hidden):
            parts.append(("scales", torch.uint8, (fmt.scale_bytes(hidden),)))
        if self.with_ids:
            parts += [("token", torch.int32, (1,)), ("ids", torch.int32, (self.topk,))]
        if self.weight_dtype is not None:
            parts.append(("weights", self.weight_dtype, (self.topk,)))
        return RegionTable.pack(*parts, alignment=ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of one message, a multiple of 16."""
        return align_up(self.parts.regions[-1].end, ALIGNMENT)

    def field(self, messages: Tensor, name: str) -> Tensor:
        """Return part ``name`` of ``messages`` [n, nbytes] uint8 as a strided view [n, width] of its dtype."""
        region = self.parts[name]
        return messages[:, region.offset : region.end].view(region.dtype)
