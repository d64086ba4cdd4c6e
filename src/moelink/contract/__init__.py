"""The contract's launchers, by their names, over buffers and pointers of the caller.

===========  ==========================================================================================
params       ``EPParams``: the parameters that the contract fixes when it compiles
layouts      ``EPDispatchKernel``: layout functions and launch facts
combine_kernel  ``EPCombineKernel``: the same of combine, and its phases
memory       ``create_memory``: a block on every rank, where ranks are processes
buffers      ``ep_init`` -> ``EPBuffers``: pointer tables, rank, counters, error record
notes        the host's notes of launches, to compare second halves and combines with
tensors      ``TokenHandler``, ``EPRouting``: tensors that the caller allocates once and passes to every call
dispatch     ``ep_fused_dispatch``, ``ep_dispatch_async``, ``ep_dispatch_wait``
combine      ``ep_fused_combine``, ``ep_combine_async``, ``ep_combine_wait``
warmup       the launches that ``EPBuffers.warmup`` compiles
devices      ``distributed_ep_dispatch``, ``distributed_ep_combine``: all devices of one process
===========  ==========================================================================================

``moelink.init`` is the comfortable way to the same kernels: it allocates, tells peers of refused arguments, and raises
errors. These functions allocate nothing and hide nothing. ``docs/contract.md`` has the whole list of names.
"""

from moelink.contract.buffers import EPBuffers, create_memory, ep_init
from moelink.contract.combine import ep_combine_async, ep_combine_wait, ep_fused_combine
from moelink.contract.combine_kernel import EPCombineKernel
from moelink.contract.devices import distributed_ep_combine, distributed_ep_dispatch
from moelink.contract.dispatch import ep_dispatch_async, ep_dispatch_wait, ep_fused_dispatch
from moelink.contract.layouts import EPDispatchKernel
from moelink.contract.params import EPParams
from moelink.contract.tensors import EPRouting, TokenHandler
from moelink.memory.workspace import COMBINE, DISPATCH, RECV, RECV_COUNT, SEND, pointer_table

__all__ = [
    "COMBINE",
    "DISPATCH",
    "RECV",
    "RECV_COUNT",
    "SEND",
    "EPBuffers",
    "EPCombineKernel",
    "EPDispatchKernel",
    "EPParams",
    "EPRouting",
    "TokenHandler",
    "create_memory",
    "distributed_ep_combine",
    "distributed_ep_dispatch",
    "ep_combine_async",
    "ep_combine_wait",
    "ep_dispatch_async",
    "ep_dispatch_wait",
    "ep_fused_combine",
    "ep_fused_dispatch",
    "ep_init",
    "pointer_table",
]
