"""Ranks as processes: from torchrun's variables or a ProcessGroup to the groups that moelink talks over."""

from __future__ import annotations

import dataclasses
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from moelink.errors import ConfigError, PeerTimeoutError, UnsupportedError

_LIMIT = 1 << 20


@dataclass(frozen=True)
class World:
    """This rank among its peers.

    Attributes:
        rank, world_size: position and size; 0 and 1 without a launcher.
        control: gloo group of its own for headers and set-up, None for one rank.
        data: group that rows travel over, None until :func:`add_data_group`.
        group: the caller's group; None for one rank, and for survivors, whom no group of torch's knows.
        store: where these ranks find each other: a corner, theirs alone, of the default group's store, or the store
            that one of the survivors hosts.
    """

    rank: int
    world_size: int
    control: Any = None
    data: Any = None
    group: Any = None
    store: Any = None


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """A launcher (torchrun) started this process as one rank of several."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def plain_device(device: torch.device | str) -> torch.device:
    """``device`` as tensors there name it: with its number on CUDA, without on CPUs. ConfigError for what is none."""
    try:
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            "device", "a device of this machine, 'cpu' or 'cuda:0' say", f"{device!r} ({reason})"
        ) from error
    return torch.device("cpu") if place.type == "cpu" else place


def default_device() -> torch.device:
    """This rank's device where none is named: the CUDA device of LOCAL_RANK, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def connect(group: dist.ProcessGroup | None, device: torch.device, timeout: float) -> World:
    """Find the peers. Collective over ``group``, or over torchrun's world, or trivial without either.

    Uses an initialised default group and never destroys it. The groups it adds belong to moelink alone: torch does not
    know them, a failed call leaves the caller's groups intact, and closing one communicator cannot disturb another.

    Raises:
        PeerTimeoutError: a rank did not arrive within ``timeout`` seconds.
        UnsupportedError: this process is not in ``group``.
    """
    if group is None and not dist.is_initialized():
        if not is_launched():
            return World(rank=0, world_size=1)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except dist.DistError as error:
            # Only that nobody came in time: a port that is taken, or a name that is not known, is nobody's absence.
            if not re.search(r"time(d )?out", str(error), re.IGNORECASE):
                raise
            raise _late(int(os.environ["RANK"]), [], str(error)) from error
    ranks = dist.get_process_group_ranks(group)
    rank, world_size = dist.get_rank(group), len(ranks)
    if rank < 0:
        raise UnsupportedError("this process is not a member of the group passed to init")
    if world_size == 1:
        return World(rank=0, world_size=1)
    return meet(_room(ranks, rank), rank, world_size, timeout, group=group or dist.group.WORLD)


def meet(store: Any, rank: int, world_size: int, timeout: float, *, group: Any = None) -> World:
    """The world of the ranks that use ``store``, which is theirs alone and empty. Collective over them.

    Raises:
        PeerTimeoutError: a rank did not arrive within ``timeout`` seconds.
    """
    limit = timedelta(seconds=timeout)
    try:
        store.set(f"arrived/{rank}", b"1")
        store.wait([f"arrived/{peer}" for peer in range(world_size)], limit)
        control: Any = dist.ProcessGroupGloo(PrefixStore("control", store), rank, world_size, limit)
    except RuntimeError as error:
        raise _late(rank, _missing(store, world_size), str(error)) from error
    return World(rank, world_size, control=control, group=group, store=store)


def meet_again(world: World, timeout: float) -> World:
    """Another world of the same ranks, in a corner of their store. Collective over them; raises as :func:`meet`."""
    if world.store is None:
        return World(rank=0, world_size=1)
    corner = str(world.store.add(f"count/{world.rank}", 1))
    return meet(PrefixStore(corner, world.store), world.rank, world.world_size, timeout, group=world.group)


def add_data_group(world: World, device: torch.device, timeout: float) -> World:
    """``world`` with the group that rows travel over: the control group on CPU, NCCL on CUDA."""
    if device.type != "cuda" or world.control is None:
        return dataclasses.replace(world, data=world.control)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    data = dist.ProcessGroupNCCL(PrefixStore("data", world.store), world.rank, world.world_size, options)
    return dataclasses.replace(world, data=data)


def _missing(store: Any, world_size: int) -> list[int]:
    """Ranks that have not said they arrived, as far as the store still tells."""
    try:
        return [peer for peer in range(world_size) if not store.check([f"arrived/{peer}"])]
    except RuntimeError:
        return []


def _room(ranks: Sequence[int], rank: int) -> Any:
    """A corner of the default group's store that this communicator alone uses.

    The n-th communicator over the same ranks gets the n-th corner; each rank counts its own, in the store, so that
    nothing is kept in this process.
    """
    base = PrefixStore(f"moelink/{'.'.join(map(str, ranks))}", dist.distributed_c10d._get_default_store())
    return PrefixStore(str(base.add(f"count/{rank}", 1)), base)


def _late(rank: int, missing: Sequence[int], detail: str) -> PeerTimeoutError:
    peer = missing[0] if missing else -1
    return PeerTimeoutError(rank=rank, peer=peer, phase="init", call=0, expected=0, got=None, detail=detail[:200])


def gather_bytes(world: World, payload: bytes, timeout: float) -> list[bytes]:
    """Every rank's ``payload`` (at most 1 MiB), by rank. Sizes are exchanged and checked before the bytes."""
    if world.control is None:
        return [payload]
    limit = timedelta(seconds=timeout)

    def gather(mine: torch.Tensor) -> list[torch.Tensor]:
        everyone = [torch.empty_like(mine) for _ in range(world.world_size)]
        try:
            world.control.allgather([everyone], [mine]).wait(limit)
        except RuntimeError as error:
            raise _late(world.rank, [], str(error)) from error
        return everyone

    sizes = [int(size) for size in gather(torch.tensor([len(payload)], device="cpu"))]
    if max(sizes) > _LIMIT or min(sizes) < 0:
        raise UnsupportedError(f"init payloads of {sizes} bytes, at most {_LIMIT} allowed")
    padded = torch.frombuffer(bytearray(payload.ljust(max(sizes) + 1, b"\0")), dtype=torch.uint8)
    return [bytes(data[:size].numpy().tobytes()) for data, size in zip(gather(padded), sizes, strict=True)]


def release(world: World) -> None:
    """Shut the groups that :func:`connect` added down (never the caller's)."""
    if world.data is not None and world.data is not world.control:
        world.data.shutdown()


def encode_fields(fields: dict[str, str]) -> bytes:
    """Length-prefixed text pairs; the inverse is :func:`decode_fields`."""
    parts = [text.encode() for pair in fields.items() for text in pair]
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def decode_fields(data: bytes) -> dict[str, str]:
    """The inverse of :func:`encode_fields`. Raises ValueError or struct.error for anything else."""
    parts, offset = [], 0
    while offset < len(data):
        (size,) = struct.unpack_from("<I", data, offset)
        if offset + 4 + size > len(data):
            raise ValueError(f"a part of {size} bytes, {len(data) - offset - 4} are left")
        parts.append(data[offset + 4 : offset + 4 + size].decode())
        offset += 4 + size
    return dict(zip(parts[::2], parts[1::2], strict=True))
