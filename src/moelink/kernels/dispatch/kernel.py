"""Run dispatch as one launch (``ep_fused_dispatch_kernel``) or as two (``..._async_kernel``, ``..._wait_kernel``).

The number of a CTA decides its role. Low numbers send (``kernels.dispatch.send``), high numbers receive
(``kernels.dispatch.receive``). A CTA waits only for signals of other ranks and for CTAs with lower numbers. Senders
never wait for other ranks to *receive* in this call, only for the credits that peers grant as they begin to send. So
senders finish on every rank if CTAs with lower numbers start first. The same kernel therefore runs on a GPU, where CTAs
start in ascending order as SMs become free, and in the interpreter, where they run one after the other.

A dispatch over cached routing (``S.CACHED_ROUTING``) uses the same launches with other roles
(``kernels.dispatch.send_cached``, ``kernels.dispatch.receive_cached``); no other file asks. They read ``notes`` and
``cached`` (``received`` and ``counts`` of the earlier call) where another dispatch would count. Otherwise the kernels
fill in ``notes`` and do not read ``cached``. Where they count, and one receiver plans for all (``S.ROW_TABLE``), the
receiver role is ``kernels.dispatch.receive_planned``.

Between nodes with two levels (``S.TWO_LEVEL``) the last CTAs of the sender role have a role of their own, that of the
forwarder (``kernels.nodes.forward``), which waits for senders of other ranks, as receivers do.

Where a later launch writes the scales (``S.SCALES_LATER``, ``kernels.dispatch.scales``), the receiver stores in
``outputs.scales`` the number of the message that each row came with.

The host takes no part in the protocol: the CTAs of each role count calls in device memory, and the arguments of a
launch hold nothing that changes between two replays of a CUDA graph. docs/protocol.md has the proofs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moelink.kernels.dispatch.receive import receive
from moelink.kernels.dispatch.receive_cached import receive_cached
from moelink.kernels.dispatch.receive_planned import receive_planned
from moelink.kernels.dispatch.send import send
from moelink.kernels.dispatch.send_cached import send_cached
from moelink.kernels.launch.roles import run_role, run_roles
from moelink.kernels.nodes.forward import send_and_forward
from moelink.memory.protocol import DISPATCH_RECEIVED, DISPATCH_SENT

_SENT, _RECEIVED = tl.constexpr(DISPATCH_SENT), tl.constexpr(DISPATCH_RECEIVED)


@triton.jit
def ep_fused_dispatch_kernel(peers, inputs, outputs, notes, cached, numbers, S: tl.constexpr):
    """Send with CTAs [0, ``numbers.senders``) and receive with the others of ``numbers.programs``."""
    sending = (peers, inputs, notes, cached, numbers)
    receiving = (peers, outputs, notes, cached, numbers)
    if S.TWO_LEVEL:
        run_roles(
            send_and_forward, (send_cached if S.CACHED_ROUTING else send, sending),
            receive_cached if S.CACHED_ROUTING else receive, receiving, peers.control, _SENT, numbers, S,
        )  # fmt: skip
    elif S.CACHED_ROUTING:
        run_roles(send_cached, sending, receive_cached, receiving, peers.control, _SENT, numbers, S)
    elif S.ROW_TABLE:
        run_roles(send, sending, receive_planned, receiving, peers.control, _SENT, numbers, S)
    else:
        run_roles(send, sending, receive, receiving, peers.control, _SENT, numbers, S)


@triton.jit
def ep_dispatch_async_kernel(peers, inputs, notes, cached, numbers, S: tl.constexpr):
    """Run the sender role alone, with two levels together with the forwarder's."""
    arguments = (peers, inputs, notes, cached, numbers)
    if S.TWO_LEVEL:
        run_role(
            send_and_forward, (send_cached if S.CACHED_ROUTING else send, arguments), peers.control, _SENT,
            numbers.programs, S,
        )  # fmt: skip
    else:
        run_role(send_cached if S.CACHED_ROUTING else send, arguments, peers.control, _SENT, numbers.programs, S)


@triton.jit
def ep_dispatch_wait_kernel(peers, outputs, notes, cached, numbers, S: tl.constexpr):
    """Run the receiver role alone."""
    arguments = (peers, outputs, notes, cached, numbers)
    role: tl.constexpr = receive_cached if S.CACHED_ROUTING else receive_planned if S.ROW_TABLE else receive
    run_role(role, arguments, peers.control, _RECEIVED, numbers.programs, S)
