"""The oracle's dispatch and combine: worked examples with literal numbers, and a second formulation."""

import ast
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import moelink.reference
from moelink.config import EPConfig
from moelink.reference import (
    dequantize_rows,
    reference_combine,
    reference_dequantize,
    reference_dispatch,
    reference_quantize,
)

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")

QUANTISED = ["fp8_block128", "mxfp8", "nvfp4", "mxfp4", "fp8_block128_e8m0", "fp8_token"]


def config(**changes):
    """Only the plain fields that the oracle may read: reading anything else is an AttributeError."""
    fields = {
        "num_experts": 4, "topk": 2, "hidden_size": 2, "max_tokens_per_rank": 3, "world_size": 2, "mode": "alltoall",
        "dispatch_format": "bf16", "combine_dtype": torch.bfloat16, "layout": "expert", "expert_alignment": 1,
        "capacity": None, "pre_reduce": True, "fused_shared_expert": False, "global_ids": False, "combine_format": None,
        "zero_copy": False, "two_level": False, "ranks_per_node": None,
    }  # fmt: skip
    assert set(changes) <= set(fields)
    return SimpleNamespace(**(fields | changes))


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8)


# Two ranks; rank 0 owns experts 0 and 1, rank 1 owns 2 and 3. Token t of rank r is filled with 10 r + t + 1.
IDS = [torch.tensor([[0, 3], [1, 0], [-1, 2]]), torch.tensor([[3, 0], [0, 0]])]
WEIGHTS = [torch.tensor([[0.5, 0.25], [1, 2], [4, 8]]), torch.tensor([[0.125, 3], [5, 6]])]
XS = [torch.tensor([[1.0] * 2, [2.0] * 2, [3.0] * 2]).bfloat16(), torch.tensor([[11.0] * 2, [12.0] * 2]).bfloat16()]


def defined(rows, name):
    return getattr(rows, name)[: rows.num_rows].tolist()


def test_dispatch_by_expert():
    first, second = reference_dispatch(config(), XS, IDS, WEIGHTS)
    assert first.row_offsets.tolist() == [0, 5, 6]
    assert first.expert_ids.tolist() == [0, 1]
    assert defined(first, "src_info") == [[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 1], [0, 1, 0]]
    assert defined(first, "tokens") == [[1, 1], [2, 2], [11, 11], [12, 12], [12, 12], [2, 2]]
    assert defined(first, "weights") == [0.5, 2, 3, 5, 6, 1]
    assert (first.num_rows, int(first.num_recv_tokens), int(first.overflow)) == (6, 6, 0)
    assert first.tokens.shape == (12, 2)
    assert first.tokens.dtype == torch.bfloat16
    assert first.weights.dtype == torch.float32
    integers = (first.row_offsets, first.expert_ids, first.src_info, first.num_recv_tokens, first.overflow)
    assert {tensor.dtype for tensor in integers} == {torch.int32}
    absent = (first.scales, first.scales_offsets, first.topk_ids, first.topk_weights)
    assert absent == (None, None, None, None)

    assert second.row_offsets.tolist() == [0, 1, 3]
    assert defined(second, "src_info") == [[0, 2, 1], [0, 0, 1], [1, 0, 0]]
    assert defined(second, "tokens") == [[3, 3], [1, 1], [11, 11]]
    assert defined(second, "weights") == [8, 0.25, 0.125]


def test_dispatch_by_rank():
    first, second = reference_dispatch(config(layout="rank"), XS, IDS, WEIGHTS)
    assert first.row_offsets.tolist() == [0, 2, 4]
    assert defined(first, "src_info") == [[0, 0, -1], [0, 1, -1], [1, 0, -1], [1, 1, -1]]
    assert defined(first, "tokens") == [[1, 1], [2, 2], [11, 11], [12, 12]]
    assert defined(first, "topk_ids") == [[0, -1], [1, 0], [-1, 0], [0, 0]]
    assert defined(first, "topk_weights") == [[0.5, 0], [1, 2], [0, 3], [5, 6]]
    assert (first.expert_ids, first.weights, first.tokens.shape[0]) == (None, None, 6)
    assert first.topk_ids.dtype == torch.int32

    assert second.row_offsets.tolist() == [0, 2, 3]
    assert defined(second, "src_info") == [[0, 0, -1], [0, 2, -1], [1, 0, -1]]
    assert defined(second, "topk_ids") == [[-1, 1], [-1, 0], [1, -1]]
    assert defined(second, "topk_weights") == [[0, 0.25], [0, 8], [0.125, 0]]


