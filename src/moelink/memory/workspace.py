"""The symmetric workspace: which regions a rank's block holds, computed from the configuration.

Legend: ``W`` ranks that take part, ``T`` = max_tokens_per_rank, ``K`` = topk, ``L`` = most experts of a rank, ``P``
most sending programs, ``E`` experts rounded up to a power of two, ``R`` ranks likewise. A block has the same layout on
every rank; "written by" says who else than its owner stores there.

===================  ====================  ===============================================================
region               shape, dtype          written by, meaning
===================  ====================  ===============================================================
poison               [1] int64             any rank r: 1 + r once a wait of its expired
poisons              [W, 8] int64          row r by rank r: what it was waiting for
control              [24] int64            own kernels: completed calls, programs arrived, statistics
drained              [2, W] int64          rank d: dispatch, and combine, whose messages or rows from here d has read
turns                [4, 388] int32       own kernels: who works, with a budget of multiprocessors
tally_flag           [P] int64             own sender p: call whose row of ``tallies`` is stored
tallies              [P, E + R] int32      own sender p: pairs per expert and messages per rank of its tokens
message_flag         [W, T] int64          source s: call whose message in this slot is stored
counts               [W, 8 + L] int64      source s: status and totals (``protocol``), rows per local expert, each
                                           word with the call it is of (``kernels.sync.ll_words``)
firsts               [W, P + 1] int32      source s: first message of each of its sending programs; their number
messages             [W, T, message] uint8 source s: its messages, in token order without holes
combine_head         [W] int64             expert rank r: call whose ``combine_status`` is stored
combine_flag         [W, T, C] int64       expert rank r: call whose row for the message in this slot is stored, or a
                                           part of it: C is 1, or where T is small the blocks of columns of a row
combine_status       [W] int64             expert rank r: options, and whether it refused the call
combine_kept         [T, K] uint8          the expert's rank: 1 if the row of (token, slot) travels (no pre_reduce)
rows                 [W, T, row] or        expert rank r: sums of its rows per token (pre_reduce), or every row
                     [T, K, row] uint8
small_rows           [W, G, row] uint8     expert rank r: the same sums in a call of up to G tokens, inverted; zeros
                                           where none has come (``kernels.sync.small_calls``); only where G > 0
===================  ====================  ===============================================================

Across nodes, with ``N`` ranks a node, also what is put there, and the signals behind it (``kernels.sync.internode``):

===================  ====================  ===============================================================
idle                 [1] int64             nobody: goes along where a signal has no data
counts_flag          [W] int64             far source s: call whose row of ``counts`` is here
firsts_flag          [W] int64             far source s: call whose row of ``firsts`` is here
row_flag             [W, T, K] int64       far expert rank r: call whose row for (message, top-k slot) is here (no sums)
far_kept             [W, T, 16 n] uint8    far expert rank r: 1 for each slot of the message whose row comes (no sums)
staged_counts        [W - N, 8 + L] int64  own kernels, like all that follow: rows on their way to other nodes
staged_firsts        [W - N, P + 1] int32
staged_messages      [W - N, T, message]
staged_status        [W - N] int64
staged_kept          [W - N, T, 16 n]
staged_rows          [W - N, T, row], without pre_reduce [capacity, row] uint8
===================  ====================  ===============================================================

Size: T x (W x message + (W or K) x row) bytes, where sums need no flags up to 32 MiB of small rows, and a few flags:
what DESIGN allows.
Nothing is double buffered. Send buffers are there across nodes only.

Example: 8 ranks, 128 tokens, fp8_block128 of 7168, topk 8: messages 8 x 128 x 7552 bytes = 7.4 MiB, rows
8 x 128 x 14336 bytes = 14 MiB, small rows as much, everything else 0.6 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from moelink.arith import align_up, ceil_div
from moelink.formats.base import Format
from moelink.memory.layout import ALIGNMENT, REGION_ALIGNMENT, RegionTable
from moelink.memory.protocol import (
    COMBINE_BLOCK,
    CONTROL_WORDS,
    COUNT_HEADER,
    FEW_TOKENS,
    MANY_TOKENS,
    MAX_SENDERS,
    POISON_WORDS,
    SMALL_BYTES,
    TURN_KINDS,
    TURN_WORDS,
)


class Sizes(Protocol):
    """What a workspace needs to know of a configuration; :class:`moelink.EPConfig` says what each of them means."""

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
    def combine_row_bytes(self) -> int: ...
    @property
    def most_row_capacity(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def pre_reduce(self) -> bool: ...


def _power_of_two(count: int) -> int:
    return max(2, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class Workspace:
    """Regions of one rank's block, and the parts of a message on this transport.

    Attributes:
        config: any rank's configuration; the result does not depend on the rank.
        small: whether sums of small calls have a place of their own.
    """

    config: Sizes
    small: bool = True

    @property
    def world_size(self) -> int:
        """Ranks that exchange anything: 1 in allreduce mode."""
        return 1 if self.config.mode == "allreduce" else self.config.world_size

    @property
    def node_size(self) -> int:
        """Ranks of a node: what they exchange needs no network."""
        return min(self.config.node_size, self.world_size)

    @property
    def far_ranks(self) -> int:
        """Ranks of other nodes."""
        return self.world_size - self.node_size

    @property
    def max_puts(self) -> int:
        """Most puts of one rank that may be under way at a time: those of a dispatch and of a combine, each of which
        ends before the next of its kind begins, the drained signals of both, and news of an expired wait."""
        rows = self.far_ranks * max(1, self.config.max_tokens_per_rank)
        return 2 * rows + self.regions["staged_rows"].nbytes // self.row_bytes + 8 * self.far_ranks

    @property
    def max_local_experts(self) -> int:
        """Experts of the rank that owns most."""
        return ceil_div(self.config.num_experts, self.config.world_size)

    @property
    def tally_width(self) -> int:
        """Counts of one sending program: a bin per expert and a word per rank, each rounded up to a power of two."""
        return _power_of_two(self.config.num_experts) + _power_of_two(self.world_size)

    @property
    def message(self) -> RegionTable:
        """One dispatched message: :class:`~moelink.memory.layout.DispatchMessage` and, because rows are placed without
        a sort, ``positions``: of each slot among the earlier pairs of the same (source rank, expert)."""
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
        """Bytes from one message to the next: whole cache lines, so that no packet on a link carries parts of two."""
        return align_up(self.message.regions[-1].end, REGION_ALIGNMENT)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row on its way home to the next."""
        return align_up(self.config.combine_row_bytes, REGION_ALIGNMENT)

    def note_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the int32 words in which a dispatch of ``num_tokens`` own tokens notes where rows are:
        ``rows_of_message``, ``message_token``, ``received``, ``sent``, ``slot_of``
        (:class:`~moelink.transports.symmetric.notes.Parts`)."""
        cfg, ranks, tokens = self.config, self.world_size, max(1, self.config.max_tokens_per_rank)
        slots = 1 if cfg.layout == "rank" else cfg.topk
        return (ranks, tokens, slots), (ranks, tokens), (ranks + 1, 2), (ranks + 1,), (num_tokens, ranks)

    @property
    def note_begins(self) -> tuple[int, ...]:
        """Where each of them begins, in words from the start: aligned like a tensor of its own, as kernels expect."""
        sizes = [align_up(math.prod(shape), REGION_ALIGNMENT // 4) for shape in self.note_shapes(1)[:-1]]
        return tuple(accumulate(sizes, initial=0))

    def note_words(self, num_tokens: int) -> int:
        """All of them."""
        return self.note_begins[-1] + num_tokens * self.world_size

    @property
    def combine_parts(self) -> int:
        """Parts in which a message's row travels home. Where tokens are few, one program alone would take the time of
        several memory latencies for it; a network carries a row whole."""
        cfg = self.config
        few = cfg.max_tokens_per_rank <= FEW_TOKENS and not self.far_ranks
        return ceil_div(cfg.hidden_size, COMBINE_BLOCK) if few else 1

    @property
    def small_tokens(self) -> int:
        """Most tokens of a call whose sums go home without flags; 0 where all have them: across nodes, without
        sums, where tokens are many, and where a row is not cut into words of 4 bytes. Where they are neither few nor
        many, all or none, as the launch is cut for one form.

        Example: for rows of 14336 bytes 2 ranks have room for 1170 tokens each, 4 for 585, and 8 for 292.
        """
        cfg = self.config
        whole = cfg.combine_dtype.itemsize in (2, 4) and cfg.combine_row_bytes % 4 == 0
        if not self.small or self.far_ranks or cfg.mode == "allreduce" or not cfg.pre_reduce or not whole:
            return 0
        tokens, room = cfg.max_tokens_per_rank, SMALL_BYTES // (self.world_size * self.row_bytes)
        if tokens <= FEW_TOKENS:
            return min(tokens, room)
        return tokens if tokens <= min(MANY_TOKENS, room) else 0

    @property
    def regions(self) -> RegionTable:
        """All regions of a block."""
        cfg, ranks = self.config, self.world_size
        tokens = max(1, cfg.max_tokens_per_rank)
        copies = ranks if cfg.pre_reduce else cfg.topk
        i64, i32, u8 = torch.int64, torch.int32, torch.uint8
        return RegionTable.pack(
            ("poison", i64, (1,)),
            ("poisons", i64, (ranks, POISON_WORDS)),
            ("control", i64, (CONTROL_WORDS,)),
            ("drained", i64, (2, ranks)),
            ("turns", i32, (TURN_KINDS, TURN_WORDS)),
            ("tally_flag", i64, (MAX_SENDERS,)),
            ("tallies", i32, (MAX_SENDERS, self.tally_width)),
            ("message_flag", i64, (ranks, tokens)),
            ("counts", i64, (ranks, COUNT_HEADER + self.max_local_experts)),
            ("firsts", i32, (ranks, MAX_SENDERS + 1)),
            ("messages", u8, (ranks, tokens, self.message_bytes)),
            ("combine_head", i64, (ranks,)),
            ("combine_flag", i64, (ranks, tokens, self.combine_parts)),
            ("combine_status", i64, (ranks,)),
            ("combine_kept", u8, (tokens, cfg.topk)),
            ("rows", u8, (copies, tokens, self.row_bytes)),
            *((("small_rows", u8, (ranks, self.small_tokens, self.row_bytes)),) if self.small_tokens else ()),
            *(self._network_regions(tokens) if self.far_ranks else ()),
        )

    def _network_regions(self, tokens: int) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        cfg, ranks, far = self.config, self.world_size, self.far_ranks
        i64, i32, u8 = torch.int64, torch.int32, torch.uint8
        kept = align_up(cfg.topk, ALIGNMENT)
        rows = (far, tokens) if cfg.pre_reduce else (max(1, cfg.most_row_capacity),)
        yield "idle", i64, (1,)
        yield "counts_flag", i64, (ranks,)
        yield "firsts_flag", i64, (ranks,)
        yield "row_flag", i64, (ranks, tokens, cfg.topk)
        yield "far_kept", u8, (ranks, tokens, kept)
        yield "staged_counts", i64, (far, COUNT_HEADER + self.max_local_experts)
        yield "staged_firsts", i32, (far, MAX_SENDERS + 1)
        yield "staged_messages", u8, (far, tokens, self.message_bytes)
        yield "staged_status", i64, (far,)
        yield "staged_kept", u8, (far, tokens, kept)
        yield "staged_rows", u8, (*rows, self.row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.regions.nbytes
