"""The sums of a pre-reduced combine: of each message's rows on the expert's rank, of the ranks' rows at home.

Sums start at +0, slots (or ranks) ascend, and a product is rounded before it is added. Rows are worked on in blocks
that stay in a CPU's cache (all at once on a GPU), and messages inside a block in order of how many rows they have, so
that the j-th rows of all messages are added to a prefix of the block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.routing import RowPlan

_BLOCK_BYTES = 1 << 20


def partial_sums(
    y: Tensor,
    weights: Tensor | None,
    plan: RowPlan,
    *,
    num_rows: int,
    num_messages: int,
    out: Tensor,
    dtype: torch.dtype,
) -> None:
    """Write the sum of each message's rows to ``out`` [num_messages, hidden], rounded once to its dtype.

    Args:
        y: [rows, hidden] expert outputs.
        weights: [rows] router weights of ``dtype``, or None.
        num_rows: routed rows that fit the capacity (the first ones of ``plan``); the others count as zero.
        dtype: fp32 or fp64, in which sums are formed.

    Example: message 0 has rows 3 (slot 0) and 1 (slot 2), message 1 has row 2: two layers, rows [3, 2] and rows [1].
    """
    hidden = y.shape[1]
    row, message, slot = plan.row[:num_rows], plan.message[:num_rows], plan.slot[:num_rows]
    by_message = torch.argsort(message * (int(slot.max()) + 1 if num_rows else 1) + slot)
    counts = torch.bincount(message, minlength=num_messages)
    first = counts.cumsum(0) - counts
    order = torch.argsort(counts, descending=True, stable=True)
    step = max(1, num_messages if y.is_cuda else _BLOCK_BYTES // (hidden * dtype.itemsize))
    total, part, raw = _buffers(step, hidden, dtype, y)
    sizes = counts[order].tolist()
    for begin in range(0, num_messages, step):
        block = order[begin : begin + step]
        layers = sizes[begin] if len(block) else 0
        acc = total[: len(block)].zero_()
        for layer in range(layers):
            reach = _reach(sizes, begin, begin + len(block), layer)
            rows = row[by_message[first[block[:reach]] + layer]]
            torch.index_select(y, 0, rows, out=raw[:reach])
            term = part[:reach].copy_(raw[:reach])
            if weights is not None:
                term *= weights[rows, None]
            acc[:reach] += term
        out[block] = acc.to(out.dtype)


def sum_rows(rows: Tensor, places: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The home rank's half: [T, hidden] sums in ``dtype`` of ``rows[places[r, t]]`` over r ascending, from +0.

    Args:
        rows: [n, hidden], what came home.
        places: [ranks, T] int64 row numbers.
    """
    hidden = rows.shape[1]
    result = torch.zeros(places.shape[1], hidden, dtype=dtype, device=rows.device)
    step = max(1, places.shape[1] if rows.is_cuda else _BLOCK_BYTES // (hidden * dtype.itemsize))
    _, part, raw = _buffers(step, hidden, dtype, rows)
    for begin in range(0, places.shape[1], step):
        total = result[begin : begin + step]
        for place in places[:, begin : begin + step]:
            torch.index_select(rows, 0, place, out=raw[: len(total)])
            total += part[: len(total)].copy_(raw[: len(total)])
    return result


def _buffers(step: int, hidden: int, dtype: torch.dtype, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty(step, hidden, dtype=dtype, device=y.device)
    return total, torch.empty_like(total), torch.empty(step, hidden, dtype=y.dtype, device=y.device)


def _reach(sizes: list[int], begin: int, end: int, layer: int) -> int:
    """How many messages of the block, by descending size, have a row number ``layer``."""
    low, high = begin, end
    while low < high:
        middle = (low + high) // 2
        if sizes[middle] > layer:
            low = middle + 1
        else:
            high = middle
    return low - begin