def test_ids_outside_the_experts_act_as_minus_one():
    ids = [torch.tensor([[0, 3], [1, 0], [99, 2]], dtype=torch.int32), torch.tensor([[3, 0], [0, 0]])]
    for got, want in zip(reference_dispatch(config(), XS, ids), reference_dispatch(config(), XS, IDS), strict=True):
        assert torch.equal(got.src_info, want.src_info)
        assert got.weights is None


def test_uneven_experts_belong_to_the_first_ranks():
    ids = [torch.arange(7)[:, None]] + [torch.empty(0, 1, dtype=torch.int64)] * 2
    xs = [torch.zeros(7, 2), torch.zeros(0, 2), torch.zeros(0, 2)]
    settings = config(num_experts=7, world_size=3, topk=1, max_tokens_per_rank=7)
    rows = reference_dispatch(settings, xs, ids)
    assert [defined(r, "src_info") for r in rows] == [
        [[0, 0, 0], [0, 1, 0], [0, 2, 0]], [[0, 3, 0], [0, 4, 0]], [[0, 5, 0], [0, 6, 0]],
    ]  # fmt: skip


def test_alignment_pads_groups_with_zero_rows():
    first, second = reference_dispatch(config(expert_alignment=4), XS, IDS, WEIGHTS)
    assert first.row_offsets.tolist() == [0, 8, 12]
    assert defined(first, "tokens") == [[v, v] for v in (1, 2, 11, 12, 12, 0, 0, 0, 2, 0, 0, 0)]
    assert defined(first, "weights") == [0.5, 2, 3, 5, 6, 0, 0, 0, 1, 0, 0, 0]
    assert defined(first, "src_info")[5:10] == [[-1] * 3] * 3 + [[0, 1, 0], [-1] * 3]
    assert (int(first.num_recv_tokens), first.tokens.shape[0]) == (6, 18)
    assert second.row_offsets.tolist() == [0, 4, 8]


def test_empty_groups_stay_empty():
    ids = [torch.tensor([[1, 1]]), torch.tensor([[-1, -1]])]
    xs = [torch.ones(1, 2), torch.ones(1, 2)]
    first, second = reference_dispatch(config(expert_alignment=4), xs, ids)
    assert first.row_offsets.tolist() == [0, 0, 4]
    assert second.row_offsets.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "capacity, alignment, offsets, received, overflow",
    [(4, 1, [0, 4, 4], 4, 2), (7, 4, [0, 7, 7], 5, 1), (9, 4, [0, 8, 9], 6, 0), (0, 1, [0, 0, 0], 0, 6)],
)
def test_capacity_cuts_in_row_order(capacity, alignment, offsets, received, overflow):
    rows = reference_dispatch(config(capacity=capacity, expert_alignment=alignment), XS, IDS, WEIGHTS)[0]
    assert rows.row_offsets.tolist() == offsets
    assert (int(rows.num_recv_tokens), int(rows.overflow)) == (received, overflow)
    assert (rows.tokens.shape[0], rows.num_rows) == (capacity, offsets[-1])


def test_shared_rows_come_first_and_count_as_overflow_only():
    first = reference_dispatch(config(fused_shared_expert=True), XS, IDS, WEIGHTS)[0]
    assert first.row_offsets.tolist() == [0, 3, 8, 9]
    assert first.expert_ids.tolist() == [0, 1, 2]
    assert defined(first, "src_info")[:4] == [[0, 0, -1], [0, 1, -1], [0, 2, -1], [0, 0, 0]]
    assert defined(first, "weights")[:4] == [1, 1, 1, 0.5]
    assert int(first.num_recv_tokens) == 6
    cut = reference_dispatch(config(fused_shared_expert=True, capacity=2), XS, IDS, WEIGHTS)[0]
    assert (int(cut.num_recv_tokens), int(cut.overflow), cut.row_offsets.tolist()) == (0, 7, [0, 2, 2, 2])


def test_allreduce_keeps_own_experts_and_a_slice_of_shared_rows():
    first, second = reference_dispatch(config(mode="allreduce", fused_shared_expert=True), [XS[0]] * 2, [IDS[0]] * 2)
    assert defined(first, "src_info") == [[0, 0, -1], [0, 1, -1], [0, 0, 0], [0, 1, 1], [0, 1, 0]]
    assert defined(second, "src_info") == [[1, 2, -1], [1, 2, 1], [1, 0, 1]]
    assert first.row_offsets.tolist() == [0, 2, 4, 5]
    assert second.row_offsets.tolist() == [0, 1, 2, 3]
    assert first.tokens.shape[0] == 3 * 2 + 2


