"""Allocate symmetric memory inside one process: the blocks of all ranks, on CPUs or CUDA devices with peer access.

On CUDA devices a kernel may follow a peer's pointer only after peer access has been enabled from its device to the
other. Torch enables it, once per ordered pair and for all memory of its allocator (expandable segments and
``cudaMallocAsync`` included, which the driver's own call does not cover), when it first copies between the two devices:
so one byte is copied in both directions of every pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moelink.errors import ArgumentError, UnsupportedError
from moelink.memory.base import SymmetricMemory
from moelink.memory.blocks import Blocks


class SingleProcessMemory(Blocks):
    """One rank's view of blocks that all live in this process; a block is free once every rank's view is closed."""


def create_all(devices: Sequence[torch.device | str], nbytes: int) -> list[SymmetricMemory]:
    """Allocate zeroed blocks for ``len(devices)`` ranks, rank r's on ``devices[r]``; return each rank's view of them.

    Args:
        devices: all CPU (as many as wanted) or all CUDA; a device may be there more than once.
        nbytes: bytes of each block, at least 1.

    Raises:
        ArgumentError: no devices, devices of several kinds or of a kind that is not supported, ``nbytes`` below 1.
        UnsupportedError: two of the CUDA devices, named, cannot reach each other.
    """
    places = [_with_index(torch.device(device)) for device in devices]
    kinds = sorted({place.type for place in places})
    if kinds not in (["cpu"], ["cuda"]):
        raise ArgumentError("devices", "CPU devices only or CUDA devices only", ", ".join(map(str, places)) or "none")
    if nbytes < 1:
        raise ArgumentError("nbytes", "at least 1", nbytes)
    _enable_peer_access([place for place in dict.fromkeys(places) if place.type == "cuda"])
    blocks = [torch.zeros(nbytes, dtype=torch.uint8, device=place) for place in places]
    memories: list[SymmetricMemory] = [SingleProcessMemory(rank, blocks) for rank in range(len(blocks))]
    _synchronize(places)  # a peer's kernel must find zeros
    return memories


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` as ``cuda:<current>``, so that equal devices compare equal."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _enable_peer_access(devices: Sequence[torch.device]) -> None:
    """Let kernels on each of ``devices`` address the memory of all the others."""
    pairs = [(a, b) for a in devices for b in devices if a != b]
    for a, b in pairs:
        if not torch.cuda.can_device_access_peer(a, b):
            raise UnsupportedError(
                f"expected peer access between all devices, got none from {a} to {b}; use transport='collective'"
            )
    bytes_of = {device: torch.zeros(1, dtype=torch.uint8, device=device) for device in devices}
    for a, b in pairs:
        bytes_of[a].copy_(bytes_of[b])
    _synchronize(devices)


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
