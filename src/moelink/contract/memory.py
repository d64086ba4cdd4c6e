"""Symmetric memory for the launchers, where every rank is a process of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moelink.contract.params import EPParams
from moelink.control.group import connect, default_device, gather_bytes, part, plain_device, setting_up
from moelink.errors import ArgumentError
from moelink.memory import SymmetricMemory
from moelink.transports.build import memory_of_group


def create_memory(
    params: EPParams, *, device: torch.device | str | None = None, group: dist.ProcessGroup | None = None
) -> SymmetricMemory:
    """Allocate a block of ``params.nbytes`` bytes on every rank, zero, for :func:`~moelink.contract.ep_init`.

    Collective: the contract's ``ep.init`` allocates, too. Processes on GPUs use torch's symmetric memory, between nodes
    NVSHMEM's, and processes on CPUs shared memory without a name. The block is the caller's: close ``ep`` first, then
    it, on every rank. A process that drives all ranks uses ``moelink.memory.create_all``.

    Args:
        params: of the launchers, the same on every rank.
        device: of this rank; default CUDA device LOCAL_RANK, or the CPU without CUDA.
        group: the ranks, in their order; default all, by torch's default group or by torchrun's variables, from which
            a default group is then made. One process alone needs neither.

    Returns:
        This rank's view. With ``skip_a2a`` it holds this rank's block alone: pass ``my_rank`` to ``ep_init``.

    Raises:
        ArgumentError: there are not ``params.n_ranks`` ranks; raised on every rank.
        ConfigMismatchError: ranks ask for blocks of different sizes.
        PeerTimeoutError: a rank did not arrive within ``params.timeout`` seconds.
        UnsupportedError: memory cannot be shared between these devices; the message says why.
    """
    place = default_device() if device is None else plain_device(device)
    world = connect(group, place, params.timeout)
    with setting_up(world):
        # No rank may leave, or raise, before all have met (control.meeting), and skip_a2a exchanges nothing below.
        gather_bytes(world, b"", params.timeout)
        if world.world_size != params.n_ranks:
            raise ArgumentError("group", f"{params.n_ranks} ranks, as params say", f"{world.world_size}")
        memory = memory_of_group(params.config(world.rank), params.nbytes, place, world, name="contract")
    part(world)
    return memory
