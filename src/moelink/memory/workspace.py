"""Compute the symmetric workspace: which regions a rank's block holds, from the configuration.

Legend: ``W`` ranks that take part, ``T`` = max_tokens_per_rank, ``K`` = topk, ``L`` = most experts of a rank, ``P``
most sending CTAs, ``E`` experts rounded up to a power of two, ``R`` ranks likewise. A block has the same layout on
every rank. "Written by" names the ranks that store there besides the block's owner.

===================  ====================  ==============================================================
region               shape, dtype          written by, meaning
===================  ====================  ==============================================================
poison               [1] int64             any rank r: 1 + r once a wait of r has expired
poisons              [W, 8] int64          row r by rank r: the error record of that wait
control              [24] int64            own kernels: completed calls, CTAs arrived, statistics
credit               [2, W] int64          rank d: last dispatch, and combine, whose messages or rows from here d has
                                           read; this rank may overwrite them
sm_limit             [4, 388] int32        own kernels: the CTAs that work, with ``num_sms``
block_counts_flag    [P] int64             own sending CTA p: call whose row of ``block_counts`` is stored
block_counts         [P, E + R] int32      own sending CTA p: pairs per expert and messages per rank of its tokens;
                                           [P, R] int64, messages alone, in layout "rank" on one node
message_flag         [W, T] int64          source s: call whose message in this slot is stored
counts               [W, 8 + L] int64      source s: status and totals (``protocol``), rows per local expert, each
                                           word with its call number (``kernels.sync.ll_words``)
row_table            [W + 3, L] int64      own receiver CTA 0: first rows of each source, each word with its call
                                           number (``kernels.dispatch.row_table``); only if it plans for all
firsts               [W, P + 1] int32      source s: first message of each of its sending CTAs; their number
messages             [W, T, message] uint8 source s: its messages, in token order without holes
combine_head         [W] int64             expert's rank r: call whose ``combine_status`` is stored
combine_flag         [W, T, C] int64       expert's rank r: call whose row for the message in this slot is stored,
                                           or a part of it: C is 1, or for small T the blocks of columns of a row
combine_status       [W] int64             expert's rank r: options, and whether it refused the call
combine_kept         [T, K] uint8          the expert's rank: 1 if the row of (token, slot) travels (no pre_reduce)
rows                 [W, T, row] or        expert's rank r: sums of its rows per token (pre_reduce), or every row
                     [T, K, row] uint8
lamport_slots        [W, G, row] uint8     expert's rank r: the same sums in a call of up to G tokens, inverted; zeros
                                           before they arrive (``kernels.sync``); only if G > 0. [1, G, row] if a
                                           rank sends none to itself (``lamport_ranks``)
===================  ====================  ==============================================================

Between nodes, with ``N`` ranks a node, there are also the regions for puts, and the signals behind them
(``kernels.nodes.internode``):

===================  ====================  ==============================================================
idle                 [1] int64             no rank: the data of a put that only signals
counts_flag          [W] int64             inter-node source s: call whose row of ``counts`` has arrived
firsts_flag          [W] int64             inter-node source s: call whose row of ``firsts`` has arrived
row_flag             [W, T, K] int64       inter-node expert's rank r: call whose row for (message, top-k slot) has
                                           arrived (no pre_reduce)
inter_node_kept      [W, T, 16 n] uint8    inter-node expert's rank r: 1 for each slot of the message whose row
                                           travels (no pre_reduce)
staged_counts        [W - N, 8 + L] int64  own kernels, like all regions below: data on its way to other nodes
staged_firsts        [W - N, P + 1] int32
staged_messages      [W - N, T, message]
staged_status        [W - N] int64
staged_kept          [W - N, T, 16 n]
staged_rows          [W - N, T, row], without pre_reduce [capacity, row] uint8
===================  ====================  ==============================================================

In the two-level form (``two_level``), with ``F`` other nodes, ``idle``, ``counts_flag``, ``firsts_flag`` and the staged
counts, firsts and status are as above. Regions of relays replace the others. A relay goes from a rank to the rank of
the same place on another node (``kernels.nodes.levels``); it is a message, and behind it the token's expert ids and its
slots at all ranks:

===================  ====================  ==============================================================
marks_flag           [F] int64             peer on the f-th other node: call whose ``marks`` have arrived
marks                [F, 16 + T] uint8     the same: how many tokens it has, and 1 for each that comes here
relay_flag           [F, T] int64          the same: call whose relay of this token has arrived
relays               [F, T, relay] uint8   the same: relays, by token
node_flag            [F, T] int64          the same: call whose row of this own token has arrived
node_rows            [F, T, row] uint8     the same: sums of its node's rows, by own token
staged_marks         [F, 16 + T] uint8     own kernels, like all regions below
staged_relays        [T, relay] uint8      one copy of a token, for any number of nodes
staged_rows          [F, T, row] uint8
===================  ====================  ==============================================================

There the parts of ``rows`` and ``combine_flag`` for ranks of other nodes hold rows that ranks of this node send through
this one: the part of rank ``m N + j`` has the rows of this node's j-th rank for the rank of this one's place on node m.
If that rank is masked, it has the rows that rank ``m N + j`` itself puts here (``kernels.nodes.past``).

Size: T x (W x message + (W or K) x row) bytes, up to 32 MiB of Lamport slots, or 64 with layout "rank" of two ranks,
and the flags. Nothing is double buffered. Send buffers exist between nodes only.

Example: 8 ranks, 128 tokens, fp8_block128 of 7168, topk 8: messages 8 x 128 x 7552 bytes = 7.4 MiB, rows
8 x 128 x 14336 bytes = 14 MiB, Lamport slots as much, everything else 0.6 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from moelink.arith import align_up, ceil_div
from moelink.formats.base import Format
from moelink.memory.layout import ALIGNMENT, REGION_ALIGNMENT, HomeRow, RegionTable
from moelink.memory.protocol import (
    CONTROL_WORDS,
    COUNT_HEADER,
    MARKS_HEADER,
    MAX_SENDERS,
    POISON_WORDS,
    SM_LIMIT_KINDS,
    SM_LIMIT_WORDS,
)
from moelink.tuning import (
    COMBINE_BLOCK,
    FEW_TOKENS,
    LAMPORT_BYTES,
    LAMPORT_BYTES_OF_COPIES,
    MANY_COPIES,
    MANY_TOKENS,
    ROW_TABLE_RANKS,
    ROW_TABLE_TOKENS,
)


class Sizes(Protocol):
    """The fields of :class:`moelink.EPConfig` that a workspace depends on. The configuration computes sizes by a
    workspace, so it stands on a higher floor."""

    @property
    def num_experts(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_tokens_per_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def node_size(self) -> int: ...
    @property
    def format(self) -> Format: ...
    @property
    def combine_dtype(self) -> torch.dtype: ...
    @property
    def weight_dtype(self) -> torch.dtype: ...
    @property
    def combine_format(self) -> str | None: ...
    @property
    def home_row(self) -> HomeRow: ...
    @property
    def combine_row_bytes(self) -> int: ...
    @property
    def most_total_rows(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def pre_reduce(self) -> bool | None: ...
    @property
    def two_level(self) -> bool | str: ...


_STAGING = ("staged_", "marks", "relays", "node_rows")
"""First letters of the names of regions that hold data on its way between nodes."""


def _power_of_two(count: int) -> int:
    return max(2, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class Workspace:
    """Regions of one rank's block, and the parts of a message on this transport.

    Attributes:
        config: any rank's configuration; the result does not depend on the rank.
        lamport: whether Lamport slots are allowed.
    """

    config: Sizes
    lamport: bool = True

    @property
    def world_size(self) -> int:
        """Ranks that exchange rows: 1 in allreduce mode."""
        return 1 if self.config.mode == "allreduce" else self.config.world_size

    @property
    def node_size(self) -> int:
        """Ranks of a node, which address each other's blocks."""
        return min(self.config.node_size, self.world_size)

    @property
    def inter_node_ranks(self) -> int:
        """Ranks of other nodes."""
        return self.world_size - self.node_size

    @property
    def two_level(self) -> bool:
        """Whether tokens for another node go through one rank there, and rows come home through one."""
        return bool(self.config.two_level) and self.inter_node_ranks > 0

    @property
    def other_nodes(self) -> int:
        """Nodes besides a rank's own."""
        return self.world_size // self.node_size - 1

    @property
    def max_puts(self) -> int:
        """Most puts of one rank that may be under way at a time: those of one dispatch and of one combine, the credits
        of both, and the error record of an expired wait."""
        tokens, few = max(1, self.config.max_tokens_per_rank), 8 * self.inter_node_ranks
        rows = self.inter_node_ranks * tokens
        if self.two_level:  # without masked ranks 2 * self.other_nodes * tokens
            return 2 * rows + few
        return 2 * rows + self.regions["staged_rows"].nbytes // self.row_bytes + few

    @property
    def max_local_experts(self) -> int:
        """Experts of rank 0, which owns at least as many as any other."""
        return ceil_div(self.config.num_experts, self.config.world_size)

    @property
    def senders_count_pairs(self) -> bool:
        """Whether sending CTAs of dispatch count pairs, by whose positions rows find their places.

        Layout "rank" needs no positions. Between nodes the counting CTA (``kernels.dispatch.counts``) needs them.
        """
        return self.config.layout != "rank" or self.inter_node_ranks > 0

    @property
    def block_counts_width(self) -> int:
        """Words of a sending CTA's block counts: a bin per rank, and if it counts pairs one per expert, either number
        rounded up to a power of 2."""
        pairs = _power_of_two(self.config.num_experts) if self.senders_count_pairs else 0
        return pairs + _power_of_two(self.world_size)

    @property
    def message(self) -> RegionTable:
        """Parts of one message: those of :class:`~moelink.memory.layout.DispatchMessage`, and ``positions``.

        These are each slot's position among the pairs of its (source rank, expert), by which rows are unpacked without
        a sort. They are undefined unless ``senders_count_pairs``.
        """
        cfg, fmt = self.config, self.config.format
        topk = (cfg.topk,)
        parts: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
            ("payload", torch.uint8, (fmt.payload_bytes(cfg.hidden_size),)),
            ("scales", torch.uint8, (fmt.scale_bytes(cfg.hidden_size),)),
            ("token", torch.int32, (1,)),
            ("ids", torch.int32, topk),
            ("positions", torch.int32, topk),
            ("weights", cfg.weight_dtype, topk),
        ]
        return RegionTable.pack(*parts, alignment=ALIGNMENT)

    @property
    def message_bytes(self) -> int:
        """Bytes from one message to the next: whole cache lines, so that no packet of a link carries parts of two."""
        return align_up(self.message.regions[-1].end, REGION_ALIGNMENT)

    @property
    def relay(self) -> RegionTable:
        """Parts of one relay: those of a message, then ``experts``, the token's ids over all ranks, and ``slots``, its
        message slot at every rank, -1 for ranks that it does not go to."""
        parts = [(part.name, part.dtype, part.shape) for part in self.message]
        experts, slots = ("experts", torch.int32, (self.config.topk,)), ("slots", torch.int32, (self.world_size,))
        return RegionTable.pack(*parts, experts, slots, alignment=ALIGNMENT)

    @property
    def relay_bytes(self) -> int:
        """Bytes from one relay to the next."""
        return align_up(self.relay.regions[-1].end, REGION_ALIGNMENT)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row of a combine to the next."""
        return align_up(self.config.combine_row_bytes, REGION_ALIGNMENT)

    def note_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the int32 arrays of the routing notes of a dispatch of ``num_tokens`` own tokens:
        ``rows_of_message``, ``message_token``, ``received``, ``sent``, ``slot_of``
        (:class:`~moelink.kernels.records.RoutingNotes`)."""
        cfg, ranks, tokens = self.config, self.world_size, max(1, self.config.max_tokens_per_rank)
        slots = 1 if cfg.layout == "rank" else cfg.topk
        noted, words = ranks, ranks + 1
        if self.two_level:  # and behind them the tokens that this rank forwarded, for ``kernels.nodes.collect``
            noted, words = ranks + self.inter_node_ranks, ranks + 1 + ceil_div(self.other_nodes, 2)
        return (ranks, tokens, slots), (noted, tokens), (words, 2), (ranks + 1,), (num_tokens, ranks)

    @property
    def note_begins(self) -> tuple[int, ...]:
        """Offset of each of these arrays, in words: aligned like a tensor of its own, as kernels expect."""
        sizes = [align_up(math.prod(shape), REGION_ALIGNMENT // 4) for shape in self.note_shapes(1)[:-1]]
        return tuple(accumulate(sizes, initial=0))

    def note_words(self, num_tokens: int) -> int:
        """Return the words of all these arrays together."""
        return self.note_begins[-1] + num_tokens * self.world_size

    @property
    def row_table(self) -> bool:
        """Whether one receiver CTA of dispatch plans the places of rows for all of its rank
        (``kernels.dispatch.row_table``); else each plans for itself (``kernels.dispatch.receive``).

        True with at least ROW_TABLE_RANKS ranks on one node, at most ROW_TABLE_TOKENS tokens per rank, and rows grouped
        by expert (measured in docs/lab/dispatch.md). With layout "rank" a receiver plans no groups, and counts from
        another node come too late for the plan to matter; neither was measured.
        """
        cfg = self.config
        few = cfg.max_tokens_per_rank <= ROW_TABLE_TOKENS and self.world_size >= ROW_TABLE_RANKS
        return few and not self.inter_node_ranks and cfg.layout != "rank"

    @property
    def combine_parts(self) -> int:
        """Parts in which combine sends the row of a message home. With few tokens a row is split over CTAs, because one
        CTA would take several memory latencies for it; a network carries whole rows."""
        cfg = self.config
        few = cfg.max_tokens_per_rank <= FEW_TOKENS and not self.inter_node_ranks
        return ceil_div(cfg.hidden_size, self.combine_block) if few else 1

    @property
    def two_near_ranks(self) -> bool:
        """Whether sums come from two ranks of one node, and travel in the dtype of combine."""
        cfg = self.config
        near = self.world_size == 2 and not self.inter_node_ranks and cfg.mode == "alltoall"
        return near and cfg.combine_format is None

    @property
    def two_copies(self) -> bool:
        """Whether layout "rank" runs on two ranks of one node with more than MANY_COPIES tokens: each result is then
        the sum of two unreduced rows.

        Then CTAs of combine handle more columns at a time, and own rows stay (``kernels.combine.own_rows``). Both
        together are faster from 256 tokens per rank on, and slower at 128 (docs/lab/combine.md).
        """
        cfg = self.config
        copies = self.two_near_ranks and cfg.layout == "rank" and bool(cfg.pre_reduce)
        return copies and cfg.max_tokens_per_rank > MANY_COPIES

    @property
    def combine_block(self) -> int:
        """Most columns of a row that a CTA of combine handles at a time. With more than two rows or wider elements,
        COMBINE_BLOCK is all that fits in registers."""
        wide = self.two_copies and self.config.combine_dtype.itemsize == 2
        return 2 * COMBINE_BLOCK if wide else COMBINE_BLOCK

    @property
    def lamport_tokens(self) -> int:
        """Most tokens of a call whose sums return through Lamport slots, without flags.

        It is 0 (sums have flags) between nodes, without pre_reduce, with a combine format, above MANY_TOKENS, and if
        4-byte words do not divide a row. Above FEW_TOKENS it is all tokens or 0, because one launch grid serves both.
        With :attr:`two_copies`, MANY_TOKENS is no limit, and there is more room.

        Example: for rows of 14336 bytes 2 ranks have room for 1170 tokens each, 4 for 585, and 8 for 292; with layout
        "rank" 2 ranks have room for 4681.
        """
        cfg = self.config
        whole = cfg.combine_dtype.itemsize in (2, 4) and cfg.combine_row_bytes % 4 == 0
        if not self.lamport or self.inter_node_ranks or cfg.mode == "allreduce" or not cfg.pre_reduce or not whole:
            return 0
        if cfg.combine_format is not None:
            return 0
        tokens = cfg.max_tokens_per_rank
        room = (LAMPORT_BYTES_OF_COPIES if self.two_copies else LAMPORT_BYTES) // (self.lamport_ranks * self.row_bytes)
        if tokens <= FEW_TOKENS:
            return min(tokens, room)
        return tokens if tokens <= (room if self.two_copies else min(MANY_TOKENS, room)) else 0

    @property
    def lamport_ranks(self) -> int:
        """Ranks with Lamport slots in a rank's block: all, but with :attr:`two_copies` only the other rank. There own
        rows stay in every combine in which sums travel (``kernels.launch.own_rows``), so no rank sends to itself, waits
        for a row of its own, clears one, or stands in for itself.
        """
        return self.world_size - self.two_copies

    @property
    def regions(self) -> RegionTable:
        """All regions of a block."""
        cfg, ranks = self.config, self.world_size
        tokens = max(1, cfg.max_tokens_per_rank)
        copies = ranks if cfg.pre_reduce else cfg.topk
        slots = (self.lamport_ranks, self.lamport_tokens, self.row_bytes)
        i64, i32, u8 = torch.int64, torch.int32, torch.uint8
        return RegionTable.pack(
            ("poison", i64, (1,)),
            ("poisons", i64, (ranks, POISON_WORDS)),
            ("control", i64, (CONTROL_WORDS,)),
            ("credit", i64, (2, ranks)),
            ("sm_limit", i32, (SM_LIMIT_KINDS, SM_LIMIT_WORDS)),
            ("block_counts_flag", i64, (MAX_SENDERS,)),
            ("block_counts", i32 if self.senders_count_pairs else i64, (MAX_SENDERS, self.block_counts_width)),
            ("message_flag", i64, (ranks, tokens)),
            ("counts", i64, (ranks, COUNT_HEADER + self.max_local_experts)),
            *((("row_table", i64, (ranks + 3, self.max_local_experts)),) if self.row_table else ()),
            ("firsts", i32, (ranks, MAX_SENDERS + 1)),
            ("messages", u8, (ranks, tokens, self.message_bytes)),
            ("combine_head", i64, (ranks,)),
            ("combine_flag", i64, (ranks, tokens, self.combine_parts)),
            ("combine_status", i64, (ranks,)),
            ("combine_kept", u8, (tokens, cfg.topk)),
            ("rows", u8, (copies, tokens, self.row_bytes)),
            *((("lamport_slots", u8, slots),) if self.lamport_tokens else ()),
            *(self._network_regions(tokens) if self.inter_node_ranks else ()),
        )

    def _network_regions(self, tokens: int) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        cfg, ranks, far = self.config, self.world_size, self.inter_node_ranks
        i64, i32, u8 = torch.int64, torch.int32, torch.uint8
        kept = align_up(cfg.topk, ALIGNMENT)
        if self.two_level:
            yield from self._relay_regions(tokens)
            return
        rows = (far, tokens) if cfg.pre_reduce else (max(1, cfg.most_total_rows),)
        yield "idle", i64, (1,)
        yield "counts_flag", i64, (ranks,)
        yield "firsts_flag", i64, (ranks,)
        yield "row_flag", i64, (ranks, tokens, cfg.topk)
        yield "inter_node_kept", u8, (ranks, tokens, kept)
        yield "staged_counts", i64, (far, COUNT_HEADER + self.max_local_experts)
        yield "staged_firsts", i32, (far, MAX_SENDERS + 1)
        yield "staged_messages", u8, (far, tokens, self.message_bytes)
        yield "staged_status", i64, (far,)
        yield "staged_kept", u8, (far, tokens, kept)
        yield "staged_rows", u8, (*rows, self.row_bytes)

    def _relay_regions(self, tokens: int) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        far, nodes = self.inter_node_ranks, self.other_nodes
        i64, i32, u8 = torch.int64, torch.int32, torch.uint8
        marks = align_up(MARKS_HEADER + tokens, ALIGNMENT)
        yield "idle", i64, (1,)
        yield "counts_flag", i64, (self.world_size,)
        yield "firsts_flag", i64, (self.world_size,)
        yield "marks_flag", i64, (nodes,)
        yield "marks", u8, (nodes, marks)
        yield "relay_flag", i64, (nodes, tokens)
        yield "relays", u8, (nodes, tokens, self.relay_bytes)
        yield "node_flag", i64, (nodes, tokens)
        yield "node_rows", u8, (nodes, tokens, self.row_bytes)
        yield "staged_counts", i64, (far, COUNT_HEADER + self.max_local_experts)
        yield "staged_firsts", i32, (far, MAX_SENDERS + 1)
        yield "staged_status", i64, (far,)
        yield "staged_marks", u8, (nodes, marks)
        yield "staged_relays", u8, (tokens, self.relay_bytes)
        yield "staged_rows", u8, (nodes, tokens, self.row_bytes)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the regions of a block that hold data on its way between nodes: copies that are put, and with two
        levels also data that passes through this rank: T x ((F + 1) x relay + 2 F x row) bytes and some words, for
        ``T`` tokens and ``F`` other nodes."""
        return sum(region.nbytes for region in self.regions if region.name.startswith(_STAGING))

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.regions.nbytes


DISPATCH, COMBINE = 0, 1
"""Groups of the contract's buffers: the first index of ``dev_ptrs`` and ``pointers``."""

SEND, RECV, RECV_COUNT = 0, 1, 2
"""Buffers of a group: the second index."""

REGIONS = (("messages", "counts"), ("rows", "combine_flag"))
"""Regions of (recv, recv_count) of each group."""

STAGED = ("staged_messages", "staged_rows")
"""Region of send of each group, between nodes; with two levels ``staged_relays`` in place of the first."""


def pointer_table(workspace: Workspace, blocks: Tensor) -> Tensor:
    """Add the buffers' offsets to the addresses ``blocks`` [n] of the ranks' blocks: [2 groups, 3 buffers, n] int64.

    The first world_size entries of ``blocks`` are addresses, 0 for blocks of other nodes. Further entries, of a
    network's table (:class:`~moelink.memory.nodes.network.Network`), are returned unchanged. One node has no send
    buffers: their entries are 0.

    Example: a block at 4096 whose messages start at byte 1024 has recv of group 0 at 5120.
    """
    regions, there = workspace.regions, blocks != 0
    there[workspace.world_size :] = False
    tables = []
    stagings = ("staged_relays", STAGED[COMBINE]) if workspace.two_level else STAGED
    for staged, names in zip(stagings, REGIONS, strict=True):
        send = [torch.zeros_like(blocks) if not workspace.inter_node_ranks else blocks + there * regions[staged].offset]
        tables.append(torch.stack(send + [blocks + there * regions[name].offset for name in names]))
    return torch.stack(tables)
