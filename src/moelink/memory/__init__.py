"""Allocate symmetric memory: a block of equal size on every rank, addressable by all ranks of a machine.

==========================  =====================================================================
:class:`PosixMemory`        processes on CPUs: POSIX shared memory
:class:`TorchMemory`        processes with a CUDA device each: torch's symmetric memory
:func:`create_all`          one process, all ranks: CPU tensors, or CUDA devices with peer access
:class:`NvshmemMemory`      the same on several nodes: only blocks of a rank's own node are addressed
==========================  =====================================================================

Between nodes a :class:`Network` (made by :func:`connect`) carries bytes from block to block: NVSHMEM, or a simulated
:class:`NetworkProxy` for nodes that are processes of one machine. :mod:`moelink.memory.workspace` lists the regions of
a block, :mod:`moelink.memory.protocol` the numbers that kernels and host share. :mod:`moelink.memory.choices` reads
words of a block beside its calls. :mod:`moelink.memory.bounds`, imported only with ``MOELINK_DEBUG=1``, checks the
accesses of interpreted kernels.
"""

from moelink.memory.blocks import SingleProcessMemory, SymmetricMemory, create_all
from moelink.memory.nodes.network import Network, connect
from moelink.memory.nodes.network_proxy import NetworkProxy
from moelink.memory.nodes.nvshmem import NvshmemMemory
from moelink.memory.posix import PosixMemory
from moelink.memory.setup import MAX_RECORD_BYTES, Exchange
from moelink.memory.torch_symm import Members, TorchMemory

__all__ = [
    "MAX_RECORD_BYTES",
    "NetworkProxy",
    "Exchange",
    "Members",
    "Network",
    "NvshmemMemory",
    "PosixMemory",
    "SingleProcessMemory",
    "SymmetricMemory",
    "TorchMemory",
    "connect",
    "create_all",
]
