"""Gather the launch constants, all that is fixed when a kernel is compiled: sizes, offsets and options, in one
constexpr object.

:class:`CommonSpec` has what both phases share, :class:`DispatchSpec` and :class:`CombineSpec` what one phase adds.
Everything that changes from call to call (token counts, call numbers, capacities, addresses, ranks) is an ordinary
argument instead, so that no call recompiles. Offsets ``OFFSET_*`` are bytes from the start of a block, ``MESSAGE_*``
from that of a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from moelink.config import EPConfig
from moelink.formats.base import Format
from moelink.kernels.launch.cache_keys import Constants
from moelink.kernels.launch.device import clock_of, has_dependent_launches, has_native_casts, sm_limit_of, threads_of
from moelink.kernels.launch.grid import relaying_ctas, sums_present_rows, takes_numbers_in_turn
from moelink.kernels.nodes.relay_constants import RelayConstants, relay_constants
from moelink.memory.protocol import COUNT_HEADER, MAX_SENDERS, combine_options, dispatch_options
from moelink.memory.workspace import Workspace
from moelink.tuning import (
    COUNTED_ALONE,
    FEW_MESSAGES_IN_PLACE,
    FEW_TOKENS,
    MANY_TOKENS,
    MESSAGES_IN_PLACE,
    MESSAGES_PER_RELEASE,
    PRESENT_BYTES,
    ROWS_AHEAD,
)

TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
_WORDS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}
_SCALE_LAYOUTS = {"row_major": 0, "transposed": 1, "tiles_128x4": 2}

NO_SCALES, ROW_MAJOR, TRANSPOSED, TILES = -1, 0, 1, 2
COPY, CONVERT, ENCODE = 0, 1, 2

_COMMON_REGIONS = ("poison", "poisons", "control", "credit", "sm_limit", "idle", "combine_status")
_DISPATCH_REGIONS = (
    "row_table", "block_counts_flag", "block_counts", "message_flag", "counts", "firsts", "messages", "counts_flag",
    "firsts_flag", "staged_counts", "staged_firsts", "staged_messages",
)  # fmt: skip
_COMBINE_REGIONS = (
    "combine_head", "combine_flag", "combine_kept", "rows", "lamport_slots", "row_flag",
    "inter_node_kept", "staged_status", "staged_kept", "staged_rows", "node_flag", "node_rows",
)  # fmt: skip


def word_of(nbytes: int) -> Any:
    """Return the widest integer type, up to 4 bytes, that divides ``nbytes``. Rows are moved in words of it."""
    return _WORDS[4 if nbytes % 4 == 0 else 2 if nbytes % 2 == 0 else 1]


@dataclass(frozen=True, repr=False, eq=False)
class CommonSpec(Constants, regions=_COMMON_REGIONS):
    """Sizes and offsets that both phases use. ``X_POW2`` is the next power of two of ``X``, the size of a block.

    Attributes:
        WORLD_SIZE: ranks that exchange. NUM_EXPERTS: experts.
        EXPERTS_PER_RANK, EXTRA_EXPERTS: the map of experts; the first EXTRA_EXPERTS ranks own one more.
        TOPK, MAX_TOKENS: topk and max_tokens_per_rank.
        ALLREDUCE: mode "allreduce". FUSED_SHARED_EXPERT: 1 where it is fused.
        NATIVE_CASTS: the hardware's casts round as the formats do. CLOCK: what ``signals.clock`` reads.
        NUM_SMS: SMs that the CTAs of a launch may use, 0 for all. SM_ID: how a CTA finds the number of its SM
            (``kernels.launch.sm_limit``). NUMBERS_IN_TURN: within the limit a CTA does the work of one number after the
            other. DEPENDENT_LAUNCH: a launch may start before the one before it has ended
            (``kernels.sync.dependent_launch``).
        NODE_SIZE, NODES: ranks of a node, and nodes. NETWORK: who carries bytes to other nodes
            (``kernels.nodes.internode``), "" on one node. TWO_LEVEL: as relays (``kernels.nodes.levels``).
        TRACE: CTAs stamp what they do (``tracing.device.stamps``). TRACE_CTAS: most CTAs of a role that have a record.
        OFFSET_*: first byte of a region in a block (``memory.workspace``).
    """

    WORLD_SIZE: int
    WORLD_SIZE_POW2: int
    NUM_EXPERTS: int
    EXPERTS_PER_RANK: int
    EXTRA_EXPERTS: int
    TOPK: int
    TOPK_POW2: int
    MAX_TOKENS: int
    ALLREDUCE: bool
    FUSED_SHARED_EXPERT: int
    NATIVE_CASTS: bool
    CLOCK: Any
    NUM_SMS: int
    SM_ID: Any
    NUMBERS_IN_TURN: bool
    DEPENDENT_LAUNCH: bool
    NODE_SIZE: int
    NODE_SIZE_POW2: int
    NODES: int
    TWO_LEVEL: bool
    NETWORK: str
    TRACE: bool
    TRACE_CTAS: int


def message_block(cfg: EPConfig, ranks: int) -> int:
    """Return how many tokens a CTA on a GPU counts at a time where it counts messages alone: 2048 ids at most, and less
    where the counts of ranks would not fit the registers.

    Example: of top-8, 256 for 8 ranks, 32 for 64 ranks, 2 for 2 tokens.
    """
    power = triton.next_power_of_2
    block = (2048 if ranks <= 32 else 256) // power(cfg.topk)
    return min(max(1, block), 256, power(max(1, cfg.max_tokens_per_rank)))


def common(workspace: Workspace, device: torch.device) -> dict[str, Any]:
    """Return the fields of :class:`CommonSpec`."""
    cfg, ranks, power = workspace.config, workspace.world_size, triton.next_power_of_2
    return dict(
        WORLD_SIZE=ranks, WORLD_SIZE_POW2=power(ranks), NUM_EXPERTS=cfg.num_experts,
        EXPERTS_PER_RANK=cfg.num_experts // cfg.world_size, EXTRA_EXPERTS=cfg.num_experts % cfg.world_size,
        TOPK=cfg.topk, TOPK_POW2=power(cfg.topk), MAX_TOKENS=max(1, cfg.max_tokens_per_rank),
        ALLREDUCE=cfg.mode == "allreduce", FUSED_SHARED_EXPERT=int(cfg.fused_shared_expert),
        NATIVE_CASTS=has_native_casts(device), CLOCK=clock_of(device), NUM_SMS=sm_limit_of(cfg, device), SM_ID="ptx",
        NUMBERS_IN_TURN=takes_numbers_in_turn(cfg),
        DEPENDENT_LAUNCH=has_dependent_launches(device),
        NODE_SIZE=workspace.node_size, NODE_SIZE_POW2=power(workspace.node_size), NODES=ranks // workspace.node_size,
        TWO_LEVEL=workspace.two_level, NETWORK="" if workspace.inter_node_ranks == 0 else "ring" if device.type == "cpu"
        else "nvshmem", TRACE=False, TRACE_CTAS=0,
    )  # fmt: skip


@dataclass(frozen=True, repr=False, eq=False)
class DispatchSpec(CommonSpec, RelayConstants, regions=_DISPATCH_REGIONS):
    """Launch constants of dispatch: how rows enter messages, and how they leave them.

    Attributes:
        NUM_EXPERTS_POW2: bins of a histogram of experts. MAX_LOCAL_EXPERTS: most experts of a rank. RANK_LAYOUT: layout
            "rank".
        COUNT_BLOCK: tokens that a CTA counts at a time, of its own. COUNT_BLOCK_ALL: the same where it also counts
            tokens of other CTAs. COUNT_BLOCK_ALONE: the same in a sender that counts alone.
        SOURCE: COPY rows unchanged (already quantised, or already of the payload dtype), CONVERT them to another float
            dtype, or ENCODE them with the format's device functions.
        WORD_POINTER, ROW_WORDS, BLOCK_SIZE: rows are moved in words: pointer type, words of a row, words at a time.
        INPUT_DTYPE: dtype of the rows' elements. HIDDEN_SIZE: columns of a row. ROW_DTYPE, ROW_POINTER: payload dtype
            of CONVERT.
        ENCODE_FN, GROUP_SIZE, NUM_SCALE_GROUPS, GROUPS_PER_PIECE, GROUP_BYTES: for ENCODE: the function, elements that
            share a scale (a row rounded up to a power of two), such groups of a row, groups at a time, payload bytes of
            a group. BF16_CASTS: NATIVE of bf16 elements (``formats.device``). GROUP_SCALE_POINTER, GROUP_SCALES: of one
            group's scale; scales that fill the row's SCALE_WIDTH.
        HAS_INPUT_SCALE: there is a global input scale. PIECES_PER_ROW: pieces in which a row is read and stored.
        SCALE_WIDTH, SCALE_DTYPE, SCALE_POINTER: scales of a row, and their integer type. SCALE_LAYOUT: their layout in
            the output. SCALES_LATER: a later launch, the scale kernel, writes them in that layout. PADS_TILES: the
            receiver pads their tiles.
        ROW_ALIGNMENT: group sizes are multiples of it. MASKED: layout "masked", whose groups have one size. IN_PLACE:
            rows and scales stay in the messages (``zero_copy``), and a source's rows are a group of one size.
            HAS_WEIGHTS, WEIGHT_POINTER: router weights travel, and their type. GLOBAL_IDS: ids of the output count
            over all ranks.
        CACHED_ROUTING: the dispatch uses an earlier call's routing. TELLS_IDS, TELLS_POSITIONS: headers have local ids,
            and positions. OPTIONS: what every rank must choose alike.
        ROWS_PER_MESSAGE_POW2: output rows of a message, at most. NUM_GROUPS_POW2: group offsets; both powers of two.
        EVICTION: how rows are loaded, as Triton names it: in a call of more than FEW_TOKENS they are the first to leave
            the L2 cache.
        TOKENS_PER_BATCH: tokens whose messages a CTA publishes together.
        MAX_TOKENS_ALONE: most tokens of a call in which each CTA counts what precedes its own tokens; 0: only CTAs of
            one token do.
        MAX_SENDERS: most sending CTAs. SENDERS_PER_STEP: CTAs whose block counts are read at a time, of
            BLOCK_COUNT_WORDS words each. SENDERS_COUNT_PAIRS: those of pairs, too. MESSAGES_PER_STEP: messages that a
            receiver unpacks at a time.
        COUNT_WORDS: words of a source's counts. POLL_WIDTH: words of them that are polled, and summed, at a time.
        ROW_TABLE: one receiver plans for all. MESSAGE_BYTES: bytes of a message. MESSAGE_*: first byte of a part in it.
    """

    NUM_EXPERTS_POW2: int
    MAX_LOCAL_EXPERTS: int
    MAX_LOCAL_EXPERTS_POW2: int
    RANK_LAYOUT: bool
    COUNT_BLOCK: int
    COUNT_BLOCK_ALL: int
    COUNT_BLOCK_ALONE: int
    SOURCE: int
    WORD_POINTER: Any
    ROW_WORDS: int
    BLOCK_SIZE: int
    INPUT_DTYPE: Any
    ROW_DTYPE: Any
    ROW_POINTER: Any
    HIDDEN_SIZE: int
    ENCODE_FN: Any
    BF16_CASTS: int
    HAS_INPUT_SCALE: bool
    GROUP_SIZE: int
    NUM_SCALE_GROUPS: int
    GROUPS_PER_PIECE: int
    GROUP_BYTES: int
    GROUP_SCALE_POINTER: Any
    GROUP_SCALES: int
    PIECES_PER_ROW: int
    SCALE_WIDTH: int
    SCALE_WIDTH_POW2: int
    SCALE_DTYPE: Any
    SCALE_POINTER: Any
    SCALE_LAYOUT: int
    SCALES_LATER: bool
    PADS_TILES: bool
    ROW_ALIGNMENT: int
    MASKED: bool
    IN_PLACE: bool
    HAS_WEIGHTS: bool
    GLOBAL_IDS: bool
    CACHED_ROUTING: bool
    TELLS_IDS: bool
    TELLS_POSITIONS: bool
    OPTIONS: int
    WEIGHT_POINTER: Any
    ROWS_PER_MESSAGE_POW2: int
    NUM_GROUPS_POW2: int
    TOKENS_PER_BATCH: int
    MAX_TOKENS_ALONE: int
    EVICTION: str
    MESSAGES_PER_STEP: int
    MAX_SENDERS: int
    SENDERS_PER_STEP: int
    BLOCK_COUNT_WORDS: int
    SENDERS_COUNT_PAIRS: bool
    MESSAGE_BYTES: int
    MESSAGE_SCALES: int
    MESSAGE_TOKEN: int
    MESSAGE_IDS: int
    MESSAGE_POSITIONS: int
    MESSAGE_WEIGHTS: int
    COUNT_WORDS: int
    COUNT_WORDS_POW2: int
    POLL_WIDTH: int
    ROW_TABLE: bool


def _source(fmt: Format, input_dtype: torch.dtype, quantized: bool) -> int:
    if quantized or (fmt.scale_dtype is None and input_dtype == fmt.payload_dtype):
        return COPY
    return CONVERT if fmt.scale_dtype is None and fmt.payload_dtype in TRITON_DTYPES else ENCODE


@lru_cache(maxsize=256)  # a call would otherwise spend most of its host time here
def dispatch_spec(
    workspace: Workspace,
    device: torch.device,
    *,
    input_dtype: torch.dtype,
    quantized: bool,
    weights: bool,
    input_scale: bool = False,
    cached: bool = False,
    later: bool = True,
    max_block: int = 4096,
    tokens: int | None = None,
) -> DispatchSpec:
    """Return the launch constants of a dispatch of rows of ``input_dtype``.

    ``quantized``: the rows are of the format itself, with scales beside them. ``cached``: the dispatch uses cached
    routing. ``later``: a later launch may write the scales in their layout. ``tokens``: those per rank that the kernels
    are built for (:func:`~moelink.kernels.launch.grid.tokens_of_kernels`), None for the communicator's.
    """
    half = 2 if takes_numbers_in_turn(workspace.config) else 1  # CTAs of half as many warps hold half as much
    max_block //= half
    cfg, regions = workspace.config, workspace.regions
    fmt, hidden, power, message = cfg.format, cfg.hidden_size, triton.next_power_of_2, workspace.message
    source = _source(fmt, input_dtype, quantized)
    nbytes = fmt.payload_bytes(hidden)
    word = word_of(nbytes)
    word_bytes = word.primitive_bitwidth // 8
    scale_bytes = 0 if fmt.scale_dtype is None else fmt.scale_dtype.itemsize
    codec, elements = fmt.codec() if source == ENCODE else None, fmt.elements_per_scale(hidden)
    groups, group, one = hidden // elements, power(elements), codec.SCALE_BYTES if codec else scale_bytes
    group_scales = fmt.scale_bytes(hidden) // max(1, one)
    block = min(power(hidden if source == CONVERT else nbytes // word_bytes), max_block)
    # A piece of at least max_block bytes leaves 16 bytes to each thread of a CTA.
    group_block = min(power(max(groups, group_scales)), max(1, max_block // group, max_block * groups // nbytes))
    payload = TRITON_DTYPES.get(fmt.payload_dtype, tl.uint8)
    scale = _WORDS.get(scale_bytes, tl.uint8)
    rows = 1 if cfg.layout == "rank" else cfg.topk + cfg.fused_shared_expert
    # With few tokens a CTA has only one; with many, messages hide one another's latency. On CPUs, where all numbers of
    # tokens are small, the limits are such that tests take every path.
    most = cfg.max_tokens_per_rank if tokens is None else tokens
    if device.type == "cpu":
        many = most > 4
        batch, gather, alone, counted = 2, 2, 3 if many else 0, (2, 16, 16 if workspace.senders_count_pairs else 4)
    else:
        per_token = power(cfg.topk)
        every = min(max(1, 1024 // half // per_token), power(max(1, most)))
        messages = message_block(cfg, workspace.world_size)
        counted = max(1, 256 // half // per_token), every, every if workspace.senders_count_pairs else messages
        many = most > MANY_TOKENS
        batch = min(8 if cfg.zero_copy and not many else 4, power(max(1, most // 128)))
        gather, alone = 4 if many else 1, 0 if many else COUNTED_ALONE
        if not workspace.senders_count_pairs:
            batch = max(2, batch)  # a loop over single tokens that counts no pairs spills 1300 bytes in Triton 3.6
        if cfg.zero_copy:  # of a message only the header is read, so more of them fit a step
            gather = min(MESSAGES_IN_PLACE, max(FEW_MESSAGES_IN_PLACE, power(max(1, most // 64))))
    layout = NO_SCALES
    if scale_bytes:
        assert fmt.scale_layout is not None
        layout = ROW_MAJOR if cfg.layout == "rank" else _SCALE_LAYOUTS[fmt.scale_layout.name]
    late = later and layout in (TRANSPOSED, TILES) and many and cfg.layout != "masked"
    experts = power(workspace.max_local_experts)
    # The polled counts are used as values: a word, or more, for each thread (``kernels.sync.signals``).
    look = max(experts, threads_of(device), power(COUNT_HEADER * workspace.world_size))
    return DispatchSpec(
        **common(workspace, device), **relay_constants(workspace, device, max_block), **DispatchSpec.offsets(regions),
        NUM_EXPERTS_POW2=max(2, power(cfg.num_experts)), MAX_LOCAL_EXPERTS=workspace.max_local_experts,
        MAX_LOCAL_EXPERTS_POW2=experts, RANK_LAYOUT=cfg.layout == "rank", COUNT_BLOCK=counted[0],
        COUNT_BLOCK_ALL=counted[1], COUNT_BLOCK_ALONE=counted[2],
        POLL_WIDTH=experts if cached else look, SOURCE=source,
        WORD_POINTER=tl.pointer_type(word), ROW_WORDS=nbytes // word_bytes, BLOCK_SIZE=block,
        INPUT_DTYPE=TRITON_DTYPES.get(input_dtype, tl.uint8), ROW_DTYPE=payload, ROW_POINTER=tl.pointer_type(payload),
        HIDDEN_SIZE=hidden, ENCODE_FN=codec.encode if codec else None, HAS_INPUT_SCALE=input_scale,
        BF16_CASTS=3 if takes_numbers_in_turn(cfg) else 2,
        GROUP_SIZE=group, NUM_SCALE_GROUPS=groups, GROUPS_PER_PIECE=group_block, GROUP_BYTES=group * nbytes // hidden,
        GROUP_SCALES=group_scales, GROUP_SCALE_POINTER=tl.pointer_type(_WORDS.get(one, tl.uint8)), EVICTION=
        "evict_first" if most > FEW_TOKENS else "", MESSAGES_PER_STEP=gather, PIECES_PER_ROW=-(-max(groups,
        group_scales) // group_block) if source == ENCODE else -(-(hidden if source == CONVERT else nbytes //
        word_bytes) // block),
        SCALE_WIDTH=fmt.scale_width(hidden), SCALE_WIDTH_POW2=power(max(1, fmt.scale_width(hidden), 4 if layout == TILES
        else 1)), SCALE_DTYPE=scale, SCALE_POINTER=tl.pointer_type(scale), SCALE_LAYOUT=layout,
        SCALES_LATER=late, PADS_TILES=layout == TILES and not late and cfg.layout != "masked",
        ROW_ALIGNMENT=cfg.row_alignment, MASKED=cfg.layout == "masked", IN_PLACE=cfg.zero_copy, HAS_WEIGHTS=weights,
        GLOBAL_IDS=cfg.global_ids, CACHED_ROUTING=cached,
        TELLS_IDS=not cached or cfg.layout == "rank", TELLS_POSITIONS=workspace.senders_count_pairs and not cached,
        OPTIONS=dispatch_options(weights, cached),
        WEIGHT_POINTER=tl.pointer_type(TRITON_DTYPES[cfg.weight_dtype]),
        ROWS_PER_MESSAGE_POW2=power(rows), TOKENS_PER_BATCH=batch, MAX_TOKENS_ALONE=alone, MAX_SENDERS=MAX_SENDERS,
        SENDERS_PER_STEP=min(MAX_SENDERS, power(max(1, (8192 if workspace.senders_count_pairs else 4096) // half //
        workspace.block_counts_width))), MESSAGE_BYTES=workspace.message_bytes,
        **{f"MESSAGE_{part.name.upper()}": part.offset for part in message if part.name != "payload"},
        NUM_GROUPS_POW2=power(max(workspace.max_local_experts + 1, cfg.world_size) + 1),
        BLOCK_COUNT_WORDS=workspace.block_counts_width, SENDERS_COUNT_PAIRS=workspace.senders_count_pairs,
        COUNT_WORDS=regions["counts"].shape[1], COUNT_WORDS_POW2=power(regions["counts"].shape[1]),
        ROW_TABLE=workspace.row_table,
    )  # fmt: skip


@dataclass(frozen=True, repr=False, eq=False)
class CombineSpec(CommonSpec, regions=_COMBINE_REGIONS):
    """Launch constants of combine: how rows travel home, and what becomes of them.

    Attributes:
        HIDDEN_SIZE, BLOCK_SIZE: columns of a row, and columns at a time. ROW_BYTES: bytes of a row on its way.
        PARTS_PER_ROW: a message travels in so many parts of BLOCK_SIZE columns, each with a flag; 1: all together.
        SENDS_SUMS: sums travel, one row per (token, rank); else every row does. REDUCES: the home rank sums.
        OPTIONS: what every rank must choose alike.
        HAS_ROW_WEIGHTS, HAS_HOME_WEIGHTS: the expert's rank, or the home rank, multiplies by router weights.
        ROWS_PER_TOKEN: rows that the workspace holds for a token. HAS_SHARED: ``shared=`` is added.
        SLOTS_PER_MESSAGE: rows of a message: topk, or 1 for layout "rank".
        ROW_DTYPE, ROW_POINTER: of rows. SUM_DTYPE: of sums. OUT_DTYPE: of the result.
        ENCODE_FN, DECODE_FN, GROUP_SIZE, ROW_SCALES, ROW_SCALE_POINTER: of a combine format
            (``kernels.combine.row_format``): its functions, or None; elements that share a scale; where in a row the
            scales begin, and their type. ROW_DTYPE is then that of codes.
        EPILOGUE: "", "bias" or "residual". HOOK: a Triton function that stores the result instead, or None.
        LAMPORT_TOKENS: most tokens of a home rank to which sums travel without flags (``kernels.sync.lamport_slots``);
            0: they never do. LAMPORT_RANKS: ranks that have slots for them at a home rank.
        EVICTION: how experts' rows are loaded, as Triton names it. Up to MANY_TOKENS they are the first to leave the L2
            cache, which holds what comes over the links and what the next calls need. With more tokens all of that
            leaves the cache in any case, and fewer instructions matter more.
        COLLECTORS: collecting CTAs, 0 with one level. OWN_ROWS_STAY: 1 where ``kernels.launch.own_rows`` says.
        PRESENT_ROWS: only rows that are there are summed, and the flags of MESSAGES_PER_RELEASE messages are raised
            together (``kernels.combine.present_rows``).
        KEPT_BYTES: bytes of a message's row in ``inter_node_kept``. STAGED_BY_ROW: staged rows are numbered by the row,
            else by the message.
    """

    HIDDEN_SIZE: int
    BLOCK_SIZE: int
    PARTS_PER_ROW: int
    PARTS_POW2: int
    SENDS_SUMS: bool
    REDUCES: bool
    OPTIONS: int
    HAS_ROW_WEIGHTS: bool
    HAS_HOME_WEIGHTS: bool
    ROWS_PER_TOKEN: int
    HAS_SHARED: bool
    SLOTS_PER_MESSAGE: int
    ROW_DTYPE: Any
    ROW_POINTER: Any
    ENCODE_FN: Any
    DECODE_FN: Any
    GROUP_SIZE: int
    ROW_SCALES: int
    ROW_SCALE_POINTER: Any
    SUM_DTYPE: Any
    OUT_DTYPE: Any
    EPILOGUE: str
    HOOK: Any
    ROW_BYTES: int
    LAMPORT_TOKENS: int
    LAMPORT_RANKS: int
    EVICTION: str
    KEPT_BYTES: int
    STAGED_BY_ROW: bool
    COLLECTORS: int
    OWN_ROWS_STAY: int
    PRESENT_ROWS: bool
    MESSAGES_PER_RELEASE: int
    ROWS_AHEAD: int


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
    tells_weighed: bool = False,
) -> CombineSpec:
    """Return the launch constants of a combine.

    ``row_weights``: dispatch's output has weights. ``home_weights``: the home rank has weights. ``raw_sums``: the
    result is the sum before rounding. ``tells_weighed``: ranks tell whether they multiply by row weights.
    """
    cfg, regions = workspace.config, workspace.regions
    rank_layout, local = cfg.layout == "rank", cfg.mode == "allreduce"
    sums = (cfg.pre_reduce or local) and reduce
    by_row = sums and row_weights and not rank_layout
    dtype = TRITON_DTYPES[cfg.combine_dtype]
    most_small, home = workspace.lamport_tokens, cfg.home_row
    row_dtype = dtype if home.format is None else tl.uint8
    codec = None if home.format is None else home.format.codec()
    # A block of words has at least one element for each thread (``kernels.sync.signals``).
    least = threads_of(device) * 4 // cfg.combine_dtype.itemsize if most_small else 1
    present = sums_present_rows(workspace, device, sums=sums)
    copies = 1 if workspace.inter_node_ranks and cfg.pre_reduce else regions["rows"].shape[0]  # one a token if staged
    return CombineSpec(
        **common(workspace, device), **CombineSpec.offsets(regions), HIDDEN_SIZE=cfg.hidden_size,
        PARTS_PER_ROW=workspace.combine_parts,
        PARTS_POW2=triton.next_power_of_2(workspace.combine_parts), REDUCES=reduce,
        BLOCK_SIZE=min(max(triton.next_power_of_2(cfg.hidden_size), least), PRESENT_BYTES // cfg.combine_dtype.itemsize
        if present else workspace.combine_block),
        SENDS_SUMS=sums, OPTIONS=combine_options(sums, by_row and tells_weighed), HAS_ROW_WEIGHTS=by_row,
        HAS_HOME_WEIGHTS=reduce and home_weights and not rank_layout and (local or not sums) and not by_row,
        ROWS_PER_TOKEN=copies, HAS_SHARED=shared, SLOTS_PER_MESSAGE=1 if rank_layout else cfg.topk,
        ROW_DTYPE=row_dtype, ROW_POINTER=tl.pointer_type(row_dtype), ENCODE_FN=codec.encode if codec else None,
        DECODE_FN=codec.decode if codec else None, GROUP_SIZE=codec.GROUP if codec else 1,
        ROW_SCALES=home.parts["scales"].offset if codec else 0,
        ROW_SCALE_POINTER=tl.pointer_type(tl.float32 if codec and codec.SCALE_BYTES == 4 else tl.uint8),
        SUM_DTYPE=TRITON_DTYPES[cfg.accumulate_dtype],
        OUT_DTYPE=TRITON_DTYPES[cfg.accumulate_dtype] if raw_sums else dtype, EPILOGUE=epilogue, HOOK=hook,
        ROW_BYTES=workspace.row_bytes, LAMPORT_TOKENS=most_small, LAMPORT_RANKS=workspace.lamport_ranks,
        EVICTION="evict_first" if cfg.max_tokens_per_rank <= MANY_TOKENS else "",
        KEPT_BYTES=0 if workspace.two_level or not workspace.inter_node_ranks else regions["inter_node_kept"].shape[2],
        STAGED_BY_ROW=not cfg.pre_reduce, COLLECTORS=relaying_ctas(workspace, device), OWN_ROWS_STAY=0,
        PRESENT_ROWS=present, MESSAGES_PER_RELEASE=MESSAGES_PER_RELEASE if present else 1,
        ROWS_AHEAD=ROWS_AHEAD if present else 0,
    )  # fmt: skip
