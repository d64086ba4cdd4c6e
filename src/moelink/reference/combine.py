"""The oracle's combine: every token's sum, one addition at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moelink.reference.dispatch import Origin, ReferenceRows, accumulate_dtype, slot_owners
from moelink.reference.rounding import reference_dequantize, reference_quantize

if TYPE_CHECKING:
    from moelink.config import EPConfig


@dataclass(frozen=True)
class _Combine:
    """One combine of all ranks.

    Attributes:
        config: the settings.
        ys: expert outputs of every rank.
        weights: per rank [rows] weights that travelled, or None.
        home_weights: per rank [T, topk] weights given to combine, or None.
        places: per rank, the row of every origin that is present.
    """

    config: EPConfig
    ys: Sequence[Tensor]
    weights: list[Tensor | None]
    home_weights: Sequence[Tensor] | None
    places: list[dict[Origin, int]]

    def row(self, rank: int, origin: Origin) -> Tensor | None:
        """Return the expert output [hidden_size] on ``rank`` of ``origin``, or None without such a row."""
        place = self.places[rank].get(origin)
        return None if place is None else self.ys[rank][place]

    def travelled(self, row: Tensor) -> Tensor:
        """Return ``row`` [hidden_size] after its way home: an fp32 round trip through the combine format, if any."""
        name = self.config.combine_format
        if name is None:
            return row
        return reference_dequantize(name, *reference_quantize(name, row.to(torch.float32)[None]))[0]

    def sent(self, total: Tensor) -> Tensor:
        """Return a sum [hidden_size] in the accumulate dtype after its way: rounded to ``combine_dtype``, or to the
        combine format."""
        if self.config.combine_format is None:
            return total.to(self.config.combine_dtype).to(total.dtype)
        return self.travelled(total)

    def add(self, total: Tensor, rank: int, origin: Origin, *, weighted: bool, travels: bool = False) -> Tensor:
        """Return ``total`` plus the row, if it exists: the product rounded, then the sum. ``travels``: the row travels
        before it is weighted."""
        row = self.row(rank, origin)
        if row is None:
            return total
        row = self.travelled(row) if travels else row
        term = row.to(device=total.device, dtype=total.dtype)
        if weighted:
            weight = self._weight(rank, origin)
            if weight is not None:
                term = term * weight.to(device=total.device, dtype=total.dtype)
        return total + term

    def _weight(self, rank: int, origin: Origin) -> Tensor | None:
        home, token, slot = origin
        if self.home_weights is not None:
            return self.home_weights[home][token, slot]
        travelled = self.weights[rank]
        return None if travelled is None else travelled[self.places[rank][origin]]

    def _rank_row(self, home: int, token: int, owners: list[int], rank: int, like: Tensor) -> Tensor:
        """Return the row that ``rank`` sends of a token, after its way; zeros without one."""
        total = torch.zeros_like(like)
        if self.config.layout == "rank":
            return self.add(total, rank, (home, token, -1), weighted=False, travels=True)
        for slot, owner in enumerate(owners):
            if owner == rank:
                total = self.add(total, rank, (home, token, slot), weighted=True)
        return self.sent(total)

    def _levels_sum(self, total: Tensor, home: int, rows: list[Tensor]) -> Tensor:
        """Return ``total`` plus the ``rows`` of all ranks, nodes ascending: those of the own node one by one, those of
        another node as one sum."""
        size = self.config.ranks_per_node or self.config.world_size
        for first in range(0, self.config.world_size, size):
            if first <= home < first + size:
                for row in rows[first : first + size]:
                    total = total + row
                continue
            node = torch.zeros_like(total)
            for row in rows[first : first + size]:
                node = node + row
            total = total + self.sent(node)
        return total

    def token_sum(self, home: int, token: int, owners: list[int]) -> Tensor:
        """Return the sum [hidden_size] in the accumulate dtype, before the final rounding and without ``shared=``.

        ``owners`` [topk] is the rank that owns each slot's expert, -1 for none.
        """
        config = self.config
        total = torch.zeros(config.hidden_size, dtype=accumulate_dtype(config), device=self.ys[home].device)
        # In allreduce mode a rank sums only rows of its own.
        ranks = [home] if config.mode == "allreduce" else list(range(config.world_size))
        if config.layout == "rank" or (config.pre_reduce and config.mode == "alltoall"):
            rows = [self._rank_row(home, token, owners, rank, total) for rank in ranks]
            total = self._levels_sum(total, home, rows) if config.two_level else sum(rows, total)
        else:
            for slot, owner in enumerate(owners):
                if owner in ranks:
                    total = self.add(total, owner, (home, token, slot), weighted=True, travels=True)
        if config.fused_shared_expert:
            total = self.add(total, home, (home, token, -1), weighted=False)
        return total


def _places(rows: ReferenceRows) -> dict[Origin, int]:
    """Return the row number of every origin; padding rows have none."""
    origins = rows.src_info.reshape(-1, 3)[: rows.num_rows].tolist()
    return {(source, token, slot): row for row, (source, token, slot) in enumerate(origins) if source >= 0}


def _check(config: EPConfig, rows: Sequence[ReferenceRows], home_weights: object, reduce: bool, shared: object) -> None:
    """Refuse calls that moelink refuses, whose results are undefined."""
    if home_weights is not None:
        if config.pre_reduce:
            raise ValueError("home_weights: expected None with pre_reduce=True, got weights; pass them to dispatch")
        if any(r.weights is not None for r in rows):
            raise ValueError("home_weights: expected None, as dispatch had weights, got weights; pass them once")
    if not reduce and (config.layout == "rank" or config.fused_shared_expert or home_weights is not None):
        raise ValueError(
            "reduce=False: expected layout='expert' or 'masked', no fused shared expert and no home_weights, got "
            "others; pass reduce=True"
        )
    if shared is not None and (config.fused_shared_expert or config.mode == "allreduce" or not reduce):
        raise ValueError(
            "shared: expected None with a fused shared expert, mode='allreduce' or reduce=False, got a value; leave "
            "it out"
        )


def reference_combine(
    config: EPConfig,
    ys: Sequence[Tensor],
    rows: Sequence[ReferenceRows],
    topk_ids: Sequence[Tensor],
    topk_weights_home: Sequence[Tensor] | None = None,
    *,
    reduce: bool = True,
    shared: Sequence[Tensor] | None = None,
    weigh: bool = True,
) -> list[Tensor]:
    """Combine of all ranks. Every sequence has one entry per rank. Sums are fp32 (fp64 when combine_dtype is).

    * ``pre_reduce``: per owning rank, ``acc = 0; acc += round(w * y)`` over its slots, ascending; ``acc`` is rounded
      to ``combine_dtype``; these sums are summed in fp32 over ranks, ascending.
    * without ``pre_reduce`` (and in allreduce mode, over this rank's slots only): ``acc += round(w * y)`` over slots.
    * layout "rank": rows, already weighted, summed over ranks, ascending.
    * ``two_level`` (with ``pre_reduce`` or layout "rank"): the same rows of each rank. Each node except home's sums
      them in fp32 over its ranks, ascending, and rounds to ``combine_dtype`` once. Home adds in fp32, nodes ascending,
      the node sums, and for its own node the rows of its ranks, one by one.

    With ``combine_format`` every sum of a rank or node, or row that is not pre-reduced, is encoded and decoded instead
    of rounded to ``combine_dtype``, also on the home rank. Then the shared row (fused, or of ``shared``) is added in
    fp32, and the sum is rounded once. A row that did not fit ``capacity``, or ``rows_per_expert``, adds nothing.

    Args:
        config: read for its plain fields only.
        ys: [rows, hidden_size] expert outputs, of layout "masked" [num_groups, rows_per_expert, hidden_size]; row i
            belongs to row i of ``rows[rank]``.
        rows: the result of ``reference_dispatch``, with weights that travelled.
        topk_ids: [T, topk] of each home rank, as in dispatch.
        topk_weights_home: [T, topk] weights if dispatch had none (``pre_reduce=False`` only).
        reduce: False returns the rows by slot, without a sum.
        shared: [T, hidden_size] to add, or None.
        weigh: False sums rows without the weights that travelled.

    Returns:
        Per rank [T, hidden_size] of ``combine_dtype``; with ``reduce=False`` [T, topk, hidden_size], zero for slots
        that are not routed, dropped, or (allreduce) of another rank; in allreduce mode the rank's partial sum.
    """
    _check(config, rows, topk_weights_home, reduce, shared)
    if topk_weights_home is not None and not weigh:
        raise ValueError("weigh: expected True with topk_weights_home, got False; leave one of them out")
    travelled = [None if r.weights is None or not weigh else r.weights.reshape(-1) for r in rows]
    ys = [y.reshape(-1, config.hidden_size) for y in ys]
    call = _Combine(config, ys, travelled, topk_weights_home, [_places(r) for r in rows])
    outputs = []
    for home, ids in enumerate(topk_ids):
        tokens = slot_owners(config, ids)
        shape = (len(tokens), config.hidden_size) if reduce else (len(tokens), config.topk, config.hidden_size)
        out = torch.zeros(shape, dtype=config.combine_dtype, device=ys[home].device)
        for token, owners in enumerate(tokens):
            if reduce:
                total = call.token_sum(home, token, owners)
                if shared is not None:
                    total = total + shared[home][token].to(total.dtype)
                out[token] = total.to(config.combine_dtype)
                continue
            for slot, owner in enumerate(owners):
                row = call.row(owner, (home, token, slot)) if owner >= 0 else None
                if row is not None:
                    out[token, slot] = call.travelled(row).to(device=out.device, dtype=out.dtype)
        outputs.append(out)
    return outputs
