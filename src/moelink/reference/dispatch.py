"""The oracle's dispatch: the place of each row, by loops in the order of the output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moelink.reference.rounding import FormatFacts, format_facts, reference_dequantize, reference_quantize

if TYPE_CHECKING:
    from moelink.config import EPConfig

Origin = tuple[int, int, int]
"""Origin of a row: (source rank, source token, top-k slot); slot -1 for shared rows and layout "rank"."""


@dataclass(frozen=True)
class ReferenceRows:
    """The required result of dispatch on one rank. Rows from ``num_rows`` on are zero (src_info -1), not defined.

    ``rows`` is the capacity, or the worst case. For layout "masked" ``[rows, ...]`` is ``[num_groups, rows_per_expert,
    ...]``. There ``num_rows`` counts all of these rows; the first ``num_recv_per_expert[e]`` of group e are defined.
    With ``zero_copy`` it is ``[world_size, max_tokens, ...]``: the first rows of group s are of source rank s; others
    have src_info -1.

    Attributes:
        tokens: [rows, width] of the payload dtype.
        scales: in the format's layout (row-major for layout "rank"), or None. Layout "masked": in that layout for each
            group, [num_groups, rows_per_expert, n], [num_groups, n, rows_per_expert] or [num_groups, rows_per_expert /
            128, ceil(n / 4), 32, 4, 4].
        row_offsets: [num_groups + 1] int32, clamped to the capacity.
        expert_ids: [num_groups] int32, or None for layout "rank".
        src_info: [rows, 3] int32.
        scales_offsets: [num_groups] int32 for 128x4 tiles, else None; None for layout "masked".
        weights: [rows] fp32 (fp64 when combine_dtype is), 1 on shared rows; None for layout "rank" or without weights.
        num_recv_tokens: [] int32, routed rows present.
        overflow: [] int32, routed and shared rows that did not fit; padding is not counted.
        topk_ids: layout "rank": [rows, topk] int32 local ids (``global_ids``: ids over all ranks), -1 for other ranks'
            experts and on rows past ``num_rows``; else None.
        topk_weights: layout "rank": [rows, topk] weights, 0 for ids -1; else None.
        num_rows: rows that are defined, padding inside groups included (``row_offsets[-1]``).
        input_scales: [world_size] fp32, the global input scale of each source rank (1 for None).
        num_recv_per_expert: [num_local_experts] int32, routed rows present of each local expert; layout "rank": the
            (row, slot) pairs that name it.
    """

    tokens: Tensor
    scales: Tensor | None
    row_offsets: Tensor
    expert_ids: Tensor | None
    src_info: Tensor
    scales_offsets: Tensor | None
    weights: Tensor | None
    num_recv_tokens: Tensor
    overflow: Tensor
    topk_ids: Tensor | None
    topk_weights: Tensor | None
    num_rows: int
    input_scales: Tensor
    num_recv_per_expert: Tensor


@dataclass(frozen=True)
class _Row:
    """One real row: its number in the output, its group, its number inside the group, and its origin."""

    row: int
    group: int
    inner: int
    origin: Origin


def expert_owners(config: EPConfig) -> list[int]:
    """Return the owner rank of every expert: 7 experts on 3 ranks -> [0, 0, 0, 1, 1, 2, 2]."""
    owners: list[int] = []
    for rank in range(config.world_size):
        owners += [rank] * (config.num_experts // config.world_size + (rank < config.num_experts % config.world_size))
    return owners


def slot_owners(config: EPConfig, ids: Tensor) -> list[list[int]]:
    """Return the owner rank [T][topk] of every slot of ``ids`` [T, topk]; -1 for ids outside [0, num_experts)."""
    owners = expert_owners(config)
    return [[owners[e] if 0 <= e < len(owners) else -1 for e in token] for token in ids.tolist()]


def accumulate_dtype(config: EPConfig) -> torch.dtype:
    """Return the dtype of sums and of router weights."""
    return torch.float64 if config.combine_dtype == torch.float64 else torch.float32


def _sources(config: EPConfig, rank: int) -> range:
    """Return the ranks whose tokens ``rank`` receives, ascending: all, or (allreduce) only itself."""
    return range(rank, rank + 1) if config.mode == "allreduce" else range(config.world_size)


def shared_tokens(config: EPConfig, num_tokens: int, rank: int) -> list[int]:
    """Return the tokens of the fused shared expert's group on ``rank``: all own ones, or (allreduce) its slice."""
    if config.mode != "allreduce":
        return list(range(num_tokens))
    share: list[list[int]] = []
    for part in range(config.world_size):
        start = sum(len(tokens) for tokens in share)
        share.append(list(range(start, start + (num_tokens + config.world_size - part - 1) // config.world_size)))
    return share[rank]


def _groups(config: EPConfig, topk_ids: Sequence[Tensor], rank: int) -> list[list[Origin]]:
    """Return the real rows of every group of ``rank``, in final order."""
    if config.layout == "rank":
        arrivals: list[list[Origin]] = [[] for _ in range(config.world_size)]
        for source in _sources(config, rank):
            for token, owners in enumerate(slot_owners(config, topk_ids[source])):
                if rank in owners:
                    arrivals[source].append((source, token, -1))
        return arrivals
    groups: list[list[Origin]] = []
    if config.fused_shared_expert:
        tokens = shared_tokens(config, topk_ids[rank].shape[0], rank)
        groups.append([(rank, token, -1) for token in tokens])
    experts: dict[int, list[Origin]] = {e: [] for e, owner in enumerate(expert_owners(config)) if owner == rank}
    for source in _sources(config, rank):
        for token, ids in enumerate(topk_ids[source].tolist()):
            for slot, expert in enumerate(ids):
                if expert in experts:
                    experts[expert].append((source, token, slot))
    return groups + [experts[e] for e in sorted(experts)]


def _is_by_group(config: EPConfig) -> bool:
    """Return whether every group has room for the same number of rows."""
    return config.layout == "masked" or config.zero_copy


def _row_alignment(config: EPConfig) -> int:
    """Return the divisor of group sizes."""
    if config.layout != "expert":
        return 1
    return math.lcm(config.expert_alignment, format_facts(config.dispatch_format).row_multiple)


def _row_capacity(config: EPConfig, rank: int, max_tokens: int | None) -> int:
    """Return the rows of the output: the worst case, in which all tokens, ``max_tokens`` of each source, name experts
    of ``rank`` only, or a smaller ``capacity``. Layout "masked": rows of each expert, if all slots name the same one,
    rounded up for its scales. With ``zero_copy``: rows of each source."""
    tokens = config.max_tokens_per_rank if max_tokens is None else max_tokens
    if config.zero_copy:
        return tokens
    arriving = len(_sources(config, rank)) * tokens
    if config.layout == "masked":
        facts = format_facts(config.dispatch_format)
        most = arriving * config.topk
        while most % (128 if facts.scale_layout == "tiles" else facts.row_multiple):
            most += 1
        if config.rows_per_expert is None:
            return most
        return config.rows_per_expert if max_tokens is None else min(most, config.rows_per_expert)
    if config.capacity is not None and max_tokens is None:
        return config.capacity
    routed = arriving if config.layout == "rank" else arriving * config.topk
    shared = len(shared_tokens(config, tokens, 0)) if config.fused_shared_expert else 0
    groups = min(expert_owners(config).count(rank), routed) + (shared > 0)
    worst = routed + shared + groups * (_row_alignment(config) - 1)
    return worst if config.capacity is None or worst < config.capacity else config.capacity


def _place(groups: list[list[Origin]], alignment: int) -> tuple[list[_Row], list[int]]:
    """Return rows numbered from 0, each group rounded up to ``alignment``, and the exclusive starts of the groups."""
    rows: list[_Row] = []
    offsets = [0]
    for group, origins in enumerate(groups):
        rows += [_Row(offsets[-1] + i, group, i, origin) for i, origin in enumerate(origins)]
        size = len(origins)
        while size % alignment:
            size += 1
        offsets.append(offsets[-1] + size)
    return rows, offsets


def _place_by_group(groups: list[list[Origin]], size: int) -> tuple[list[_Row], list[int]]:
    """Return the same for groups of ``size`` rows; further rows of a group have the numbers behind it."""
    rows = [_Row(g * size + i, g, i, origin) for g, origins in enumerate(groups) for i, origin in enumerate(origins)]
    return rows, [group * size for group in range(len(groups) + 1)]


def _first_blocks(offsets: Sequence[int]) -> list[int]:
    """Return the first 128-row block of each group, and the number of blocks: 0, 100, 300, 400 -> [0, 1, 3, 4]."""
    blocks = [0]
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        blocks.append(blocks[-1] + math.ceil((end - start) / 128))
    return blocks


def _scales_at(stored: Tensor, layout: str, blocks: Sequence[int] | None, group: int, inner: int, row: int) -> Tensor:
    """View the scales of ``row``, row ``inner`` of ``group``: [n], or for tiles [ceil(n / 4), 4].

    ``blocks``: :func:`_first_blocks`; None: each group has a tensor of its own.
    """
    into, number, first = (stored[group], inner, 0) if blocks is None else (stored, row, blocks[group])
    if layout == "row_major":
        return into[number]
    return into[:, number] if layout == "transposed" else into[first + inner // 128, :, inner % 32, inner % 128 // 32]


def _scale_layout(config: EPConfig) -> str:
    """Return the format's layout, or row-major for layout "rank"."""
    layout = format_facts(config.dispatch_format).scale_layout
    return "row_major" if config.layout == "rank" and layout != "none" else layout


def _copyable(x: Tensor) -> Tensor:
    """Return ``x`` in a dtype that every torch copies and indexes: 1-byte floats as their bits."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _lay_out_scales(
    config: EPConfig, rows: list[_Row], offsets: list[int], size: int, scales: Sequence[Tensor], device: torch.device
) -> Tensor:
    """Return the scale tensor of one rank from the row-major scales [T, n] of every source; zero without a row."""
    width = scales[0].shape[1]
    layout, blocks = _scale_layout(config), None if _is_by_group(config) else _first_blocks(offsets)
    shape: tuple[int, ...] = (size, width)
    if layout == "transposed":
        shape = (width, size)
    elif layout == "tiles":
        num_groups = len(offsets) - 1
        shape = (math.ceil((size + 128 * num_groups) / 128), math.ceil(width / 4), 32, 4, 4)
    if blocks is None:  # one such tensor for each group; each has whole tiles
        shape = (len(offsets) - 1, *((size // 128, *shape[1:]) if layout == "tiles" else shape))
    out = torch.zeros(shape, dtype=_copyable(scales[0]).dtype, device=device)
    for row in rows:
        source, token, _ = row.origin
        values = _copyable(scales[source])[token].to(device)
        if layout == "tiles":
            columns = torch.zeros(shape[-4] * 4, dtype=values.dtype, device=device)
            columns[:width] = values
            values = columns.reshape(-1, 4)
        _scales_at(out, layout, blocks, row.group, row.inner, row.row).copy_(values)
    return out.view(scales[0].dtype)


def _encode(
    config: EPConfig, facts: FormatFacts, x: Tensor, scales: Tensor | None, input_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return payload and row-major scales of one source's tokens."""
    if scales is None:
        return reference_quantize(config.dispatch_format, x, input_scale)
    if facts.scale_dtype is None:
        raise ValueError(
            f"scales: expected None for format {config.dispatch_format!r}, which has none, got scales; leave them out"
        )
    return x.view(facts.payload_dtype), scales.view(facts.scale_dtype)


def reference_dispatch(
    config: EPConfig,
    xs: Sequence[Tensor],
    topk_ids: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None = None,
    *,
    input_scales: Sequence[Tensor | None] | None = None,
    scales: Sequence[Tensor] | None = None,
    max_tokens: Sequence[int | None] | None = None,
) -> list[ReferenceRows]:
    """Dispatch of all ranks. Every sequence has one entry per rank; in allreduce mode the entries are replicas.

    Args:
        config: read for its plain fields only.
        xs: [T, hidden_size] float, or payload rows [T, width] when ``scales`` is given.
        topk_ids: [T, topk] int32 or int64; ids outside [0, num_experts) are not routed.
        topk_weights: [T, topk] float, or None.
        input_scales: global input scales (fp32, one element), or None.
        scales: [T, n] row-major scales of already quantised rows, as ``reference_quantize`` returns them, or None.
        max_tokens: each rank's bound on the tokens of any rank, or None.

    Returns:
        One ``ReferenceRows`` per rank, on the device of that rank's ``xs``.
    """
    world = range(config.world_size)
    facts = format_facts(config.dispatch_format)
    input_scales = [None] * config.world_size if input_scales is None else input_scales
    encoded = [_encode(config, facts, xs[r], None if scales is None else scales[r], input_scales[r]) for r in world]
    payloads = [_copyable(payload) for payload, _ in encoded]
    row_scales = [row for _, row in encoded if row is not None]
    used = torch.tensor([1.0 if s is None else float(s) for s in input_scales], dtype=torch.float32, device="cpu")
    outputs = []
    for rank in world:
        device = xs[rank].device
        capacity = _row_capacity(config, rank, None if max_tokens is None else max_tokens[rank])
        groups, masked = _groups(config, topk_ids, rank), _is_by_group(config)
        if masked:
            every_row, offsets = _place_by_group(groups, capacity)
            rows = [row for row in every_row if row.inner < capacity]
            total, by_row = offsets[-1], [len(groups), capacity]
        else:
            every_row, offsets = _place(groups, _row_alignment(config))
            offsets = [min(offset, capacity) for offset in offsets]
            rows = [row for row in every_row if row.row < capacity]
            total, by_row = capacity, [capacity]
        num_groups = len(offsets) - 1
        routed = sum(config.layout == "rank" or row.origin[2] >= 0 for row in rows)

        tokens = torch.zeros(total, payloads[rank].shape[1], dtype=payloads[rank].dtype, device=device)
        src_info = [[-1, -1, -1] for _ in range(total)]
        for row in rows:
            source, token, _ = row.origin
            tokens[row.row] = payloads[source][token].to(device)
            src_info[row.row] = list(row.origin)
        weights, local_ids, local_weights = _routing_columns(config, rows, total, rank, topk_ids, topk_weights)
        blocks = _first_blocks(offsets)
        block_offsets = [blocks[g] - offsets[g] // 128 for g in range(num_groups)]
        has_offsets = _scale_layout(config) == "tiles" and not masked
        outputs.append(
            ReferenceRows(
                tokens=tokens.view(facts.payload_dtype).reshape(*by_row, tokens.shape[1]),
                scales=_lay_out_scales(config, rows, offsets, capacity, row_scales, device) if row_scales else None,
                row_offsets=_int32(offsets, device),
                expert_ids=None if config.layout == "rank" else _int32(list(range(num_groups)), device),
                src_info=_int32(src_info, device).reshape(*by_row, 3),
                scales_offsets=_int32(block_offsets, device) if has_offsets else None,
                weights=None if weights is None else weights.reshape(by_row).to(device),
                num_recv_tokens=_int32(routed, device),
                overflow=_int32(len(every_row) - len(rows), device),
                topk_ids=None if local_ids is None else local_ids.reshape(*by_row, config.topk).to(device),
                topk_weights=None if local_weights is None else local_weights.reshape(*by_row, config.topk).to(device),
                num_rows=offsets[-1],
                input_scales=used.to(device),
                num_recv_per_expert=_int32(_count_rows(config, rows, rank, topk_ids), device),
            )
        )
    return outputs


def _int32(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _count_rows(config: EPConfig, rows: list[_Row], rank: int, topk_ids: Sequence[Tensor]) -> list[int]:
    """Count the rows of each expert of ``rank``; layout "rank": pairs of a row and a slot that names the expert."""
    counts = {e: 0 for e, owner in enumerate(expert_owners(config)) if owner == rank}
    for row in rows:
        source, token, slot = row.origin
        named = topk_ids[source][token].tolist()
        for expert in named if config.layout == "rank" else named[slot : slot + 1] if slot >= 0 else []:
            if expert in counts:
                counts[expert] += 1
    return list(counts.values())


def _routing_columns(
    config: EPConfig,
    rows: list[_Row],
    capacity: int,
    rank: int,
    topk_ids: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (weights [rows], topk_ids [rows, topk], topk_weights [rows, topk]) of one rank on the CPU, or None."""
    dtype = accumulate_dtype(config)
    given = None if topk_weights is None else [weights.to(dtype).tolist() for weights in topk_weights]
    if config.layout != "rank":
        if given is None:
            return None, None, None
        weights = torch.zeros(capacity, dtype=dtype, device="cpu")
        for row in rows:
            source, token, slot = row.origin
            weights[row.row] = 1.0 if slot < 0 else given[source][token][slot]
        return weights, None, None
    ids = [source.tolist() for source in topk_ids]
    mine = [e for e, owner in enumerate(expert_owners(config)) if owner == rank]
    local_ids = torch.full((capacity, config.topk), -1, dtype=torch.int32, device="cpu")
    local_weights = torch.zeros(capacity, config.topk, dtype=dtype, device="cpu")
    for row in rows:
        source, token, _ = row.origin
        for slot, expert in enumerate(ids[source][token]):
            if expert in mine:
                local_ids[row.row, slot] = expert if config.global_ids else mine.index(expert)
                if given is not None:
                    local_weights[row.row, slot] = given[source][token][slot]
    return None, local_ids, None if given is None else local_weights


def dequantize_rows(config: EPConfig, rows: ReferenceRows) -> Tensor:
    """Return the values [num_rows, hidden_size], fp32 (fp64 for format fp64), of the rows; undefined ones are 0."""
    payload = rows.tokens.reshape(-1, rows.tokens.shape[-1])[: rows.num_rows]
    if rows.scales is None:
        return reference_dequantize(config.dispatch_format, payload, None)
    stored = _copyable(rows.scales)
    layout = _scale_layout(config)
    width = stored.shape[-2] if layout == "transposed" else stored.shape[-1]
    if layout == "tiles":
        width = config.hidden_size // (format_facts(config.dispatch_format).group or 1)
    scales = torch.zeros(rows.num_rows, width, dtype=stored.dtype, device=payload.device)
    offsets: list[int] = rows.row_offsets.tolist()
    blocks = None if _is_by_group(config) else _first_blocks(offsets)
    for group in range(len(offsets) - 1):
        for row in range(offsets[group], offsets[group + 1]):
            scales[row] = _scales_at(stored, layout, blocks, group, row - offsets[group], row).reshape(-1)[:width]
    sources = rows.src_info.reshape(-1, 3)[: rows.num_rows, 0].long()
    input_scale = torch.where(sources >= 0, rows.input_scales[sources], 1.0)
    return reference_dequantize(config.dispatch_format, payload, scales.view(rows.scales.dtype), input_scale)
