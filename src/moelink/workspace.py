"""The symmetric workspace: which regions a rank's block holds, computed from the configuration.

Legend: ``W`` ranks that take part, ``T`` = max_tokens_per_rank, ``K`` = topk, ``L`` = most experts of a rank, ``C``
flags per (source, destination) and phase. A block has the same layout on every rank; "written by" says who else than
its owner stores there.

===================  ====================  ===============================================================
region               shape, dtype          written by, meaning
===================  ====================  ===============================================================
poison               [1] int64             any rank r: 1 + r once a wait of its expired
poisons              [W, 8] int64          row r by rank r: what it was waiting for
control              [16] int64            own kernels: completed calls, programs arrived, statistics
counts_flag          [W] int64             source s: call whose row of ``counts`` is stored
chunk_flag           [W, C] int64          source s: call whose chunk c of messages is stored
dispatch_drained     [W] int64             destination d: call whose messages from here d has read
counts               [W, 8 + L] int32      source s: status, messages, tokens, chunks; rows per local expert
chunk_range          [W, C, 2] int32       source s: first and last + 1 message of chunk c
messages             [W, T, message] uint8 source s: its messages, in token order without holes
combine_head         [W] int64             expert rank r: call whose ``combine_status`` is stored
combine_flag         [W, C] int64          expert rank r: call whose chunk c of rows is stored
combine_drained      [W] int64             home rank d: call whose rows from here d has read
combine_status       [W] int64             expert rank r: 0, or 1 when it refused the call
rows                 [W, T, row] or        expert rank r: sums of its rows per token (pre_reduce), or every row
                     [T, K, row] uint8
===================  ====================  ===============================================================

Size: T x (W x message + (W or K) x row) bytes and a few flags: what DESIGN allows. Nothing is double buffered.

Example: 8 ranks, 128 tokens, fp8_block128 of 7168, topk 8: messages 8 x 128 x 7504 bytes = 7.3 MiB, rows
8 x 128 x 14336 bytes = 14 MiB, everything else 0.1 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelink.arith import align_up, ceil_div
from moelink.config import EPConfig
from moelink.layout import ALIGNMENT, RegionTable
from moelink.protocol import CONTROL_WORDS, COUNT_HEADER, POISON_WORDS

MAX_CHUNKS = 1024
"""Most flags per (source, destination) and phase: 8 KiB."""


@dataclass(frozen=True)
class Workspace:
    """Regions of one rank's block, and the parts of a message on this transport.

    Attributes:
        config: any rank's configuration; the result does not depend on the rank.
    """

    config: EPConfig

    @property
    def world_size(self) -> int:
        """Ranks that exchange anything: 1 in allreduce mode."""
        return 1 if self.config.mode == "allreduce" else self.config.world_size

    @property
    def max_local_experts(self) -> int:
        """Experts of the rank that owns most."""
        return ceil_div(self.config.num_experts, self.config.world_size)

    @property
    def num_chunks(self) -> int:
        """Flags per (source, destination) and phase."""
        return max(1, min(self.config.max_tokens_per_rank, MAX_CHUNKS))

    @property
    def message(self) -> RegionTable:
        """One dispatched message: :class:`~moelink.layout.DispatchMessage` and, because rows are placed without a
        sort, ``positions``: of each slot among the earlier pairs of the same (source rank, expert)."""
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
        """Bytes from one message to the next."""
        return align_up(self.message.regions[-1].end, ALIGNMENT)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row on its way home to the next."""
        return align_up(self.config.combine_row_bytes, ALIGNMENT)

    @property
    def regions(self) -> RegionTable:
        """All regions of a block."""
        cfg, ranks, chunks = self.config, self.world_size, self.num_chunks
        tokens = max(1, cfg.max_tokens_per_rank)
        copies = ranks if cfg.pre_reduce else cfg.topk
        i64, i32, u8 = torch.int64, torch.int32, torch.uint8
        return RegionTable.pack(
            ("poison", i64, (1,)),
            ("poisons", i64, (ranks, POISON_WORDS)),
            ("control", i64, (CONTROL_WORDS,)),
            ("counts_flag", i64, (ranks,)),
            ("chunk_flag", i64, (ranks, chunks)),
            ("dispatch_drained", i64, (ranks,)),
            ("counts", i32, (ranks, align_up(COUNT_HEADER + self.max_local_experts, 4))),
            ("chunk_range", i32, (ranks, chunks, 2)),
            ("messages", u8, (ranks, tokens, self.message_bytes)),
            ("combine_head", i64, (ranks,)),
            ("combine_flag", i64, (ranks, chunks)),
            ("combine_drained", i64, (ranks,)),
            ("combine_status", i64, (ranks,)),
            ("rows", u8, (copies, tokens, self.row_bytes)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.regions.nbytes