def test_fp8_groups_start_at_multiples_of_four_and_scales_are_transposed():
    ids = [torch.arange(4).repeat_interleave(10)[:, None]]
    x = torch.arange(1, 41).float()[:, None].expand(40, 256).contiguous()
    sizes = {"world_size": 1, "topk": 1, "hidden_size": 256, "max_tokens_per_rank": 40}
    settings = config(**sizes, dispatch_format="fp8_block128", expert_alignment=2)
    rows = reference_dispatch(settings, [x], ids)[0]
    assert rows.row_offsets.tolist() == [0, 12, 24, 36, 48]
    assert rows.scales.shape == (2, 40 + 4 * 3)
    scales = torch.arange(1, 41).float() / torch.tensor(448.0)
    assert torch.equal(rows.scales[1, 12:22], scales[10:20])
    assert rows.scales[:, 10:12].tolist() == [[0, 0]] * 2
    assert torch.equal(dequantize_rows(settings, rows)[12:22], 448 * scales[10:20, None].expand(10, 256))


def test_scale_tiles_start_a_block_per_group():
    sizes, width = [100, 200, 100], 5
    ids = [torch.arange(3).repeat_interleave(torch.tensor(sizes))[:, None]]
    x = torch.randn(400, width * 32, generator=torch.Generator().manual_seed(0))
    shape = {"num_experts": 3, "world_size": 1, "topk": 1, "hidden_size": 160, "max_tokens_per_rank": 400}
    settings = config(**shape, dispatch_format="mxfp8")
    rows = reference_dispatch(settings, [x], ids)[0]
    assert rows.row_offsets.tolist() == [0, 100, 300, 400]
    assert rows.scales_offsets.tolist() == [0, 1, 1]
    assert rows.scales.shape == (7, 2, 32, 4, 4)
    payload, scales = reference_quantize("mxfp8", x)
    flat = np.zeros(7 * 2 * 512, np.uint8)
    for group, base in enumerate([0, 1, 3]):
        for i in range(sizes[group]):
            for c in range(width):
                block, row = base + i // 128, sum(sizes[:group]) + i
                place = (((block * 2 + c // 4) * 32 + i % 32) * 4 + i % 128 // 32) * 4 + c % 4
                flat[place] = scales.view(torch.uint8)[row, c]
    assert np.array_equal(bits(rows.scales).flatten().numpy(), flat)
    assert torch.equal(dequantize_rows(settings, rows), reference_dequantize("mxfp8", payload, scales))


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("name", ["bf16", "fp32", "fp64", *QUANTISED])
def test_rows_carry_the_quantised_tokens(name, layout):
    generator = torch.Generator().manual_seed(1)
    settings = config(hidden_size=128, dispatch_format=name, layout=layout)
    xs = [torch.randn(len(ids), 128, generator=generator) for ids in IDS]
    scale = [torch.tensor(100.0), torch.tensor(300.0)] if name == "nvfp4" else [None, None]
    got = reference_dispatch(settings, xs, IDS, input_scales=scale)
    encoded = [reference_quantize(name, x, s) for x, s in zip(xs, scale, strict=True)]
    values = [reference_dequantize(name, *pair, s) for pair, s in zip(encoded, scale, strict=True)]
    for rows in got:
        found = dequantize_rows(settings, rows)
        for row, (source, token, _) in enumerate(defined(rows, "src_info")):
            want = values[source][token] if source >= 0 else torch.zeros(128)
            assert torch.equal(found[row], want.to(found.dtype))
    if name in QUANTISED:
        given = reference_dispatch(settings, [p for p, _ in encoded], IDS, scales=[s for _, s in encoded])
        for a, b in zip(given, got, strict=True):
            assert torch.equal(bits(a.tokens), bits(b.tokens))
            assert torch.equal(bits(a.scales), bits(b.scales))


def combine_one(ids, values, *, weights=None, shared=None, in_dispatch=True, **changes):
    """Token 0 of rank 0 with ``ids``; slot k's expert output is ``values[k]`` (index -1: the fused shared row)."""
    settings = config(topk=len(ids), hidden_size=1, max_tokens_per_rank=1, **changes)
    topk_ids = [torch.tensor([ids]), torch.full((0, len(ids)), -1)]
    given = None if weights is None else [torch.tensor([weights]), torch.zeros(0, len(ids))]
    xs = [torch.zeros(1, 1), torch.zeros(0, 1)]
    rows = reference_dispatch(settings, xs, topk_ids, given if in_dispatch else None)
    slots = [r.src_info[:, 2].tolist() for r in rows]
    ys = [torch.tensor([[values[k]] for k in rank], dtype=settings.combine_dtype) for rank in slots]
    added = None if shared is None else [torch.tensor([[shared]]), torch.zeros(0, 1)]
    outs = reference_combine(settings, ys, rows, topk_ids, None if in_dispatch else given, shared=added)
    assert outs[1].shape == (0, 1)
    assert outs[0].dtype == settings.combine_dtype
    return outs[0].item()


@pytest.mark.parametrize("pre_reduce, expected", [(True, 256.0), (False, 258.0)])
def test_pre_reduction_rounds_twice(pre_reduce, expected):
    # Rank 0: bf16(256 + 1) = 256 (tie to even); then bf16(256 + 1) = 256. In one sum: bf16(258) = 258.
    assert combine_one([0, 1, 2], [256.0, 1.0, 1.0], pre_reduce=pre_reduce) == expected


@pytest.mark.parametrize(
    "ids, changes, expected", [([0, 1], {}, 36.0), ([0, 1], {"pre_reduce": False}, 34.0), ([0, 2], {}, 34.0)]
)
def test_combine_format(ids, changes, expected):
    """Column 0 of the first row is 448, which makes its scale 1; the second row is 18 in column 1 alone.

    The sum 35 becomes 36 of e4m3. Apart 17 becomes 16, and 18 with its scale of 2**-4 stays.
    """
    settings = config(hidden_size=32, max_tokens_per_rank=1, combine_format="mxfp8", **changes)
    topk_ids = [torch.tensor([ids]), torch.full((0, 2), -1)]
    rows = reference_dispatch(settings, [torch.zeros(1, 32), torch.zeros(0, 32)], topk_ids)
    values = torch.zeros(2, 32, dtype=torch.bfloat16)
    values[0, 0], values[0, 1], values[1, 1] = 448, 17, 18
    ys = [values[r.src_info[:, 2].long().clamp(min=0)] for r in rows]
    outs = reference_combine(settings, ys, rows, topk_ids)
    assert outs[0][0].tolist() == [448.0, expected] + [0.0] * 30
    if "pre_reduce" in changes:
        outs = reference_combine(settings, ys, rows, topk_ids, reduce=False)
        assert outs[0][0, :, 1].tolist() == [16.0, 18.0]


@pytest.mark.parametrize("pre_reduce, expected", [(True, 2.0**24 + 2), (False, 2.0**24)])
def test_order_of_sums(pre_reduce, expected):
    # Slots 0 and 2 belong to rank 0: (1 + 1) + 2**24, or in slot order (1 + 2**24) + 1.
    got = combine_one([0, 2, 1], [1.0, 2.0**24, 1.0], pre_reduce=pre_reduce, combine_dtype=torch.float32)
    assert got == expected


@pytest.mark.parametrize("pre_reduce", [True, False])
def test_product_is_rounded_before_the_sum(pre_reduce):
    # (1 + 2**-12)**2 rounds to 1 + 2**-11 in fp32; a fused multiply-add would leave 2**-24. fp64 does keep it.
    ids, values, weights = [0, 1], [-(1 + 2.0**-11), 1 + 2.0**-12], [1.0, 1 + 2.0**-12]
    for dtype, expected in [(torch.float32, 0.0), (torch.float64, 2.0**-24)]:
        assert combine_one(ids, values, weights=weights, pre_reduce=pre_reduce, combine_dtype=dtype) == expected


def test_weights_may_come_with_combine():
    for in_dispatch in (True, False):
        assert combine_one([0, 3], [2.0, 4.0], weights=[0.5, 3.0], pre_reduce=False, in_dispatch=in_dispatch) == 13.0
    assert combine_one([0, 3], [2.0, 4.0]) == 6.0
    with pytest.raises(ValueError, match="pre_reduce"):
        combine_one([0, 3], [2.0, 4.0], weights=[0.5, 3.0], in_dispatch=False)


def test_shared_is_added_before_the_only_rounding():
    # 256 + 1 + 1 = 258; rounding before adding the shared row would give 256.
    assert combine_one([0, 2], [256.0, 1.0], shared=1.0) == 258.0
    assert combine_one([0, 2], [256.0, 1.0, 1.0], fused_shared_expert=True) == 258.0
    assert combine_one([0, 2], [256.0, 1.0, 7.0], weights=[2.0, 0.0], fused_shared_expert=True) == 520.0


def test_sums_start_at_positive_zero():
    assert math.copysign(1, combine_one([0, 2], [-0.0, -0.0])) == 1
    assert math.copysign(1, combine_one([-1, -1], [math.nan, math.nan])) == 1


def test_layout_rank_sums_weighted_rows_over_ranks():
    settings = config(layout="rank", hidden_size=1)
    xs = [x[:, :1].contiguous() for x in XS]
    rows = reference_dispatch(settings, xs, IDS, WEIGHTS)
    ys = [torch.tensor([[256.0], [2], [3], [4], [0], [0]]), torch.tensor([[3.0], [20], [30], [0], [0], [0]])]
    outs = reference_combine(settings, [y.bfloat16() for y in ys], rows, IDS)
    assert outs[0].tolist() == [[260], [2], [20]]  # 259 lies between 258 and 260
    assert outs[1].tolist() == [[33], [4]]


def test_rows_in_place_are_in_groups_of_one_size():
    """Of 3 rows; and with room for one row of a source's on rank 1."""
    xs = [x[:, :1].contiguous() for x in XS]
    first, second = reference_dispatch(config(layout="rank", hidden_size=1, zero_copy=True), xs, IDS, WEIGHTS)
    assert first.row_offsets.tolist() == second.row_offsets.tolist() == [0, 3, 6]
    assert first.tokens[:, :, 0].tolist() == [[1, 2, 0], [11, 12, 0]]
    assert first.topk_ids.tolist() == [[[0, -1], [1, 0], [-1, -1]], [[-1, 0], [0, 0], [-1, -1]]]
    assert second.src_info.tolist() == [[[0, 0, -1], [0, 2, -1], [-1, -1, -1]], [[1, 0, -1], [-1] * 3, [-1] * 3]]
    assert second.topk_weights[1].tolist() == [[0.125, 0], [0, 0], [0, 0]]
    assert (int(first.num_recv_tokens), int(second.num_recv_tokens), int(second.overflow)) == (4, 3, 0)

    settings = config(layout="rank", hidden_size=1, zero_copy=True)
    rows = reference_dispatch(settings, xs, IDS, WEIGHTS, max_tokens=[3, 1])
    assert rows[1].src_info.tolist() == [[[0, 0, -1]], [[1, 0, -1]]]
    assert (int(rows[1].num_recv_tokens), int(rows[1].overflow)) == (2, 1)
    ys = [torch.arange(1.0, 7).bfloat16().view(2, 3, 1), torch.tensor([[[10.0]], [[20]]]).bfloat16()]
    outs = reference_combine(settings, ys, rows, IDS)
    assert [out[:, 0].tolist() for out in outs] == [[11, 2, 0], [24, 5]]


def test_unreduced_rows_by_slot_and_dropped_rows_are_zero():
    for capacity, last in ((None, 6.0), (5, 0.0)):
        settings = config(hidden_size=1, capacity=capacity, pre_reduce=False)
        rows = reference_dispatch(settings, [x[:, :1].contiguous() for x in XS], IDS, WEIGHTS)
        ys = [(torch.arange(len(r.tokens)) + 1 + 10 * g).bfloat16()[:, None] for g, r in enumerate(rows)]
        outs = reference_combine(settings, ys, rows, IDS, reduce=False)
        assert outs[0][:, :, 0].tolist() == [[1, 12], [last, 2], [0, 11]]
        assert outs[1][:, :, 0].tolist() == [[13, 3], [4, 5]]
        reduced = reference_combine(settings, ys, rows, IDS)
        assert reduced[0][:, 0].tolist() == [0.5 * 1 + 0.25 * 12, last + 2 * 2, 8 * 11]


def test_allreduce_returns_partial_sums():
    settings = config(mode="allreduce", fused_shared_expert=True, hidden_size=1)
    ids, weights, xs = [IDS[0]] * 2, [WEIGHTS[0]] * 2, [XS[0][:, :1].contiguous()] * 2
    rows = reference_dispatch(settings, xs, ids, weights)
    first = torch.tensor([100.0, 200, 1, 2, 3])  # shared 0, shared 1, then (0, 0), (1, 1), (1, 0)
    second = torch.tensor([300.0, 4, 5])  # shared 2, then (2, 1), (0, 1)
    ys = [first.bfloat16()[:, None], second.bfloat16()[:, None]]
    outs = reference_combine(settings, ys, rows, ids)
    assert outs[0][:, 0].tolist() == [100.5, 207, 0]
    assert outs[1][:, 0].tolist() == [1.25, 0, 332]
    settings.pre_reduce = False
    late = reference_combine(settings, ys, reference_dispatch(settings, xs, ids), ids, weights)
    assert all(torch.equal(a, b) for a, b in zip(late, outs, strict=True))


RANDOM = {"num_experts": 8, "topk": 5, "max_tokens_per_rank": 7, "world_size": 3}


def random_case(seed, settings):
    generator = torch.Generator().manual_seed(seed)
    counts = [5, 0, 7]
    ids = [torch.randint(-2, settings.num_experts + 1, (n, settings.topk), generator=generator) for n in counts]
    xs = [torch.randn(n, settings.hidden_size, generator=generator).bfloat16() for n in counts]
    return xs, ids, [torch.rand(n, settings.topk, generator=generator) for n in counts]


@pytest.mark.parametrize("pre_reduce", [True, False])
@pytest.mark.parametrize("capacity", [None, 9])
def test_against_sorted_tuples_and_numpy(pre_reduce, capacity):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    settings = EPConfig(**RANDOM, hidden_size=3, pre_reduce=pre_reduce, capacity=capacity)
    xs, ids, weights = random_case(3, settings)
    owner = np.repeat([0, 1, 2], [3, 3, 2])
    slots = [(e, s, t, k) for s in range(3) for t, row in enumerate(ids[s].tolist()) for k, e in enumerate(row)]
    routed = sorted((owner[slot[0]], *slot) for slot in slots if 0 <= slot[0] < 8)
    rows = reference_dispatch(settings, xs, ids, weights)
    kept = {}
    for rank in range(3):
        mine = [r for r in routed if r[0] == rank]
        cut = mine[:capacity]
        assert defined(rows[rank], "src_info") == [list(r[2:]) for r in cut]
        sizes = [sum(r[1] == e for r in cut) for e in range(8) if owner[e] == rank]
        assert np.diff(rows[rank].row_offsets).tolist() == sizes
        assert int(rows[rank].overflow) == len(mine) - len(cut)
        kept.update({(rank, s, t, k): i for i, (_, _, s, t, k) in enumerate(cut)})
    ys = [torch.randn(r.tokens.shape, generator=torch.Generator().manual_seed(9)).bfloat16() for r in rows]
    outs = reference_combine(settings, ys, rows, ids)
    for home in range(3):
        total = np.zeros((len(xs[home]), 3), np.float32)
        partial = np.zeros((3, len(xs[home]), 3), np.float32)
        for k in range(5):
            for rank in range(3):
                for t in range(len(total)):
                    if (rank, home, t, k) in kept:
                        y = ys[rank][kept[rank, home, t, k]].float().numpy()
                        term = y * np.float32(weights[home][t, k])
                        (partial[rank] if pre_reduce else total)[t] += term
        if pre_reduce:
            for rank in range(3):
                total += partial[rank].astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.array_equal(outs[home].float().numpy(), total.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["bf16", *QUANTISED])
def test_cuda_agrees_with_cpu(name):
    settings = EPConfig(**RANDOM, hidden_size=256, dispatch_format=name)
    case = random_case(3, settings)
    cuda_case = [[tensor.cuda() for tensor in part] for part in case]
    cpu, cuda = reference_dispatch(settings, *case), reference_dispatch(settings, *cuda_case)
    for a, b in zip(cpu, cuda, strict=True):
        for field in ("tokens", "scales", "row_offsets", "src_info", "weights", "num_recv_tokens"):
            want, got = getattr(a, field), getattr(b, field)
            assert want is None or torch.equal(bits(want), bits(got.cpu()))
    ys = [torch.randn(len(r.tokens), 256).bfloat16() for r in cpu]
    outs = reference_combine(settings, ys, cpu, case[1])
    for a, b in zip(outs, reference_combine(settings, [y.cuda() for y in ys], cuda, cuda_case[1]), strict=True):
        assert torch.equal(a, b.cpu())


def run_time_imports(path):
    """Modules that a file imports outside ``if TYPE_CHECKING``."""
    pending = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            pending += ast.iter_child_nodes(node)


def test_shares_no_code_with_what_it_judges():
    files = sorted(Path(moelink.reference.__file__).parent.glob("*.py"))
    imported = {name for path in files for name in run_time_imports(path)}
    assert "torch" in imported
    assert [name for name in imported if name.startswith("moelink") and not name.startswith("moelink.reference")] == []
