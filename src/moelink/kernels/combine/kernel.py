"""Run combine as one launch (``ep_fused_combine_kernel``) or as two (``..._async_kernel``, ``..._wait_kernel``).

CTAs with low numbers have the expert role (``kernels.combine.send``), those with high numbers the home role
(``kernels.combine.reduce``). As in dispatch, senders wait only for credit for the previous call, which peers grant as
they begin a call. So senders finish independently of their peers. The home role waits only for other ranks.

Between nodes with two levels (``S.TWO_LEVEL``) the last CTAs of the expert role have a role of their own, that of the
collector (``kernels.nodes.collect``), which waits for the expert role of other ranks.

These kernels must be compiled without fused multiply-add, because products are rounded before they are added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moelink.kernels.combine.reduce import gather_home
from moelink.kernels.combine.send import send_tokens_back
from moelink.kernels.launch.roles import run_role, run_roles
from moelink.kernels.nodes.collect import send_and_collect
from moelink.memory.protocol import COMBINE_RECEIVED, COMBINE_SENT

_SENT, _RECEIVED = tl.constexpr(COMBINE_SENT), tl.constexpr(COMBINE_RECEIVED)


@triton.jit
def ep_fused_combine_kernel(peers, inputs, outputs, notes, numbers, S: tl.constexpr):
    """Send rows back with CTAs [0, ``numbers.senders``) and reduce with the others of ``numbers.programs``."""
    sending = (peers, inputs, notes, numbers)
    gathering = (peers, inputs, outputs, notes, numbers)
    if S.TWO_LEVEL:
        run_roles(send_and_collect, sending, gather_home, gathering, peers.control, _SENT, numbers, S)
    else:
        run_roles(send_tokens_back, sending, gather_home, gathering, peers.control, _SENT, numbers, S)


@triton.jit
def ep_combine_async_kernel(peers, inputs, notes, numbers, S: tl.constexpr):
    """Run the expert role alone, with two levels together with the collector's."""
    arguments = (peers, inputs, notes, numbers)
    run_role(
        send_and_collect if S.TWO_LEVEL else send_tokens_back, arguments, peers.control, _SENT, numbers.programs, S
    )


@triton.jit
def ep_combine_wait_kernel(peers, inputs, outputs, notes, numbers, S: tl.constexpr):
    """Run the home role alone."""
    arguments = (peers, inputs, outputs, notes, numbers)
    run_role(gather_home, arguments, peers.control, _RECEIVED, numbers.programs, S)
