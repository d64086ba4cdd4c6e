"""The phases of ``EPCombineKernel``, launched one by one, make the combine of the fused kernel."""

import dataclasses
import re

import pytest
import torch

from moelink import contract
from moelink.epilogues import cast
from moelink.errors import ArgumentError, PeerTimeoutError
from moelink.memory.protocol import COMBINE_RECEIVED, COMBINE_SENT
from moelink.testing import assert_bitwise_equal
from tests.contract.contract_ranks import Buffers, combine_all, dispatch_all, on_devices, params_of, ranks_of, setup
from tests.support.cases import SCALE_LAYOUTS, Case, Packed, Result, check_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")


def combine_in_phases(eps, buffers, case, **facts) -> list[torch.Tensor]:
    """A combine of a case, phase by phase, each on all ranks. ``facts``: of the kernel object."""
    kernels = [dataclasses.replace(ep.combine_kernel, **facts) for ep in eps]
    datas = [case.data(rank) for rank in range(len(eps))]
    ids = on_devices(eps, [d.topk_ids for d in datas])
    params, outs = eps[0].params, []
    for d in datas:
        shape = (len(d.x), params.hidden_size) if case.reduce else (len(d.x), params.top_k, params.hidden_size)
        outs.append(torch.full(shape, float("nan"), dtype=params.combine_dtype))
    outs = on_devices(eps, outs)
    rows = on_devices(eps, [case.expert_rows(rank, len(b.src_info)) for rank, b in enumerate(buffers)])
    travelled = [b.handler.weights for b in buffers]
    ends = [(b.routing, ep.pointers[1], ep.atomic_counters[1]) for ep, b in zip(eps, buffers, strict=True)]
    for kernel, ep, y, weights, end in zip(kernels, eps, rows, travelled, ends, strict=True):
        kernel.send_tokens_back(ep, y, *end, row_weights=weights)
    for kernel, ep, of_rank, end in zip(kernels, eps, ids, ends, strict=True):
        kernel.wait_for_all_arrivals(ep, *end, of_rank)
    if params.fused_shared_expert:
        for kernel, ep, y, out in zip(kernels, eps, rows, outs, strict=True):
            kernel.copy_shared_expert_outputs(ep, y, out)
    for rank, (kernel, ep, y, out) in enumerate(zip(kernels, eps, rows, outs, strict=True)):
        kernel.reduce_and_copy_to_output(
            ep, out, *ends[rank], ids[rank],
            input_tokens=y if params.skip_a2a else None,
            router_weights=datas[rank].topk_weights.to(ep.device) if case.weights == "combine" else None,
            row_weights=travelled[rank] if params.skip_a2a else None,
            shared=case.shared_rows(rank).to(ep.device) if case.shared else None,
        )  # fmt: skip
    for ep in eps:
        ep.check()
    return outs


CASES = [
    *[(3, Case(setup(fmt, fused_shared_expert=bool(i % 2)), "skewed", weights="combine"))
      for i, fmt in enumerate(SCALE_LAYOUTS)],
    (1, Case(setup("bf16", fused_shared_expert=True), "uniform", weights="combine")),
    (2, Case(setup("fp32", fused_shared_expert=True, combine_dtype=torch.float32), "holes", weights="combine")),
    (2, Case(setup("fp64", fused_shared_expert=True), "repeats", weights="combine")),
    (3, Case(setup(fused_shared_expert=True, combine_dtype=torch.float16), "one_rank_empty", weights="combine")),
    (3, Case(setup("bf16", pre_reduce=True, fused_shared_expert=True), "holes", weights="dispatch")),
    (3, Case(setup("mxfp8", pre_reduce=True), "uniform", weights="dispatch")),
    (3, Case(setup("bf16"), "holes", weights="none", reduce=False)),
    (2, Case(setup("bf16"), "uniform", weights="combine", shared=True)),
    (3, Case(setup("bf16", mode="allreduce", fused_shared_expert=True), "uniform", weights="combine")),
    (3, Case(setup("mxfp8", mode="allreduce", pre_reduce=True, fused_shared_expert=True), "repeats",
             weights="dispatch")),
    (2, Case(setup("bf16", fused_shared_expert=True), "all_empty", weights="combine")),
    (2, Case(setup("bf16", hidden_size=4160, fused_shared_expert=True), "uniform", weights="combine")),
]  # fmt: skip


@pytest.mark.parametrize("world_size, case", CASES, ids=lambda value: getattr(value, "id", str(value)))
def test_phases_equal_the_combine_of_the_launchers(world_size: int, case: Case) -> None:
    eps = ranks_of(params_of(case.setup, world_size))
    for seed in range(2):  # the second call meets what the first left behind
        each = dataclasses.replace(case, seed=seed)
        buffers = [Buffers.allocate(ep, weighted=case.weights == "dispatch") for ep in eps]
        dispatch_all(eps, buffers, each)
        outs = combine_in_phases(eps, buffers, each)
        for out, want in zip(outs, combine_all(eps, buffers, each), strict=True):
            assert_bitwise_equal(out, want)
        results = [Result(b.fields(), Packed.of(out)) for b, out in zip(buffers, outs, strict=True)]
        check_case(each, world_size, results)


