"""Carry one rank's puts to ranks of other nodes: by NVSHMEM, or by a simulated network proxy on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from moelink.errors import MoelinkError
from moelink.memory.blocks import SymmetricMemory
from moelink.memory.nodes.network_proxy import NetworkProxy
from moelink.memory.nodes.nvshmem import device_library, initialize_module, refuse_rocm
from moelink.memory.workspace import Workspace


class Network:
    """The network of one rank.

    Attributes:
        table: the kernels' ``table``: addresses of the blocks of this node's ranks, 0 for all others, followed by the
            words that ``kernels.nodes.internode.put`` needs.
        options: compile options of the kernels, hashable.
        tensors: memory outside the blocks that kernels reach through ``table``.
    """

    tensors: tuple[Tensor, ...] = ()

    def __init__(self, table: Tensor, **options: Any) -> None:
        self.table, self.options = table, options

    @property
    def failure(self) -> MoelinkError | None:
        """The error that stopped the network, or None."""
        return None

    def load(self, compiled: Any) -> None:
        """Prepare a kernel that has been loaded onto the device. A second call for the same kernel does nothing."""

    def without(self, masked: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which new blocks come in the place of the old ones, for all ranks but ``masked``: no put
        of before arrives in the new ones, and none of later waits for a rank of ``masked``."""
        return nullcontext()

    def close(self) -> None:
        """Finish the puts under way. Safe to call twice. Raises MoelinkError, once, if that is impossible."""


class OneNode(Network):
    """The network of a single node: the table is the ranks' addresses, and there are no puts."""

    def __init__(self, memory: SymmetricMemory) -> None:
        super().__init__(memory.pointers)


class ProxyNetwork(Network):
    """A simulated network: a proxy thread carries the puts between nodes that are processes, or ranks, of one machine.

    If a rank ends, or drops this object, without :meth:`close`, its puts under way still complete: peers wait for them.
    """

    def __init__(self, memory: SymmetricMemory, workspace: Workspace, rank: int) -> None:
        self.proxy = NetworkProxy(memory, max_puts=workspace.max_puts, seed=rank)
        ring = torch.tensor([self.proxy.ring.data_ptr()], device="cpu")
        super().__init__(torch.cat([intra_node_pointers(memory, workspace, rank), ring]))
        tokens = max(1, workspace.config.max_tokens_per_rank) if workspace.two_level else 0
        staged = torch.zeros(workspace.inter_node_ranks, tokens, workspace.row_bytes, dtype=torch.uint8, device="cpu")
        self.proxy.carry_from(staged)
        self.tensors = (self.proxy.ring, staged)
        self.proxy.start()
        self._finish = weakref.finalize(self, self.proxy.close)

    @property
    def failure(self) -> MoelinkError | None:
        return self.proxy.failure

    def without(self, masked: Sequence[int]) -> AbstractContextManager[None]:
        return self.proxy.without(masked)

    def close(self) -> None:
        self._finish()


class NvshmemNetwork(Network):
    """NVSHMEM: its device functions, linked into the kernels, put bytes into blocks of other nodes.

    Puts under way complete after :meth:`close`, into memory that is never released.
    """

    def __init__(self, memory: SymmetricMemory, workspace: Workspace, rank: int) -> None:
        libraries = (("libnvshmem_device", device_library()),)
        super().__init__(intra_node_pointers(memory, workspace, rank), extern_libs=libraries)
        self._loaded: set[Any] = set()

    def load(self, compiled: Any) -> None:
        """Give the kernel's CUDA module NVSHMEM's state, without which its device functions reach no block."""
        if compiled.module not in self._loaded:
            initialize_module(compiled.module)
            self._loaded.add(compiled.module)


def intra_node_pointers(memory: SymmetricMemory, workspace: Workspace, rank: int) -> Tensor:
    """Return the addresses [world_size] int64 of the blocks of ``rank``'s node; 0 for blocks of other nodes."""
    node = torch.arange(workspace.world_size, device=memory.pointers.device) // workspace.node_size
    return torch.where(node == rank // workspace.node_size, memory.pointers, 0)


def connect(memory: SymmetricMemory, workspace: Workspace, rank: int) -> Network:
    """Make the network of ``rank``.

    Raises:
        UnsupportedError: these devices have no network that moelink can use.
    """
    if workspace.inter_node_ranks == 0:
        return OneNode(memory)
    if memory.local.device.type == "cpu":
        return ProxyNetwork(memory, workspace, rank)
    refuse_rocm(workspace.node_size)
    return NvshmemNetwork(memory, workspace, rank)
