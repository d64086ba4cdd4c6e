"""What is fixed when a kernel is compiled: sizes, offsets and options, gathered in one constexpr object.

Everything that changes from call to call (token counts, call numbers, capacities, addresses, ranks) is an ordinary
argument instead, so that no call recompiles. Offsets O_* are bytes from the start of a block, M_* from that of a
message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from moelink.config import EPConfig
from moelink.formats.base import Format
from moelink.kernels.launch.cache_keys import settle_cache_key
from moelink.memory.protocol import COUNT_HEADER, COUNTED_ALONE, FEW_TOKENS, MANY_TOKENS, MAX_SENDERS, MOST_THREADS
from moelink.memory.workspace import Workspace

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


def host_clock() -> int:
    """Nanoseconds, for interpreted waits. Gives the processor away: the awaited rank may need it."""
    os.sched_yield()
    return time.monotonic_ns()


def is_interpreted() -> bool:
    """True when Triton runs kernels in its interpreter (TRITON_INTERPRET=1 before triton was imported)."""
    return not isinstance(tl.sum, triton.JITFunction)


def has_native_casts(device: torch.device) -> bool:
    """True where the hardware's 8-bit float casts agree with the formats' arithmetic: NVIDIA, sm_89 and newer."""
    if is_interpreted() or torch.version.hip:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)


def clock_of(device: torch.device) -> Any:
    """The CLOCK of kernels on ``device``: see ``signals.clock``."""
    if device.type == "cpu":
        return host_clock
    return "gcn" if torch.version.hip else "ptx"


def budget_of(config: EPConfig, device: torch.device) -> int:
    """Multiprocessors that a launch must keep to, 0 for none in particular. Elsewhere than on NVIDIA's devices as many
    programs are launched as that many hold, wherever they run."""
    if config.num_sms is None or device.type == "cpu" or torch.version.hip:
        return 0
    return config.num_sms


def threads_of(device: torch.device) -> int:
    """Most threads of a program on ``device``; 1 on a CPU."""
    return 1 if device.type == "cpu" else MOST_THREADS if torch.version.hip else MOST_THREADS // 2


def clock_ticks(seconds: float, device: torch.device) -> int:
    """Ticks of that clock in ``seconds``."""
    return int(seconds * (1e8 if device.type != "cpu" and torch.version.hip else 1e9))


def word_of(nbytes: int) -> Any:
    """The widest integer type, up to 4 bytes, that divides ``nbytes``: rows are moved in words of it."""
    return _WORDS[4 if nbytes % 4 == 0 else 2 if nbytes % 2 == 0 else 1]


@dataclass(frozen=True, repr=False, eq=False)
class CommonSpec:
    """Sizes and offsets that both phases use.

    Attributes:
        W, WP: ranks, and the next power of two. E, EP: experts, and the bins of a histogram over them.
        PER, EXTRA: the expert map. K, KP: topk. L, LP: most local experts. T: max_tokens_per_rank.
        TB: tokens that a program counts at a time; TC: if they are more than its own.
        THREADS: most threads of a program; 1 where it is interpreted.
        SMS: multiprocessors that the programs of a launch may use, 0 for all; SMID: how a program knows its own
            (``kernels.launch.sm_limit``).
        NODE: ranks of a node; NET: who carries to others (``kernels.sync.internode``), "" when there are none.
    """

    W: int
    WP: int
    E: int
    EP: int
    PER: int
    EXTRA: int
    K: int
    KP: int
    L: int
    LP: int
    T: int
    TB: int
    TC: int
    ALLREDUCE: bool
    SHARED: int
    RANK_LAYOUT: bool
    NATIVE: bool
    THREADS: int
    CLOCK: Any
    SMS: int
    SMID: Any
    O_POISON: int
    O_POISONS: int
    O_CONTROL: int
    O_DRAINED: int
    O_TURNS: int
    NODE: int
    NET: str
    O_IDLE: int

    def __post_init__(self) -> None:
        # A short name that says everything: it becomes part of symbol names, and of cache keys, hence the sources of
        # device functions in it. It is also what equality and hashing mean (pointer types have no hash).
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values = {name: value.value if isinstance(value, tl.constexpr) else value for name, value in values.items()}
        keys = {name: getattr(settle_cache_key(value), "cache_key", value) for name, value in values.items()}
        text = ",".join(f"{name}={key}" for name, key in keys.items())
        name = f"{type(self).__name__}_{hashlib.sha1(text.encode()).hexdigest()[:16]}"
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_hash", hash(name))
        # The compiler wants attributes of a constexpr object to be constexpr themselves; the interpreter wants none.
        if not is_interpreted():
            for name, value in values.items():
                object.__setattr__(self, name, tl.constexpr(value))

    def __repr__(self) -> str:
        return str(self.__dict__["_name"])

    def __hash__(self) -> int:
        return int(self.__dict__["_hash"])

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and repr(other) == repr(self))


def common(workspace: Workspace, device: torch.device) -> dict[str, Any]:
    """The fields of :class:`CommonSpec`."""
    cfg, regions = workspace.config, workspace.regions
    ranks, power = workspace.world_size, triton.next_power_of_2
    local = workspace.max_local_experts
    return dict(
        W=ranks, WP=power(ranks), E=cfg.num_experts, EP=max(2, power(cfg.num_experts)),
        PER=cfg.num_experts // cfg.world_size, EXTRA=cfg.num_experts % cfg.world_size, K=cfg.topk, KP=power(cfg.topk),
        L=local, LP=power(local), T=max(1, cfg.max_tokens_per_rank),
        TB=max(1, 256 // power(cfg.topk)) if device.type != "cpu" else 2,
        TC=min(max(1, 1024 // power(cfg.topk)), power(max(1, cfg.max_tokens_per_rank))) if device.type != "cpu" else 16,
        ALLREDUCE=cfg.mode == "allreduce", SHARED=int(cfg.fused_shared_expert), RANK_LAYOUT=cfg.layout == "rank",
        NATIVE=has_native_casts(device), THREADS=threads_of(device), CLOCK=clock_of(device),
        SMS=budget_of(cfg, device), SMID="ptx",
        O_POISON=regions["poison"].offset, O_POISONS=regions["poisons"].offset, O_CONTROL=regions["control"].offset,
        O_DRAINED=regions["credit"].offset, O_TURNS=regions["sm_limit"].offset, NODE=workspace.node_size,
        NET="" if workspace.inter_node_ranks == 0 else "ring" if device.type == "cpu" else "nvshmem",
        O_IDLE=far_offset(workspace, "idle"),
    )  # fmt: skip


def far_offset(workspace: Workspace, name: str) -> int:
    """Offset of a region that is there across nodes only; without them 0, which nobody uses."""
    return workspace.regions[name].offset if workspace.inter_node_ranks else 0


@dataclass(frozen=True, repr=False, eq=False)
class DispatchSpec(CommonSpec):
    """Dispatch: how rows enter messages, and how they leave them.

    Attributes:
        SOURCE: COPY rows unchanged (already quantised, or already of the payload dtype), CONVERT to another float
            dtype, or ENCODE with the format's device functions.
        WORD_P, NWORDS, BLOCK: payload words: pointer type, number per row, moved at a time.
        INPUT: dtype of the rows' elements. DTYPE: payload dtype of CONVERT. ENCODE_FN, GROUP, NG, GB, PB: ENCODE:
            elements per group, groups per row and at a time, payload bytes per group. PIECES: of a row that are read
            and stored at a time.
        SW, SWP, SCALE: scales per row, next power of two, their integer type. SCALES: layout in the output;
            LATER: they are brought into it by a launch of their own.
        ALIGN: rows that group sizes are a multiple of. WEIGHTS: router weights travel. CACHED: an earlier call's
            routing is used again. OPTIONS: what every rank must choose alike. ROWS, RP: rows of a message, and the
            next power of two. GP: group offsets, as a power of two.
        ONCE: how rows are loaded, as Triton names it: those of more than FEW_TOKENS are the first to leave the
            second-level cache again.
        BATCH: tokens whose messages a program publishes together. ALONE: most tokens of a call in which each program
            counts for itself what is before its own; 0: only programs of one token do. SENDERS: most sending programs;
            TR: of whose tallies, TALLY words each, so many are read at a time. GATHER: messages that a receiver places
            at a time. CW, CP: words of a source's counts, and the next power of two. LOOK:
            of them looked at, and summed, at a time.
    """

    SOURCE: int
    WORD_P: Any
    NWORDS: int
    BLOCK: int
    INPUT: Any
    DTYPE: Any
    DTYPE_P: Any
    H: int
    ENCODE_FN: Any
    INPUT_SCALE: bool
    GROUP: int
    NG: int
    GB: int
    PB: int
    PIECES: int
    SW: int
    SWP: int
    SCALE: Any
    SCALE_P: Any
    SCALES: int
    LATER: bool
    ALIGN: int
    WEIGHTS: bool
    CACHED: bool
    OPTIONS: int
    WEIGHT_P: Any
    ROWS: int
    RP: int
    GP: int
    BATCH: int
    ALONE: int
    ONCE: str
    GATHER: int
    SENDERS: int
    TR: int
    TALLY: int
    MESSAGE: int
    M_SCALES: int
    M_TOKEN: int
    M_IDS: int
    M_POSITIONS: int
    M_WEIGHTS: int
    CW: int
    CP: int
    LOOK: int
    O_TALLY_FLAG: int
    O_TALLIES: int
    O_MESSAGE_FLAG: int
    O_COUNTS: int
    O_FIRSTS: int
    O_MESSAGES: int
    O_COUNTS_FLAG: int
    O_FIRSTS_FLAG: int
    O_STAGED_COUNTS: int
    O_STAGED_FIRSTS: int
    O_STAGED_MESSAGES: int


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
) -> DispatchSpec:
    """The spec of a dispatch of rows of ``input_dtype`` (``quantized``: of the format itself, scales beside them);
    ``cached``: over the routing of an earlier one; ``later``: another launch may bring scales into their layout."""
    cfg, regions, message = workspace.config, workspace.regions, workspace.message
    fmt, hidden, power = cfg.format, cfg.hidden_size, triton.next_power_of_2
    source = _source(fmt, input_dtype, quantized)
    nbytes = fmt.payload_bytes(hidden)
    word = word_of(nbytes)
    word_bytes = word.primitive_bitwidth // 8
    scale_bytes = 0 if fmt.scale_dtype is None else fmt.scale_dtype.itemsize
    groups = hidden // fmt.group
    block = min(power(nbytes // word_bytes), max_block)
    # A piece of at least max_block bytes leaves 16 bytes to each thread of a program.
    group_block = min(power(groups), max(1, max_block // fmt.group, max_block * groups // nbytes))
    if source == CONVERT:
        block = min(power(hidden), max_block)
    payload = TRITON_DTYPES.get(fmt.payload_dtype, tl.uint8)
    scale = _WORDS.get(scale_bytes, tl.uint8)
    rows = 1 if cfg.layout == "rank" else cfg.topk + cfg.fused_shared_expert
    # Few tokens are a program's only one; many come in numbers that hide the latency of one another. On CPUs, where all
    # are few, so that every way is taken.
    most = cfg.max_tokens_per_rank
    if device.type == "cpu":
        many = most > 4
        batch, gather, alone = 2, 2, 3 if many else 0
    else:
        many = most > MANY_TOKENS
        batch, gather, alone = min(4, power(max(1, most // 128))), 4 if many else 1, 0 if many else COUNTED_ALONE
    layout = NO_SCALES
    if scale_bytes:
        assert fmt.scale_layout is not None
        layout = ROW_MAJOR if cfg.layout == "rank" else _SCALE_LAYOUTS[fmt.scale_layout.name]
    shared = common(workspace, device)
    # What a look at counts saw is used: a word, or more, for each thread (``kernels.sync.signals``).
    look = max(shared["LP"], threads_of(device), power(COUNT_HEADER * workspace.world_size))
    return DispatchSpec(
        **shared, LOOK=shared["LP"] if cached else look,
        SOURCE=source, WORD_P=tl.pointer_type(word), NWORDS=nbytes // word_bytes,
        BLOCK=block,
        INPUT=TRITON_DTYPES.get(input_dtype, tl.uint8), DTYPE=payload, DTYPE_P=tl.pointer_type(payload), H=hidden,
        ENCODE_FN=fmt.codec().encode if source == ENCODE else None, INPUT_SCALE=input_scale,
        GROUP=fmt.group, NG=groups, GB=group_block, PB=nbytes // groups,
        PIECES=-(-groups // group_block) if source == ENCODE else -(-(hidden if source == CONVERT else nbytes //
        word_bytes) // block), GATHER=gather, ONCE="evict_first" if most > FEW_TOKENS else "",
        SW=fmt.scale_width(hidden), SWP=power(max(1, fmt.scale_width(hidden), 4 if layout == TILES else 1)),
        SCALE=scale, SCALE_P=tl.pointer_type(scale), SCALES=layout,
        LATER=later and layout in (TRANSPOSED, TILES) and many,
        ALIGN=cfg.row_alignment, WEIGHTS=weights, CACHED=cached, OPTIONS=1 + int(weights) + 2 * int(cached),
        WEIGHT_P=tl.pointer_type(TRITON_DTYPES[cfg.weight_dtype]),
        ROWS=rows, RP=power(rows), BATCH=batch, ALONE=alone, SENDERS=MAX_SENDERS,
        TR=power(max(1, 8192 // workspace.block_counts_width)), TALLY=workspace.block_counts_width,
        GP=power(max(workspace.max_local_experts + 1, cfg.world_size) + 1),
        MESSAGE=workspace.message_bytes, M_SCALES=message["scales"].offset, M_TOKEN=message["token"].offset,
        M_IDS=message["ids"].offset, M_POSITIONS=message["positions"].offset, M_WEIGHTS=message["weights"].offset,
        CW=regions["counts"].shape[1], CP=power(regions["counts"].shape[1]),
        O_TALLY_FLAG=regions["block_counts_flag"].offset, O_TALLIES=regions["block_counts"].offset,
        O_MESSAGE_FLAG=regions["message_flag"].offset,
        O_COUNTS=regions["counts"].offset,
        O_FIRSTS=regions["firsts"].offset, O_MESSAGES=regions["messages"].offset,
        O_COUNTS_FLAG=far_offset(workspace, "counts_flag"), O_FIRSTS_FLAG=far_offset(workspace, "firsts_flag"),
        O_STAGED_COUNTS=far_offset(workspace, "staged_counts"), O_STAGED_FIRSTS=far_offset(workspace, "staged_firsts"),
        O_STAGED_MESSAGES=far_offset(workspace, "staged_messages"),
    )  # fmt: skip
