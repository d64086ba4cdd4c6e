"""Rows by expert from rows by source rank, and the weighted sum on the way back: what a user of FlashInfer adds to it.

Its one-sided all-to-all leaves a token's row once on a rank, in the order of arrival, and takes one row back that is
weighted and summed. A grouped product wants rows by expert. The three kernels here make the one of the other with as
few launches and bytes as there can be: nothing waits for the host, a row is read once and stored once for each of its
experts, and a sum is made in registers. Rows of an expert come in any order, without padding.

Legend: ``N`` slots (source ranks times tokens), ``K`` topk, ``G`` experts of the rank, ``R`` rows by expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moelink.kernels.launch.cache_keys import Constants, settle_cache_key

IDS = 1024
"""Ids that one program counts."""
ELEMENTS = 2048
"""Elements of a row that one program sums."""


@triton.jit  # type: ignore[untyped-decorator]
def count_kernel(ids, counts, first, n, S: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Add to ``counts`` [G] how many of ``ids`` [n] are of each of the G experts from ``first`` on."""
    i = tl.program_id(0) * S.IDS + tl.arange(0, S.IDS)
    local = tl.load(ids + i, mask=i < n, other=-1) - first
    mine = (i < n) & (local >= 0) & (local < S.G)
    # A bin behind the experts takes all others.
    found = tl.histogram(tl.where(mine, local, S.G), S.BINS)
    g = tl.arange(0, S.BINS)
    tl.atomic_add(counts + g, found, mask=(g < S.G) & (found > 0))


