"""Overwrite expired rows in place: a debugging aid of ``zero_copy``.

The host cannot see a late reader of tensors that were taken from an output before the next call began, or one in the
replay of a CUDA graph (``moelink.lease``). With MOELINK_DEBUG=1 this kernel is launched before each launch that ends
rows, and fills the messages with ones: NaN in bf16, fp16, fp32, fp64 and fp8. A late reader sees these values instead
of old rows, or rows of a peer.

Why it overwrites no message of the next call: peers store that only after this rank has granted credit for the dispatch
whose rows these are, which the launch after this one does, in stream order. Where credit has been granted already,
because that dispatch was followed by a combine, the kernel does nothing. The words that say so are on the device, so
this also holds in replays: the own credit word (a rank grants credit to itself, too), and the calls that were received.

Example: dispatch 3 was received, and this rank has granted credit for 2 calls: its rows are filled with ones. Combine
then grants credit for 3 calls; before dispatch 4 nothing is filled.
"""

import triton
import triton.language as tl

from moelink.kernels.sync.credit import credit_at
from moelink.kernels.sync.signals import I32, calls_made, own_block
from moelink.memory.protocol import DISPATCH_RECEIVED, PHASE_DISPATCH

_READ = tl.constexpr(DISPATCH_RECEIVED)
_PHASE = tl.constexpr(PHASE_DISPATCH)
_AT_ONCE = tl.constexpr(1024)


@triton.jit
def ep_overwrite_expired_rows_kernel(peers, numbers, S: tl.constexpr):
    """Fill this rank's messages with ones, if it has granted no credit for them, with any number of CTAs."""
    mine = own_block(peers.control, S)
    if calls_made(peers.control, _READ) > tl.load(credit_at(mine, _PHASE, numbers.me, S)):
        i = tl.arange(0, _AT_ONCE)
        words = tl.full([], S.WORLD_SIZE * S.MAX_TOKENS, tl.int64) * (S.MESSAGE_BYTES // 4)
        to = (mine + S.OFFSET_MESSAGES).to(I32)
        begin = tl.program_id(0).to(tl.int64) * _AT_ONCE
        while begin < words:
            tl.store(to + begin + i, i * 0 - 1, mask=begin + i < words)
            begin += tl.num_programs(0).to(tl.int64) * _AT_ONCE
