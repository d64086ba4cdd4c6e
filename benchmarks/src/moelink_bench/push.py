"""Store from every SM to all peers at once: the kernel that measures the ceiling."""

import triton
import triton.language as tl

BLOCK = 4096
"""int32 words that a CTA copies at a time; regions are multiples of it."""


@triton.jit  # type: ignore[untyped-decorator]
def ceiling_push_kernel(table, source, rank, words, W: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Copy region p of ``source`` to region ``rank`` of rank p's block, for every other rank p.

    A block holds W regions of ``words`` int32 words, a multiple of BLOCK, and fewer than 2**31 of them in all;
    ``table`` has the blocks' addresses.
    CTAs are dealt out over the peers, the next rank first, so that all links are in use from the start to the end
    and no peer is everybody's first.

    Example: rank 1 of 3 with 4 CTAs: CTAs 0 and 2 copy the even and odd blocks for rank 2, 1 and 3 for rank 0.
    """
    pid = tl.program_id(0)
    ctas = tl.num_programs(0) // (W - 1)
    peer = (rank + 1 + pid % (W - 1)) % W
    base = tl.load(table + peer)
    target = tl.multiple_of(base.to(tl.pointer_type(tl.int32)), 16) + tl.multiple_of(rank * words, BLOCK)
    origin = source + tl.multiple_of(peer * words, BLOCK)
    i = tl.arange(0, BLOCK)
    for block in range(pid // (W - 1), words // BLOCK, ctas):
        tl.store(target + block * BLOCK + i, tl.load(origin + block * BLOCK + i))
