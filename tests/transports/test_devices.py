"""All ranks in one process: random shapes, options that reuse tensors, hooks, and what is counted."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moelink
from moelink import reference
from moelink.testing import assert_bitwise_equal, rank_data
from moelink.transports.collective.dispatch import _check_counts
from moelink.transports.collective.wire import BadMessageError
from tests.support.cases import FIELDS, SCENARIOS, Case, Result, Setup, check_case, check_rows


def run_devices(ep, case, world_size):
    """One dispatch and combine on all ranks; results as the process runner gives them."""
    data = [case.data(rank) for rank in range(world_size)]
    weights = [d.topk_weights for d in data]
    recvs = ep.dispatch([d.x for d in data], [d.topk_ids for d in data], weights if case.travel else None)
    outs = ep.combine(
        [case.expert_rows(rank, recv.tokens.shape[0]) for rank, recv in enumerate(recvs)],
        recvs,
        weights if case.weights == "combine" else None,
        reduce=case.reduce,
        shared=[case.shared_rows(rank) for rank in range(world_size)] if case.shared else None,
        weigh=case.weights != "left",
    )
    return [Result.of(recv, out) for recv, out in zip(recvs, outs, strict=True)]


@settings(max_examples=200, deadline=None)
@given(
    world_size=st.integers(1, 5),
    fmt=st.sampled_from(["bf16", "fp8_block128", "mxfp8", "nvfp4", "mxfp4", "fp32"]),
    num_experts=st.integers(1, 12),
    topk=st.integers(1, 6),
    layout=st.sampled_from(["expert", "rank"]),
    pre_reduce=st.booleans(),
    alignment=st.sampled_from([1, 2, 5, 16]),
    capacity=st.one_of(st.none(), st.integers(0, 40)),
    scenario=st.sampled_from(SCENARIOS),
    seed=st.integers(0, 10_000),
)
def test_random_shapes_equal_oracle(
    world_size, fmt, num_experts, topk, layout, pre_reduce, alignment, capacity, scenario, seed
):
    options = {"layout": layout, "capacity": capacity}
    if layout == "expert":
        options |= {"pre_reduce": pre_reduce, "expert_alignment": alignment}
    setup = Setup(fmt, tuple(options.items()), num_experts=num_experts, topk=topk)
    if scenario == "one_expert" and num_experts < 3:
        scenario = "uniform"
    case = Case(setup, scenario if topk <= num_experts else "repeats", seed=seed)
    with moelink.init_devices(["cpu"] * world_size, **setup.fields, transport="collective") as ep:
        check_case(case, world_size, run_devices(ep, case, world_size))


def make(world_size=3, fmt="fp8_block128", **options):
    case = Case(Setup(fmt, tuple(options.items())), "holes", seed=5)
    ep = moelink.init_devices(["cpu"] * world_size, **case.setup.fields, transport="collective")
    data = [case.data(rank) for rank in range(world_size)]
    xs, ids, weights = [d.x for d in data], [d.topk_ids for d in data], [d.topk_weights for d in data]
    return case, ep, xs, ids, weights


def visible(recv):
    return {name: getattr(recv, name) for name in FIELDS}


def test_input_scale_enters_nvfp4():
    case, ep, xs, ids, weights = make(fmt="nvfp4")
    scales = [torch.tensor([0.5 + rank]) for rank in range(3)]
    expected = reference.reference_dispatch(case.setup.config(3), xs, ids, weights, input_scales=scales)
    hooks = [moelink.Hook(None, lambda tensors: tensors[0], (scale,)) for scale in scales]
    for given_scales in (scales, hooks):
        for rank, recv in enumerate(ep.dispatch(xs, ids, weights, input_scale=given_scales)):
            check_rows(f"rank {rank}", expected[rank], visible(recv))


def test_routing_is_reused_without_ids():
    case, ep, xs, ids, weights = make()
    first = ep.dispatch(xs, ids, weights)
    before = ep.traffic().dispatch
    others = [x * 2 for x in xs]
    again = ep.dispatch(others, None, weights, routing=first)
    assert ep.traffic().dispatch - before < before, "ids must not travel again"
    expected = reference.reference_dispatch(case.setup.config(3), others, ids, weights)
    for rank in range(3):
        check_rows(f"rank {rank}", expected[rank], visible(again[rank]))
    ys = [case.expert_rows(rank, recv.tokens.shape[0]) for rank, recv in enumerate(again)]
    outs = reference.reference_combine(case.setup.config(3), ys, expected, ids, None)
    for rank, out in enumerate(ep.combine(ys, again)):
        assert_bitwise_equal(out, outs[rank])
    with pytest.raises(moelink.ArgumentError, match="rows of the reused routing"):
        ep.dispatch([x[:1] for x in xs], None, routing=first)
    with pytest.raises(moelink.ArgumentError, match="topk_ids: expected None with routing="):
        ep.dispatch(others, [i.clone() for i in ids], routing=first)


def test_a_reused_routing_brings_as_many_messages_as_before():
    _check_counts([2, 0, 3], [2, 0, 3])
    for announced in (1, 3):
        with pytest.raises(BadMessageError, match=f"expected the 2 messages .*, got {announced}") as caught:
            _check_counts([0, announced, 3], [0, 2, 3])
        assert caught.value.source == 1


def test_out_is_written_in_place_and_nothing_else_is_touched():
    case, ep, xs, ids, weights = make(fused_shared_expert=True)
    kept = ep.dispatch(xs, ids, weights)
    copies = [{name: None if t is None else t.clone() for name, t in visible(recv).items()} for recv in kept]
    target = ep.dispatch([x * 3 for x in xs], ids, weights)
    result = ep.dispatch(xs, ids, weights, out=target)
    expected = reference.reference_dispatch(case.setup.config(3), xs, ids, weights)
    for rank in range(3):
        assert result[rank].tokens.data_ptr() == target[rank].tokens.data_ptr()
        check_rows(f"rank {rank}", expected[rank], visible(result[rank]))
        for name, tensor in visible(kept[rank]).items():
            assert_bitwise_equal(tensor, copies[rank][name], name)
    ys = [case.expert_rows(rank, recv.tokens.shape[0]) for rank, recv in enumerate(result)]
    outs = [torch.full_like(x, torch.nan) for x in xs]
    returned = ep.combine(ys, result, out=outs)
    plain = ep.combine(ys, result)
    for out, same, want in zip(outs, returned, plain, strict=True):
        assert same is out
        assert_bitwise_equal(out, want)
    with pytest.raises(moelink.ArgumentError, match="out: expected router weights in out exactly when"):
        ep.dispatch(xs, ids, out=target)


def test_weight_hooks_run_on_the_home_rank():
    case, ep, xs, ids, weights = make(pre_reduce=False)
    hooks = [moelink.Hook(None, lambda tensors, token, slot: tensors[0][token, slot], (w,)) for w in weights]
    recvs = ep.dispatch(xs, ids)
    ys = [case.expert_rows(rank, recv.tokens.shape[0]) for rank, recv in enumerate(recvs)]
    for out, want in zip(ep.combine(ys, recvs, hooks), ep.combine(ys, recvs, weights), strict=True):
        assert_bitwise_equal(out, want)
    for recv, want in zip(ep.dispatch(xs, ids, hooks), ep.dispatch(xs, ids, weights), strict=True):
        assert_bitwise_equal(recv.weights[: int(want.row_offsets[-1])], want.weights[: int(want.row_offsets[-1])])
    with pytest.raises(moelink.ArgumentError, match="topk_weights: expected None, as they went into dispatch"):
        ep.combine(ys, ep.dispatch(xs, ids, weights), weights)


def test_epilogues_see_sums_before_rounding():
    case, ep, xs, ids, weights = make()
    recvs = ep.dispatch(xs, ids, weights)
    ys = [case.expert_rows(rank, recv.tokens.shape[0]) for rank, recv in enumerate(recvs)]
    sums = []

    def keep(tensors, token, columns, block, mask):
        assert bool(mask.all())
        tensors[0][token, columns] = block

    hooks = [moelink.Hook(None, keep, (torch.empty(x.shape),)) for x in xs]
    sums = ep.combine(ys, recvs, epilogue=hooks)
    assert all(total is hook.tensors[0] for total, hook in zip(sums, hooks, strict=True))
    plain = ep.combine(ys, recvs)
    residual = [x.float() for x in xs]
    added = ep.combine(ys, recvs, epilogue=residual)
    bias = [torch.linspace(-1, 1, x.shape[1]) for x in xs]
    biased = ep.combine(ys, recvs, epilogue=bias)
    for rank in range(3):
        assert_bitwise_equal(plain[rank], sums[rank].bfloat16())
        assert_bitwise_equal(added[rank], (sums[rank] + residual[rank]).bfloat16())
        assert_bitwise_equal(biased[rank], (sums[rank] + bias[rank]).bfloat16())


def test_messages_are_one_per_token_and_rank():
    case, ep, xs, ids, weights = make(fmt="bf16")
    before = ep.traffic()
    recvs = ep.dispatch(xs, ids, weights)
    message = case.setup.config(3).dispatch_message.nbytes
    owners = [0, 0, 0, 1, 1, 2, 2]
    pairs = sum(len({owners[e] for e in row if e >= 0} - {rank}) for rank in range(3) for row in ids[rank].tolist())
    assert ep.traffic().dispatch - before.dispatch == pairs * message
    ep.combine([case.expert_rows(rank, recv.tokens.shape[0]) for rank, recv in enumerate(recvs)], recvs)
    row = case.setup.config(3).combine_row_bytes + 16
    assert ep.traffic().combine == pairs * row


def test_lists_of_the_wrong_length_are_refused():
    _, ep, xs, ids, _ = make()
    with pytest.raises(moelink.ArgumentError, match="x: expected a list of 3 entries"):
        ep.dispatch(xs[:2], ids)
    with pytest.raises(moelink.ConfigError, match="devices: expected at least one device"):
        moelink.init_devices([], num_experts=1, topk=1, hidden_size=1, max_tokens_per_rank=1)
    assert "DeviceCommunicator" in repr(ep)
    ep.close()
    with pytest.raises(moelink.ClosedError):
        ep.dispatch(xs, ids)


def test_data_is_recomputable():
    options = {"seed": 1, "rank": 2, "num_tokens": 4, "hidden_size": 8, "num_experts": 5, "topk": 2}
    one, two = rank_data(**options), rank_data(**options)
    for field in dataclasses.fields(one):
        assert_bitwise_equal(getattr(one, field.name), getattr(two, field.name))


def test_pointers_and_counters_belong_to_the_symmetric_transport():
    _, ep, *_ = make()
    for name in ("dev_ptrs", "atomic_counters"):
        with pytest.raises(moelink.UnsupportedError, match=f"{name}: the collective transport has no"):
            getattr(ep, name)
    from moelink.contract import ep_init

    assert ep_init.__doc__
    with moelink.init_devices(
        ["cpu"] * 2, num_experts=4, topk=1, hidden_size=16, max_tokens_per_rank=2, transport="symmetric"
    ) as symmetric:
        tables, counters = symmetric.dev_ptrs, symmetric.atomic_counters
        assert [table.shape for table in tables] == [(2, 3), (2, 3)]
        for table in tables:
            assert table[:, 0].tolist() == [0, 0], "no send buffers inside a node"
            assert (table[:, 1:] != 0).all()
        assert all(group.dtype == torch.int64 for pair in counters for group in pair)
