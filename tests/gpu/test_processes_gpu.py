"""The symmetric transport with a process per GPU, as many as there are, up to 8. Run by hand: ``-m gpu``."""

import pytest
import torch

import moelink
from moelink.testing import run_ranks
from tests.gpu import gpu_ranks
from tests.gpu.gpu_compile import kernels_of, kernels_of_all, warmup_kernels
from tests.support.cases import FORMATS, SCENARIOS, Case, Result, Setup, by_setup, check_case, real_shapes

WORLD = min(8, torch.cuda.device_count())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WORLD < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(600),
]


def kernels(cases):
    return kernels_of_all((setup.fields for setup, _ in by_setup(cases)), WORLD)


def small_cases():
    """The small cases of the CPU tests in every format x layout x mode and reduction."""
    cases = []
    for fmt in FORMATS:
        for options in (
            {},
            {"layout": "rank"},
            {"fused_shared_expert": True, "pre_reduce": False},
            {"mode": "allreduce"},
        ):
            setup = Setup(fmt, tuple(options.items()))
            cases += [Case(setup, scenario, seed=i) for i, scenario in enumerate(SCENARIOS)]
    return cases


@pytest.mark.kernels(of=lambda: kernels_of_all(map(gpu_ranks.real_fields, range(len(gpu_ranks.REAL_SIZES))), WORLD))
def test_equals_collective_at_real_sizes():
    for done in run_ranks(gpu_ranks.equals_collective, WORLD, timeout=500):
        assert len(done) == len(gpu_ranks.REAL_SIZES)


@pytest.mark.kernels(of=lambda: kernels_of(gpu_ranks.graph_fields(WORLD), WORLD))
def test_graphs_replay_with_other_inputs_and_sizes():
    for rank, results in enumerate(run_ranks(gpu_ranks.graphs, WORLD, timeout=300)):
        assert all(results.values()), (rank, results)


@pytest.mark.kernels(of=lambda: warmup_kernels(gpu_ranks.ABSENT, WORLD))
def test_a_rank_that_never_calls_is_named_in_time():
    results = run_ranks(gpu_ranks.absent_rank, WORLD, timeout=300)
    for rank, result in enumerate(results):
        if rank == 1:
            assert result["told"] == 1
            continue
        assert (result["error"], result["peer"], result["later"]) == ("PeerTimeoutError", 1, "rank 1")
        assert 2.9 < result["took"] < 4.0
        assert result["replay"] < 0.5
        assert result["after"] < 0.5
        assert set(result["offsets"]) == {0}
        assert result["alive"]


@pytest.mark.kernels(of=lambda: warmup_kernels(gpu_ranks.ABSENT, WORLD))
def test_a_mismatched_call_ends_all_ranks_and_all_recover():
    for rank, results in enumerate(run_ranks(gpu_ranks.mismatched, WORLD, timeout=300)):
        for form, result in results.items():
            words = f"rank {rank}: rank 1 calls dispatch (call "
            assert result["told"].startswith(words), (form, result)
            assert result["told"] == result["later"], (form, result)
            if form != "ahead":  # whose words stand in the place of the values
                assert "expected topk_weights, no routing as on most ranks, got no topk_weights," in result["told"]
            assert result["equal"], form
            assert result["took"] < 20


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_one_process_drives_all_devices(fmt):
    case = Case(Setup(fmt), "holes", seed=3)
    devices = [f"cuda:{rank}" for rank in range(WORLD)]
    with moelink.init_devices(devices, **case.setup.fields) as ep:
        assert "symmetric" in repr(ep)
        data = [case.data(rank) for rank in range(WORLD)]
        for _ in range(3):
            recvs = ep.dispatch(
                [d.x.to(device) for d, device in zip(data, devices, strict=True)],
                [d.topk_ids.to(device) for d, device in zip(data, devices, strict=True)],
                [d.topk_weights.to(device) for d, device in zip(data, devices, strict=True)],
            )
            ys = [case.expert_rows(r, recv.tokens.shape[0]).to(devices[r]) for r, recv in enumerate(recvs)]
            outs = ep.combine(ys, recvs)
            results = [Result.of(recv, out) for recv, out in zip(recvs, outs, strict=True)]
            check_case(case, WORLD, results)


@pytest.mark.kernels(of=lambda: kernels_of(gpu_ranks.MANY, WORLD))
def test_twenty_thousand_calls():
    for wrong, seconds in run_ranks(gpu_ranks.many_calls, WORLD, 20_000, timeout=500):
        assert wrong == 0
        assert seconds < 400


@pytest.mark.kernels(of=lambda: kernels(real_shapes()))
def test_real_shapes_equal_oracle():
    cases = real_shapes()
    results = run_ranks(gpu_ranks.run_cases, WORLD, cases, timeout=300)
    for index, case in enumerate(cases):
        check_case(case, WORLD, [result[index] for result in results])


@pytest.mark.kernels(of=lambda: kernels(small_cases()))
def test_equals_oracle():
    cases = small_cases()
    results = run_ranks(gpu_ranks.run_cases, WORLD, cases, timeout=550)
    for index, case in enumerate(cases):
        check_case(case, WORLD, [result[index] for result in results])
