"""What carries puts to ranks of other nodes, for one rank: made from its memory, handed to its launches."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from moelink.errors import MoelinkError
from moelink.memory.base import SymmetricMemory
from moelink.memory.network_proxy import Courier
from moelink.memory.nvshmem import device_library, initialize_module, refuse_rocm
from moelink.memory.workspace import Workspace


class Network(Protocol):
    """The network of one rank.

    Attributes:
        table: what kernels get as ``table``: addresses of the blocks of this node's ranks, 0 for all others, and behind
            them what ``kernels.sync.internode.put`` needs.
        options: compile options of the kernels, hashable.
        tensors: memory outside the blocks that kernels reach by what is in ``table``.
    """

    table: Tensor
    options: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def failure(self) -> MoelinkError | None:
        """Why nothing is carried any more, or None."""

    def load(self, compiled: Any) -> None:
        """Prepare a kernel that has been loaded onto the device. For one that is prepared nothing happens."""

    def close(self) -> None:
        """End what is under way. Safe to call twice. Raises MoelinkError, once, if that cannot be."""


class OneNode:
    """All ranks address one another: the table is their addresses, and nothing is carried."""

    failure: MoelinkError | None = None
    tensors: tuple[Tensor, ...] = ()

    def __init__(self, memory: SymmetricMemory) -> None:
        self.table = memory.pointers
        self.options: dict[str, Any] = {}

    def load(self, compiled: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class CourierNetwork:
    """:class:`~moelink.memory.network_proxy.Courier`: nodes that are processes, or only ranks, of one machine.

    A rank that ends, or lets go of this, without :meth:`close` has done its part of the last call, and what it put is
    carried to its end nevertheless: peers wait for it.
    """

    def __init__(self, memory: SymmetricMemory, workspace: Workspace, rank: int) -> None:
        self.courier = Courier(memory, max_puts=workspace.max_puts, seed=rank)
        ring = torch.tensor([self.courier.ring.data_ptr()], device="cpu")
        self.table = torch.cat([near_pointers(memory, workspace, rank), ring])
        self.options: dict[str, Any] = {}
        self.tensors: tuple[Tensor, ...] = (self.courier.ring,)
        self.courier.start()
        self._finish = weakref.finalize(self, self.courier.close)

    @property
    def failure(self) -> MoelinkError | None:
        """What stopped the courier, or None."""
        return self.courier.failure

    def load(self, compiled: Any) -> None:
        """Interpreted kernels are not loaded."""

    def close(self) -> None:
        """Carry all puts to their ends. Raises MoelinkError, once, if the courier could not."""
        self._finish()


class NvshmemNetwork:
    """NVSHMEM: its device functions are linked into the kernels, and put where they know the peer's block to be."""

    failure: MoelinkError | None = None
    tensors: tuple[Tensor, ...] = ()

    def __init__(self, memory: SymmetricMemory, workspace: Workspace, rank: int) -> None:
        self.table = near_pointers(memory, workspace, rank)
        self.options: dict[str, Any] = {"extern_libs": (("libnvshmem_device", device_library()),)}
        self._loaded: set[Any] = set()

    def load(self, compiled: Any) -> None:
        """Give the kernel's CUDA module NVSHMEM's state: where blocks are, and how they are reached."""
        if compiled.module not in self._loaded:
            initialize_module(compiled.module)
            self._loaded.add(compiled.module)

    def close(self) -> None:
        """Nothing: what is under way ends by itself, in memory that stays."""


def near_pointers(memory: SymmetricMemory, workspace: Workspace, rank: int) -> Tensor:
    """[world_size] int64: addresses of the blocks of the ranks of ``rank``'s node, 0 for others."""
    node = torch.arange(workspace.world_size, device=memory.pointers.device) // workspace.node_size
    return torch.where(node == rank // workspace.node_size, memory.pointers, 0)


def connect(memory: SymmetricMemory, workspace: Workspace, rank: int) -> Network:
    """The network of ``rank``.

    Raises:
        UnsupportedError: there is none for these devices.
    """
    if workspace.far_ranks == 0:
        return OneNode(memory)
    if memory.local.device.type == "cpu":
        return CourierNetwork(memory, workspace, rank)
    refuse_rocm(workspace.node_size)
    return NvshmemNetwork(memory, workspace, rank)
