"""What a combine kernel is compiled for; ``kernels.launch.constants`` has what both phases share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from moelink.kernels.launch.constants import TRITON_DTYPES, CommonSpec, common, far_offset, threads_of
from moelink.memory.protocol import COMBINE_BLOCK, MANY_TOKENS, OPTIONS_BY_ROW, OPTIONS_SUMS
from moelink.memory.workspace import Workspace


@dataclass(frozen=True, repr=False, eq=False)
class CombineSpec(CommonSpec):
    """Combine: how rows travel home, and what becomes of them.

    Attributes:
        SUMS: sums travel, one row per (token, rank); else every row does. REDUCE: home sums.
            OPTIONS: what every rank must choose alike.
        ROW_WEIGHTS, HOME_WEIGHTS: the expert's rank, or home, multiplies by router weights.
        COPIES: rows that the workspace holds per token.
        DTYPE: of rows; ACC: of sums; OUT: of the result. EPILOGUE: "", "bias" or "residual". HOOK: a Triton
        function that stores instead, or None.
        SLOTS: rows of a message: topk, or 1 for layout "rank".
        PARTS: a message travels in so many parts of BLOCK columns, each with a flag; 1: all columns together. PP: as
            a power of two.
        SMALL: most tokens of a home rank to which sums travel without flags (``kernels.sync.small_calls``); 0: they
            never do.
        ONCE: how experts' rows are loaded, as Triton names it: those of up to MANY_TOKENS are the first to leave the
            second-level cache again, which holds what comes over the links and what the next calls need. More drive
            all of that out in any case, and then the fewer instructions count.
        KB: bytes of a message's row in far_kept. BY_ROW: staged rows are numbered by the row, else by the message.
    """

    H: int
    BLOCK: int
    PARTS: int
    PP: int
    SUMS: bool
    REDUCE: bool
    OPTIONS: int
    ROW_WEIGHTS: bool
    HOME_WEIGHTS: bool
    COPIES: int
    ADD_SHARED: bool
    SLOTS: int
    DTYPE: Any
    DTYPE_P: Any
    ACC: Any
    OUT: Any
    EPILOGUE: str
    HOOK: Any
    ROW: int
    O_HEAD: int
    O_FLAG: int
    O_STATUS: int
    O_KEPT: int
    O_ROWS: int
    SMALL: int
    O_SMALL: int
    ONCE: str
    KB: int
    BY_ROW: bool
    O_ROW_FLAG: int
    O_FAR_KEPT: int
    O_STAGED_STATUS: int
    O_STAGED_KEPT: int
    O_STAGED_ROWS: int


@lru_cache(maxsize=256)  # a call would otherwise spend most of its host time here
def combine_spec(
    workspace: Workspace,
    device: torch.device,
    *,
    row_weights: bool,
    home_weights: bool,
    reduce: bool = True,
    shared: bool = False,
    epilogue: str = "",
    hook: Any = None,
    raw_sums: bool = False,
) -> CombineSpec:
    """The spec of a combine. ``row_weights``: dispatch's output has weights. ``home_weights``: the home rank does.
    ``raw_sums``: the result is the sum before rounding.
    """
    cfg, regions = workspace.config, workspace.regions
    rank_layout = cfg.layout == "rank"
    local = cfg.mode == "allreduce"
    sums = (cfg.pre_reduce or local) and reduce
    by_row = sums and row_weights and not rank_layout
    dtype = TRITON_DTYPES[cfg.combine_dtype]
    most_small = workspace.lamport_tokens
    # A block of words has an element for each thread, at least (``kernels.sync.signals``).
    least = threads_of(device) * 4 // cfg.combine_dtype.itemsize if most_small else 1
    # Staged by message there is one row for each token.
    copies = 1 if workspace.inter_node_ranks and cfg.pre_reduce else regions["rows"].shape[0]
    return CombineSpec(
        **common(workspace, device), H=cfg.hidden_size, PARTS=workspace.combine_parts,
        PP=triton.next_power_of_2(workspace.combine_parts),
        BLOCK=min(max(triton.next_power_of_2(cfg.hidden_size), least), COMBINE_BLOCK),
        SUMS=sums, REDUCE=reduce, OPTIONS=OPTIONS_SUMS if sums else OPTIONS_BY_ROW, ROW_WEIGHTS=by_row,
        HOME_WEIGHTS=reduce and home_weights and not rank_layout and (local or not sums) and not by_row,
        COPIES=copies, ADD_SHARED=shared, SLOTS=1 if rank_layout else cfg.topk, DTYPE=dtype,
        DTYPE_P=tl.pointer_type(dtype), ACC=TRITON_DTYPES[cfg.accumulate_dtype],
        OUT=TRITON_DTYPES[cfg.accumulate_dtype] if raw_sums else dtype, EPILOGUE=epilogue, HOOK=hook,
        ROW=workspace.row_bytes, O_HEAD=regions["combine_head"].offset, O_FLAG=regions["combine_flag"].offset,
        O_STATUS=regions["combine_status"].offset,
        O_KEPT=regions["combine_kept"].offset, O_ROWS=regions["rows"].offset,
        SMALL=most_small, O_SMALL=regions["lamport_slots"].offset if most_small else 0,
        ONCE="evict_first" if cfg.max_tokens_per_rank <= MANY_TOKENS else "",
        KB=regions["inter_node_kept"].shape[2] if workspace.inter_node_ranks else 0, BY_ROW=not cfg.pre_reduce,
        O_ROW_FLAG=far_offset(workspace, "row_flag"), O_FAR_KEPT=far_offset(workspace, "inter_node_kept"),
        O_STAGED_STATUS=far_offset(workspace, "staged_status"), O_STAGED_KEPT=far_offset(workspace, "staged_kept"),
        O_STAGED_ROWS=far_offset(workspace, "staged_rows"),
    )  # fmt: skip