@pytest.mark.parametrize("n_nodes, n_gpus_per_node", [(3, 1), (2, 2)])
def test_phases_across_nodes(n_nodes: int, n_gpus_per_node: int) -> None:
    for case in (
        Case(setup("bf16", fused_shared_expert=True), "skewed", weights="combine"),
        Case(setup("bf16", pre_reduce=True), "holes", weights="dispatch"),
    ):
        eps = ranks_of(params_of(case.setup, 1, n_nodes=n_nodes, n_gpus_per_node=n_gpus_per_node))
        buffers = [Buffers.allocate(ep, weighted=case.weights == "dispatch") for ep in eps]
        dispatch_all(eps, buffers, case)
        outs = combine_in_phases(eps, buffers, case)
        for out, want in zip(outs, combine_all(eps, buffers, case), strict=True):
            assert_bitwise_equal(out, want)
        for ep in eps:
            ep.close()


SHARED = Case(setup("bf16", fused_shared_expert=True), "uniform", weights="combine")


def noting(kernel, launched):
    """``kernel``, a method of a launcher, with a note of every launch in ``launched``."""

    def prepare(function, programs, **options):
        launched.append((function.__name__, programs, getattr(options["launch"], "num_warps", None)))
        return kernel(function, programs, **options)

    return prepare


@pytest.mark.parametrize("n_sms", (1, 2, 9))
def test_the_facts_of_the_object_are_the_launch(monkeypatch, n_sms: int) -> None:
    eps = ranks_of(params_of(SHARED.setup, 2))
    buffers = [Buffers.allocate(ep) for ep in eps]
    dispatch_all(eps, buffers, SHARED)
    launched = []
    for ep in eps:
        monkeypatch.setattr(ep.launcher, "kernel", noting(ep.launcher.kernel, launched))
    outs = combine_in_phases(eps, buffers, SHARED, n_sms=n_sms, num_threads=128)
    sizes = {name: programs for name, programs, warps in launched if name != "ep_grant_credits_kernel"}
    assert sizes == {
        "ep_combine_async_kernel": max(1, n_sms - 1),
        "ep_wait_for_all_arrivals_kernel": 1,
        "ep_copy_shared_expert_outputs_kernel": n_sms,
        "ep_reduce_and_copy_to_output_kernel": max(1, n_sms - 1),
    }
    assert {warps for name, _, warps in launched if name in sizes} == {4}
    for out, want in zip(outs, combine_all(eps, buffers, SHARED), strict=True):
        assert_bitwise_equal(out, want)


def one_rank(case: Case = SHARED, **changes):
    """A rank alone after a dispatch, its kernel object, and the arguments that its phases share."""
    (ep,) = ranks_of(params_of(case.setup, 1, **changes))
    own, data = Buffers.allocate(ep, weighted=case.weights == "dispatch"), case.data(0)
    dispatch_all([ep], [own], case)
    y = case.expert_rows(0, len(own.src_info))
    out = torch.zeros(len(data.x), ep.params.hidden_size, dtype=ep.params.combine_dtype)
    return ep, ep.combine_kernel, y, out, (own.routing, ep.pointers[1], ep.atomic_counters[1]), data


def test_a_copy_is_the_shared_rows_alone() -> None:
    ep, kernel, y, out, _, _ = one_rank()
    kernel.copy_shared_expert_outputs(ep, y, out.fill_(float("nan")))
    assert_bitwise_equal(out, y[: len(out)])
    params = params_of(setup("bf16", mode="allreduce", fused_shared_expert=True), 3)
    parts = [torch.full((5, y.shape[1]), float("nan"), dtype=y.dtype) for _ in range(3)]
    for ep, part in zip(ranks_of(params), parts, strict=True):
        ep.combine_kernel.copy_shared_expert_outputs(ep, y, part)
    for (start, stop), part in zip(((0, 2), (2, 4), (4, 5)), parts, strict=True):
        want = torch.zeros_like(part)
        want[start:stop] = y[: stop - start]
        assert_bitwise_equal(part, want)