@triton.jit  # type: ignore[untyped-decorator]
def place_kernel(rows, scales, ids, counts, taken, places, placed, placed_scales, first, S: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Copy row ``program_id`` of ``rows`` [N, WORDS] int32 to a row of each of its experts.

    ``counts`` [G] are those of :func:`count_kernel`, ``taken`` [G] zeros; ``places`` [N, K] becomes the row in
    ``placed`` [R, WORDS], or -1 where the expert is of another rank. ``scales`` [N, SCALE_WORDS] go the same way.
    """
    slot = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, S.CHOICES)
    local = tl.load(ids + slot * S.K + k, mask=k < S.K, other=-1) - first
    mine = (k < S.K) & (local >= 0) & (local < S.G)
    place = tl.full((S.CHOICES,), -1, tl.int32)
    here = tl.max(mine.to(tl.int32), 0) > 0
    if here:
        g = tl.arange(0, S.GROUPS)
        sizes = tl.load(counts + g, mask=g < S.G, other=0)
        starts = tl.cumsum(sizes, 0) - sizes
        start = tl.sum(tl.where(local[:, None] == g[None, :], starts[None, :], 0), 1)
        place = tl.where(mine, start + tl.atomic_add(taken + local, 1, mask=mine, sem="relaxed"), -1)
    tl.store(places + slot * S.K + k, place, mask=k < S.K)
    if here:
        i, s = tl.arange(0, S.ROW), tl.arange(0, S.SCALES)
        row = tl.load(rows + slot * S.WORDS + i, mask=i < S.WORDS)
        if S.SCALE_WORDS:
            scale = tl.load(scales + slot * S.SCALE_WORDS + s, mask=s < S.SCALE_WORDS)
        for choice in tl.static_range(S.K):
            to = tl.sum(tl.where(k == choice, place, 0), 0).to(tl.int64)
            tl.store(placed + to * S.WORDS + i, row, mask=(i < S.WORDS) & (to >= 0))
            if S.SCALE_WORDS:
                tl.store(placed_scales + to * S.SCALE_WORDS + s, scale, mask=(s < S.SCALE_WORDS) & (to >= 0))


@triton.jit  # type: ignore[untyped-decorator]
def sum_kernel(y, places, weights, out, counts, taken, S: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write the weighted sum of the rows of a slot to ``out`` [N, H]; slots without a row here are left alone.

    ``y`` [R, H] are rows by expert, ``places`` [N, K] those of :func:`place_kernel`, ``weights`` [N, K] fp32. The first
    program zeroes ``counts`` and ``taken``, which nobody reads any more, for the next call.
    """
    slot, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (slot == 0) & (part == 0):
        g = tl.arange(0, S.GROUPS)
        tl.store(counts + g, tl.zeros((S.GROUPS,), tl.int32), mask=g < S.G)
        tl.store(taken + g, tl.zeros((S.GROUPS,), tl.int32), mask=g < S.G)
    k = tl.arange(0, S.CHOICES)
    place = tl.load(places + slot * S.K + k, mask=k < S.K, other=-1)
    if tl.max(place, 0) >= 0:
        weight = tl.load(weights + slot * S.K + k, mask=place >= 0, other=0.0)
        h = part * S.ELEMENTS + tl.arange(0, S.ELEMENTS)
        total = tl.zeros((S.ELEMENTS,), tl.float32)
        for choice in tl.static_range(S.K):
            row = tl.sum(tl.where(k == choice, place, 0), 0).to(tl.int64)
            of_row = tl.sum(tl.where(k == choice, weight, 0.0), 0)
            total += of_row * tl.load(y + row * S.H + h, mask=(h < S.H) & (row >= 0), other=0.0).to(tl.float32)
        tl.store(out + slot * S.H + h, total.to(out.dtype.element_ty), mask=h < S.H)


@dataclass(frozen=True, repr=False, eq=False)
class PermuteSpec(Constants):
    """Compile-time constants of the kernels; those that a kernel does not read are 0.

    Attributes:
        G, K, H: of the legend.
        GROUPS, BINS, CHOICES: the powers of two that hold G, G + 1 and K.
        IDS: ids that a program counts.
        WORDS, SCALE_WORDS: int32 words of a row and of its scales.
        ROW, SCALES: the powers of two that hold them.
        ELEMENTS: elements that a program sums.
    """

    G: int
    GROUPS: int
    BINS: int
    IDS: int
    K: int
    CHOICES: int
    WORDS: int
    ROW: int
    SCALE_WORDS: int
    SCALES: int
    H: int
    ELEMENTS: int


@dataclass(frozen=True)
class Permuted:
    """The result of :meth:`Permutation.permute`, valid until its next call.

    Attributes:
        rows: [R, n] received rows by expert; those behind the last are undefined.
        scales: [R, s], or None.
        places: [N, K] int32, the row of each slot and choice, or -1.
        weights: [N, K] fp32, as they came.
    """

    rows: Tensor
    scales: Tensor | None
    places: Tensor
    weights: Tensor


class Permutation:
    """The kernels, and their memory for one size of call.

    Attributes:
        counts: [G] int32, rows of each expert, from ``permute`` until ``sum``.
    """

    def __init__(self, *, first: int, num_local: int, capacity: int, device: torch.device) -> None:
        """Prepare for the ``num_local`` experts from ``first`` on, and ``capacity`` rows in all of them."""
        self._first, self._local, self._capacity = first, num_local, capacity
        self.counts = torch.zeros(num_local, dtype=torch.int32, device=device)
        self._taken = torch.zeros_like(self.counts)
        self._memory: dict[str, Tensor] = {}

    def _room(self, name: str, like: Tensor, count: int) -> Tensor:
        """[count, ...] of ``like``'s width and dtype, the same tensor in every call."""
        found = self._memory.get(name)
        if found is None or found.shape != (count, like.shape[1]) or found.dtype != like.dtype:
            found = self._memory[name] = like.new_empty(count, like.shape[1])
        return found

    def permute(self, rows: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor) -> Permuted:
        """Bring ``rows`` [N, n] and ``scales`` [N, s] of slots with ``ids`` [N, K] in the order of their experts.

        Ids of other ranks, -1 among them, have no row. Rows and scales are whole 4-byte words.
        """
        slots, topk = ids.shape
        words = _words(rows)
        scale_words = None if scales is None else _words(scales)
        spec = self._spec(topk, words=words.shape[1], scale_words=0 if scale_words is None else scale_words.shape[1])
        placed = self._room("rows", words, self._capacity)
        placed_scales = placed if scale_words is None else self._room("scales", scale_words, self._capacity)
        places = self._room("places", ids, slots)
        settle_cache_key(count_kernel)[triton.cdiv(ids.numel(), IDS),](
            ids, self.counts, self._first, ids.numel(), S=spec
        )
        settle_cache_key(place_kernel)[slots,](
            words, words if scale_words is None else scale_words, ids, self.counts, self._taken, places, placed,
            placed_scales, self._first, S=spec, num_warps=8,
        )  # fmt: skip
        found = None if scales is None else placed_scales.view(scales.dtype)
        return Permuted(placed.view(rows.dtype), found, places, weights)

    def sum(self, y: Tensor, permuted: Permuted, out: Tensor) -> None:
        """Write to ``out`` [N, H] the sum of each slot's rows of ``y`` [R, H], weighted, in fp32 before it is rounded.

        Slots without rows keep what is there. A call of :meth:`permute` must have come before.
        """
        slots, topk = permuted.places.shape
        spec = self._spec(topk, hidden=y.shape[1])
        settle_cache_key(sum_kernel)[(slots, triton.cdiv(y.shape[1], ELEMENTS))](
            y, permuted.places, permuted.weights, out, self.counts, self._taken, S=spec, num_warps=8
        )

    def _spec(self, topk: int, *, words: int = 0, scale_words: int = 0, hidden: int = 0) -> PermuteSpec:
        power = triton.next_power_of_2
        return PermuteSpec(
            G=self._local, GROUPS=power(self._local), BINS=power(self._local + 1), IDS=IDS, K=topk, CHOICES=power(topk),
            WORDS=words, ROW=power(max(words, 1)), SCALE_WORDS=scale_words, SCALES=power(max(scale_words, 1)), H=hidden,
            ELEMENTS=ELEMENTS,
        )  # fmt: skip


def _words(rows: Tensor) -> Tensor:
    """The bytes of ``rows`` as int32."""
    return rows.view(torch.uint8).view(torch.int32)
