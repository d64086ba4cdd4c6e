"""Sum rows in a fixed order: each message's rows on the expert's rank, and the ranks' rows on the home rank.

Sums start at +0, slots (or ranks) ascend, and a product is rounded before it is added. On a CPU ``index_add_`` adds row
after row, in blocks of few targets that stay in the cache. On CUDA it would add in any order, so there the j-th rows of
all targets are added in one step, j ascending.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.routing import RowPlan

_BLOCK = 16
_WIDE = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


def partial_sums(
    y: Tensor, weights: Tensor | None, plan: RowPlan, *, num_rows: int, out: Tensor, dtype: torch.dtype
) -> None:
    """Write the sum of each message's rows to ``out`` [messages, hidden], rounded once to its dtype.

    Args:
        y: [rows, hidden] expert outputs.
        weights: [rows] router weights of ``dtype``, or None.
        num_rows: routed rows that fit the capacity (the first ones of ``plan``); the others count as zero.
        dtype: fp32 or fp64, in which sums are formed.

    Example: message 0 has rows 3 (slot 0) and 1 (slot 2), message 1 has row 2: out = [y[3] + y[1], y[2]].
    """
    row, message, slot = plan.row[:num_rows], plan.message[:num_rows], plan.slot[:num_rows]
    order = torch.argsort(message * (int(slot.max()) + 1 if num_rows else 1) + slot)
    _add_rows(out, y, weights, row=row[order], target=message[order], dtype=dtype)


def sum_rows(rows: Tensor, tokens: Tensor, *, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """[num_tokens, hidden] sums in ``dtype`` of ``rows`` [n, hidden] that came for ``tokens`` [n], ranks ascending."""
    total = torch.empty(num_tokens, rows.shape[1], dtype=dtype, device=rows.device)
    order = tokens.argsort(stable=True)
    _add_rows(total, rows, None, row=order, target=tokens[order], dtype=dtype)
    return total


def gather_rows(source: Tensor, index: Tensor, out: Tensor) -> None:
    """``out[i] = source[index[i]]`` for uint8 rows, moved in the widest words that their layouts allow."""
    if index.numel() == 0:
        return
    layout = (source.shape[1], source.stride(0), source.storage_offset(), out.stride(0), out.storage_offset())
    for size, dtype in _WIDE:
        if not any(place % size for place in layout):
            torch.index_select(source.view(dtype), 0, index, out=out.view(dtype))
            return
    torch.index_select(source, 0, index, out=out)


def _add_rows(
    out: Tensor, y: Tensor, weights: Tensor | None, *, row: Tensor, target: Tensor, dtype: torch.dtype
) -> None:
    """``out[t]`` = sum of (weighted) ``y[row[i]]`` over i with ``target[i] == t``, i ascending; targets ascend."""
    if y.is_cuda:
        _add_by_layers(out, y, weights, row=row, target=target, dtype=dtype)
        return
    edges = torch.arange(0, len(out) + _BLOCK, _BLOCK, device="cpu")
    starts = torch.searchsorted(target, edges).tolist()
    most = max((end - begin for begin, end in zip(starts[:-1], starts[1:], strict=True)), default=0)
    sums = torch.empty(_BLOCK, out.shape[1], dtype=dtype, device="cpu")
    raw = torch.empty(most, out.shape[1], dtype=y.dtype, device="cpu")
    terms = torch.empty(most, out.shape[1], dtype=dtype, device="cpu")
    factors = None if weights is None else weights[row][:, None]
    for block, (begin, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        torch.index_select(y, 0, row[begin:end], out=raw[: end - begin])
        term = terms[: end - begin].copy_(raw[: end - begin])
        if factors is not None:
            term *= factors[begin:end]
        sums.zero_().index_add_(0, target[begin:end] - block * _BLOCK, term)
        part = out[block * _BLOCK : (block + 1) * _BLOCK]
        part.copy_(sums[: len(part)])


def _add_by_layers(
    out: Tensor, y: Tensor, weights: Tensor | None, *, row: Tensor, target: Tensor, dtype: torch.dtype
) -> None:
    """The same on CUDA: first rows of all targets, second rows, and so on; each target once per layer."""
    counts = torch.bincount(target, minlength=len(out))
    first = counts.cumsum(0) - counts
    layer = torch.arange(len(row), device=y.device) - first[target]
    total = torch.zeros(len(out), out.shape[1], dtype=dtype, device=y.device)
    for number in range(int(counts.max()) if len(counts) else 0):
        here = (layer == number).nonzero().squeeze(1)
        term = torch.index_select(y, 0, row[here]).to(dtype)
        if weights is not None:
            term *= weights[row[here], None]
        total[target[here]] += term
    out.copy_(total)
