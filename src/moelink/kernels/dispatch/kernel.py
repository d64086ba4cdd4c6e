"""Dispatch as one launch (``ep_fused_dispatch_kernel``) or two (``..._async_kernel``, ``..._wait_kernel``).

Roles go by program id: the low ids send (``kernels.dispatch.send``), the high ids receive
(``kernels.dispatch.receive``). A program waits only for other ranks' signals and for lower ids. Senders wait for
nothing that other ranks *receive* in this call, only for what their senders tell first thing, so they finish on every
rank, whatever order programs of a launch run in as long as lower ids start first: so the same kernel runs on a GPU,
where ids start in order as multiprocessors become free, and in the interpreter, where they run one after the other.

A dispatch over the routing of an earlier one (``S.CACHED_ROUTING``) is the same launches with other roles: ``notes``
and ``cached`` (its ``received`` and ``counts``) say what would be counted
(``kernels.dispatch.send_cached``). Otherwise ``notes`` are filled in, and ``cached`` is not read.

Where another launch lays scales out (``S.SCALES_LATER``, ``kernels.dispatch.scales``), ``scales_out`` gets the number
of the message that each row came with.

Why the next call cannot overtake: a sender's first store of call n + 1 comes after every destination has told that it
drained call n, which it does in its next launch, so after all programs of its receiver had read call n
(``kernels.sync.credit``). Why it needs no host: call numbers are counted in device memory by the programs of each role,
and a launch's arguments hold nothing that changes between two replays of a graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moelink.kernels.dispatch.receive import receive
from moelink.kernels.dispatch.send import send
from moelink.kernels.dispatch.send_cached import send_cached
from moelink.kernels.launch.sm_limit import run_role, run_roles
from moelink.memory.protocol import DISPATCH_RECEIVED, DISPATCH_SENT

_SENT, _RECEIVED = tl.constexpr(DISPATCH_SENT), tl.constexpr(DISPATCH_RECEIVED)


@triton.jit
def ep_fused_dispatch_kernel(peers, inputs, outputs, notes, cached, numbers, S: tl.constexpr):
    """CTAs [0, numbers.senders) send, the others, of ``numbers.programs``, receive."""
    sending = (peers, inputs, notes, cached, numbers)
    receiving = (peers, outputs, notes, cached, numbers)
    if S.CACHED_ROUTING:
        run_roles(send_cached, sending, receive, receiving, peers.control, _SENT, numbers, S)
    else:
        run_roles(send, sending, receive, receiving, peers.control, _SENT, numbers, S)


@triton.jit
def ep_dispatch_async_kernel(peers, inputs, notes, cached, numbers, S: tl.constexpr):
    """The sender role alone."""
    arguments = (peers, inputs, notes, cached, numbers)
    if S.CACHED_ROUTING:
        run_role(send_cached, arguments, peers.control, _SENT, numbers.programs, S)
    else:
        run_role(send, arguments, peers.control, _SENT, numbers.programs, S)


@triton.jit
def ep_dispatch_wait_kernel(peers, outputs, notes, cached, numbers, S: tl.constexpr):
    """The receiver role alone."""
    run_role(receive, (peers, outputs, notes, cached, numbers), peers.control, _RECEIVED, numbers.programs, S)