def test_phases_are_refused_out_of_order() -> None:
    ep, kernel, y, out, ends, data = one_rank()
    weights = {"router_weights": data.topk_weights}
    with pytest.raises(ArgumentError, match="routing: expected one whose rows were sent back"):
        kernel.wait_for_all_arrivals(ep, *ends, data.topk_ids)
    for _ in range(2):  # what came before counts once
        kernel.send_tokens_back(ep, y, *ends)
        with pytest.raises(ArgumentError, match="routing: expected one that wait_for_all_arrivals was given since"):
            kernel.reduce_and_copy_to_output(ep, out, *ends, data.topk_ids, **weights)
        with pytest.raises(ArgumentError, match=re.escape(f"topk_ids: expected {len(out)} tokens")):
            kernel.wait_for_all_arrivals(ep, *ends, data.topk_ids[1:])
        kernel.wait_for_all_arrivals(ep, *ends, data.topk_ids)
        with pytest.raises(ArgumentError, match="output_tokens: expected the one that copy_shared_expert_outputs"):
            kernel.reduce_and_copy_to_output(ep, out, *ends, data.topk_ids, **weights)
        kernel.copy_shared_expert_outputs(ep, y, out)
        with pytest.raises(ArgumentError, match="output_tokens: expected the one that copy_shared_expert_outputs"):
            kernel.reduce_and_copy_to_output(ep, out.clone(), *ends, data.topk_ids, **weights)
        kernel.reduce_and_copy_to_output(ep, out, *ends, data.topk_ids, **weights)
        ep.check()


def test_phases_refuse_what_they_would_ignore() -> None:
    ep, kernel, y, out, ends, data = one_rank()
    kernel.send_tokens_back(ep, y, *ends)
    before = ep.memory.local.clone()
    for name, value in (("top_k", 2), ("n_experts", 8), ("msg_bytes", 16), ("fused_shared_expert", False)):
        other = dataclasses.replace(kernel, **{name: value})
        with pytest.raises(ArgumentError, match=f"{name}: expected .*, as in ep.combine_kernel, got {value}"):
            other.wait_for_all_arrivals(ep, *ends, data.topk_ids)
    with pytest.raises(ArgumentError, match="num_threads: expected 32, 64, 128, 256 to launch with, got 96"):
        dataclasses.replace(kernel, num_threads=96).wait_for_all_arrivals(ep, *ends, data.topk_ids)
    with pytest.raises(ArgumentError, match="input_tokens: expected None without skip_a2a"):
        kernel.reduce_and_copy_to_output(ep, out, *ends, data.topk_ids, input_tokens=y)
    with pytest.raises(ArgumentError, match="row_weights: expected None without skip_a2a"):
        kernel.reduce_and_copy_to_output(ep, out, *ends, data.topk_ids, row_weights=torch.ones(len(y)))
    with pytest.raises(ArgumentError, match=re.escape("pointers: expected ep.pointers[1]")):
        kernel.wait_for_all_arrivals(ep, ends[0], ep.pointers[0], ends[2], data.topk_ids)
    with pytest.raises(ArgumentError, match="input_tokens: expected at least the 3 rows of the shared expert"):
        kernel.copy_shared_expert_outputs(ep, y[:2], out)
    with pytest.raises(ArgumentError, match="output_tokens"):
        kernel.copy_shared_expert_outputs(ep, y, out[None])
    assert torch.equal(ep.memory.local, before)
    ep, kernel, y, out, _, _ = one_rank(Case(setup("bf16"), "uniform", weights="combine"))
    with pytest.raises(ArgumentError, match="fused_shared_expert: expected True"):
        kernel.copy_shared_expert_outputs(ep, y, out)


def test_a_rank_that_does_not_send_is_named_and_nothing_is_stored() -> None:
    case = Case(setup("bf16"), "uniform", weights="none")
    eps = ranks_of(params_of(case.setup, 2, timeout=0.5))
    buffers = [Buffers.allocate(ep) for ep in eps]
    dispatch_all(eps, buffers, case)
    ep, kernel, data = eps[0], eps[0].combine_kernel, case.data(0)
    ends = (buffers[0].routing, ep.pointers[1], ep.atomic_counters[1])
    out = torch.zeros(len(data.x), ep.params.hidden_size, dtype=torch.bfloat16)
    kernel.send_tokens_back(ep, case.expert_rows(0, len(buffers[0].src_info)), *ends)
    kernel.wait_for_all_arrivals(ep, *ends, data.topk_ids)
    kernel.reduce_and_copy_to_output(ep, out, *ends, data.topk_ids)
    assert not out.any()
    assert ep.atomic_counters[0][COMBINE_SENT] != 0
    assert ep.atomic_counters[0][COMBINE_RECEIVED] == 0
    with pytest.raises(PeerTimeoutError, match="rank 1"):
        ep.raise_error()


def test_an_epilogue_gets_the_sum_of_both() -> None:
    ep, kernel, y, out, ends, data = one_rank()
    stored, want = (torch.zeros(out.shape) for _ in range(2))
    kernel.send_tokens_back(ep, y, *ends)
    kernel.wait_for_all_arrivals(ep, *ends, data.topk_ids)
    kernel.copy_shared_expert_outputs(ep, y, out)
    kernel.reduce_and_copy_to_output(ep, out, *ends, data.topk_ids, epilogue_fn=cast(stored))
    contract.ep_fused_combine(
        ep, torch.empty_like(out), ends[2], y, ends[0], ends[1], data.topk_ids, epilogue_fn=cast(want)
    )
    assert want.any()
    assert_bitwise_equal(stored, want)
