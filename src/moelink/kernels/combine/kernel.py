"""Combine as one launch (``ep_fused_combine_kernel``) or two (``..._async_kernel``, ``..._wait_kernel``).

Low program ids have the expert role (``kernels.combine.send``), high ids the home role (``kernels.combine.reduce``). As
in dispatch, senders wait only for the previous call to be drained, which peers tell as they begin a call, and so finish
whatever else the peers do; the home role waits only for other ranks. Compile without fused multiply-add: products are
rounded before they are added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moelink.kernels.combine.reduce import gather_home
from moelink.kernels.combine.send import send_tokens_back
from moelink.kernels.launch.sm_limit import run_role, run_roles
from moelink.memory.protocol import COMBINE_RECEIVED, COMBINE_SENT

_SENT, _RECEIVED = tl.constexpr(COMBINE_SENT), tl.constexpr(COMBINE_RECEIVED)


@triton.jit
def ep_fused_combine_kernel(peers, inputs, outputs, notes, numbers, S: tl.constexpr):
    """CTAs [0, numbers.senders) send rows back, the others, of ``numbers.programs``, gather them."""
    sending = (peers, inputs, notes, numbers)
    gathering = (peers, inputs, outputs, notes, numbers)
    run_roles(send_tokens_back, sending, gather_home, gathering, peers.control, _SENT, numbers, S)


@triton.jit
def ep_combine_async_kernel(peers, inputs, notes, numbers, S: tl.constexpr):
    """The expert role alone."""
    run_role(send_tokens_back, (peers, inputs, notes, numbers), peers.control, _SENT, numbers.programs, S)


@triton.jit
def ep_combine_wait_kernel(peers, inputs, outputs, notes, numbers, S: tl.constexpr):
    """The home role alone."""
    arguments = (peers, inputs, outputs, notes, numbers)
    run_role(gather_home, arguments, peers.control, _RECEIVED, numbers.programs, S)
