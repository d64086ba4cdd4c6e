"""Fill a new block for ranks of which some are masked: the words that masked ranks would have written.

A membership change gives every rank that goes on a new block at the address of the old one, so its words begin anew.
Nobody writes the words of a masked rank there, for which kernels wait. So each rank writes them into its own block
once, before any peer maps it, as if the masked rank had been in all calls to come and had nothing to send:

==================  ===============================================================================================
credit              of any call: stores and puts to it end in memory that nobody else maps, or nowhere
counts              LL words of no call, which no wait awaits; the values are 0, but for the options, which
                    match any others
counts_flag         of any call, between nodes: the put of its counts has arrived
marks_flag          of any call, with two levels: no token comes by it (the marks are zeros)
combine_head        of any call, with a status that takes no part in comparisons
control             some ranks are masked: home awaits no row of those whose combine_status says so
                    (``kernels.combine.arrivals.awaited_slots``), with flags or in Lamport slots
==================  ===============================================================================================

No kernel has a mask among its constants or arguments: a captured graph, whose addresses are those of the new blocks,
finds the membership where it waits. Beside words that it reads in any case, combine's home role looks at one control
word for each token.

Example: of ranks 0, 1, 2 rank 1 is masked. In the block of rank 0 ``credit[:, 1]`` and ``combine_head[1]`` are 2**62.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moelink.memory.protocol import (
    ANY_CALL,
    CODE_TIMEOUT,
    MASKED_CALL,
    OPTIONS_OF_NOBODY,
    SOME_MASKED,
    STATUS_OF_NOBODY,
)
from moelink.memory.workspace import Workspace

_OPTIONS = 5
"""The word of the counts' header with the options."""


def poison(block: Tensor, *, rank: int, missing: int, workspace: Workspace) -> None:
    """Poison ``block`` in the name of ``rank``, which has gone on without ``missing``: waits in it end, with an error
    that names ``missing``."""
    words = workspace.regions["poisons"].view(block)[rank]
    words[1:] = words.new_tensor([rank, missing, 0, 0, 0, 0, 0])
    words[0] = CODE_TIMEOUT
    workspace.regions["poison"].view(block)[0] = rank + 1


def fill_in_for(masked: Sequence[int], block: Tensor, *, rank: int, workspace: Workspace) -> None:
    """Write the words of ranks ``masked`` into ``block``, [nbytes] uint8 of zeros, of ``rank``, which no peer has
    mapped yet."""
    regions = workspace.regions
    ranks = list(masked)
    if not ranks:
        return
    parts = {name: regions[name].view(block) for name in ("credit", "counts", "combine_head", "combine_status")}
    parts["credit"][:, ranks] = ANY_CALL
    parts["counts"][ranks] = MASKED_CALL << 32
    parts["counts"][ranks, _OPTIONS] = (MASKED_CALL << 32) + OPTIONS_OF_NOBODY
    parts["combine_head"][ranks] = ANY_CALL
    parts["combine_status"][ranks] = STATUS_OF_NOBODY
    regions["control"].view(block)[SOME_MASKED] = 1
    if workspace.inter_node_ranks:
        regions["counts_flag"].view(block)[ranks] = ANY_CALL
    if workspace.two_level:
        size, nodes = workspace.node_size, workspace.other_nodes + 1
        peers = [peer for peer in ranks if (peer - rank) % size == 0]
        regions["marks_flag"].view(block)[[(peer - rank) // size % nodes - 1 for peer in peers]] = ANY_CALL
