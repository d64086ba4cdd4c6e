"""Find the peers: from torchrun's variables, or a ProcessGroup, to a store and process groups of moelink's own."""

from __future__ import annotations

import dataclasses
import os
import re
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
        control: gloo group, used by moelink alone, for headers and set-up; None for one rank.
        data: group that rows travel over, None until :func:`add_data_group`.
        group: the caller's group; None for one rank, and for survivors, which form no group of torch's.
        store: store that only these ranks use: a prefix of the default group's store, or the store that one of the
            survivors hosts.
    """

    rank: int
    world_size: int
    control: Any = None
    data: Any = None
    group: Any = None
    store: Any = None


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if a launcher (torchrun) started this process as one rank of several."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def plain_device(device: torch.device | str) -> torch.device:
    """Return ``device`` as its tensors name it: with an index on CUDA, without one on CPUs.

    Raises:
        ConfigError: this machine has no such device.
    """
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
    """Choose this rank's device: the CUDA device of LOCAL_RANK, or the CPU without CUDA."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def connect(group: dist.ProcessGroup | None, device: torch.device, timeout: float) -> World:
    """Find the peers. Collective over ``group``, or over torchrun's world; without either this rank is alone.

    An initialised default group is used and never destroyed. The groups made here are not registered with torch, so a
    failed call leaves the caller's groups intact, and closing one communicator cannot disturb another.

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
            # Translate time-outs only. A port in use, or a host name that does not resolve, names no missing rank.
            if not re.search(r"time(d )?out", str(error), re.IGNORECASE):
                raise
            raise _late(int(os.environ["RANK"]), [], str(error)) from error
    ranks = dist.get_process_group_ranks(group)
    rank, world_size = dist.get_rank(group), len(ranks)
    if rank < 0:
        raise UnsupportedError(
            "group: expected a group with this process in it, got one without; call init on the members of the group "
            "only"
        )
    if world_size == 1:
        return World(rank=0, world_size=1)
    return meet(_room(ranks, rank), rank, world_size, timeout, group=group or dist.group.WORLD)


def meet(store: Any, rank: int, world_size: int, timeout: float, *, group: Any = None) -> World:
    """Meet the ranks that use ``store``, which must be empty and theirs alone. Collective over them.

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
    """Make another world of the same ranks, under a prefix of their store. Collective; raises as :func:`meet`."""
    if world.store is None:
        return World(rank=0, world_size=1)
    corner = str(world.store.add(f"count/{world.rank}", 1))
    return meet(PrefixStore(corner, world.store), world.rank, world.world_size, timeout, group=world.group)


def add_data_group(world: World, device: torch.device, timeout: float) -> World:
    """Add the group that rows travel over: the control group on CPU, an NCCL group on CUDA."""
    if device.type != "cuda" or world.control is None:
        return dataclasses.replace(world, data=world.control)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    data = dist.ProcessGroupNCCL(PrefixStore("data", world.store), world.rank, world.world_size, options)
    return dataclasses.replace(world, data=data)


def _missing(store: Any, world_size: int) -> list[int]:
    """List the ranks that have not arrived; empty when the store does not answer."""
    try:
        return [peer for peer in range(world_size) if not store.check([f"arrived/{peer}"])]
    except RuntimeError:
        return []


def _room(ranks: Sequence[int], rank: int) -> Any:
    """Make a prefix of the default group's store that this communicator alone uses.

    The n-th communicator over the same ranks gets the n-th prefix. Each rank counts its communicators in the store, so
    this process keeps no state.
    """
    base = PrefixStore(f"moelink/{'.'.join(map(str, ranks))}", dist.distributed_c10d._get_default_store())
    return PrefixStore(str(base.add(f"count/{rank}", 1)), base)


def _late(rank: int, missing: Sequence[int], detail: str) -> PeerTimeoutError:
    peer = missing[0] if missing else -1
    return PeerTimeoutError(rank=rank, peer=peer, phase="init", call=0, expected=0, got=None, detail=detail[:200])


def gather_bytes(world: World, payload: bytes, timeout: float) -> list[bytes]:
    """Gather every rank's ``payload`` (at most 1 MiB), by rank. Sizes are exchanged and checked before the bytes.

    Raises:
        PeerTimeoutError: a rank did not take part within ``timeout`` seconds.
        UnsupportedError: a rank's payload is larger than 1 MiB.
    """
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
        raise UnsupportedError(
            f"init: expected at most {_LIMIT} bytes from each rank, got {sizes}; install one moelink version everywhere"
        )
    padded = torch.frombuffer(bytearray(payload.ljust(max(sizes) + 1, b"\0")), dtype=torch.uint8)
    return [bytes(data[:size].numpy().tobytes()) for data, size in zip(gather(padded), sizes, strict=True)]


def release(world: World) -> None:
    """Shut down the data group that :func:`add_data_group` made. The caller's group is left alone."""
    if world.data is not None and world.data is not world.control:
        world.data.shutdown()
