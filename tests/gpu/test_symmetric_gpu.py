"""The symmetric transport on GPUs, all devices driven by one process. Run by hand: ``-m gpu``."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moelink
from moelink.transports.base import CombineRequest, DispatchRequest
from tests.gpu.gpu_compile import FUSED, HALVES, kernels_of, warmup_kernels
from tests.support.cases import FORMATS, by_setup, check_case, features, matrix
from tests.support.symmetric_ranks import one_process, run_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA devices"),
]
WORLD = max(1, torch.cuda.device_count())


def on_devices(requests, ranks):
    """The same requests with every tensor on its rank's device."""

    def move(value, rank):
        return value.to(f"cuda:{rank}") if isinstance(value, torch.Tensor) else value

    return [
        dataclasses.replace(r, **{f.name: move(getattr(r, f.name), rank) for f in dataclasses.fields(r)})
        for r, rank in zip(requests, ranks, strict=True)
    ]


@pytest.fixture(autouse=True)
def requests_on_devices(monkeypatch):
    from tests.support import symmetric_ranks as helpers

    dispatches, combines = helpers.dispatch_requests, helpers.combine_requests
    monkeypatch.setattr(
        helpers, "dispatch_requests", lambda case, ranks, **o: on_devices(dispatches(case, ranks, **o), ranks)
    )
    monkeypatch.setattr(
        helpers, "combine_requests", lambda case, ranks, recvs: on_devices(combines(case, ranks, recvs), ranks)
    )


def kernels(cases, fused):
    parts = FUSED if fused else HALVES
    return [k for case in cases for k in kernels_of(case.setup.fields, WORLD, parts, weights=case.weights)]


def of_format(fmt):
    return [case for case in matrix() if case.setup.dispatch_format == fmt]


def check_all(cases, fused):
    for setup, group in by_setup(cases):
        transport = one_process({**setup.fields, "timeout": 10.0}, WORLD, "cuda")
        for case in group:
            check_case(case, WORLD, run_case(transport, case, list(range(WORLD)), fused=fused))
        transport.close()


@pytest.mark.kernels(of=lambda fmt, fused: kernels(of_format(fmt), fused))
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_matrix_equals_oracle(fmt, fused):
    check_all(of_format(fmt), fused)


def features_of(fmt):
    return [case for case in features() if case.setup.dispatch_format == fmt]


@pytest.mark.kernels(of=lambda fmt: kernels(features_of(fmt), fused=True))
@pytest.mark.parametrize("fmt", sorted({case.setup.dispatch_format for case in features()}))
def test_features_equal_oracle(fmt):
    check_all(features_of(fmt), fused=True)


def real_shape(fmt="fp8_block128", tokens=128, **options):
    return dict(
        num_experts=32 * WORLD,
        topk=8,
        hidden_size=7168,
        max_tokens_per_rank=tokens,
        dispatch_format=fmt,
        timeout=10.0,
        **options,
    )


def round_trip(transport, xs, ids, weights, fused=True):
    recvs = transport.dispatch(
        [DispatchRequest(x, i, w) for x, i, w in zip(xs, ids, weights, strict=True)], fused=fused
    ).wait()
    ys = [torch.ones(len(r.tokens), 7168, dtype=torch.bfloat16, device=r.tokens.device) for r in recvs]
    return recvs, transport.combine([CombineRequest(y, r) for y, r in zip(ys, recvs, strict=True)], fused=fused).wait()


@pytest.mark.kernels(of=lambda tokens, fused: kernels_of(real_shape(tokens=tokens), WORLD, FUSED if fused else HALVES))
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("tokens", [1, 32, 128, 1024])
def test_identity_experts_at_real_shapes(tokens, fused):
    transport = one_process(real_shape(tokens=tokens), WORLD, "cuda")
    g = torch.Generator().manual_seed(tokens)
    for _ in range(3):
        xs = [torch.randn(tokens, 7168, generator=g).bfloat16().to(f"cuda:{r}") for r in range(WORLD)]
        ids = [torch.rand(tokens, 32 * WORLD, generator=g).topk(8).indices.to(f"cuda:{r}") for r in range(WORLD)]
        weights = [torch.full((tokens, 8), 0.125, device=f"cuda:{r}") for r in range(WORLD)]
        recvs, outs = round_trip(transport, xs, ids, weights, fused)
        for out in outs:
            assert torch.equal(out, torch.ones_like(out))
        assert sum(int(r.num_recv_tokens) for r in recvs) == tokens * 8 * WORLD
        transport.check()
    transport.close()


@pytest.mark.kernels(of=lambda: warmup_kernels(real_shape(tokens=16), 1))
def test_graph_replays_alternate_with_eager_calls():
    """One device captures and replays; token counts differ by -1 ids; eager calls in between."""
    config = real_shape(tokens=16)
    transport = one_process(config, 1, "cuda")
    x = torch.randn(16, 7168, device="cuda:0").bfloat16()
    ids = torch.stack([torch.randperm(32 * WORLD)[:8] for _ in range(16)]).cuda()
    weights = torch.full((16, 8), 0.125, device="cuda:0")
    transport.warmup()
    round_trip(transport, [x], [ids], [weights])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, (out,) = round_trip(transport, [x], [ids], [weights])
    for keep in (16, 3, 0, 16):
        ids[keep:] = -1
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out[:keep], torch.ones_like(out[:keep]))
        assert not out[keep:].any()
        ids.copy_(torch.stack([torch.randperm(32 * WORLD)[:8] for _ in range(16)]))
        _, (eager,) = round_trip(transport, [x[:5]], [ids[:5].contiguous()], [weights[:5].contiguous()])
        assert torch.equal(eager, torch.ones_like(eager))
    transport.check()


@pytest.mark.kernels(of=lambda: warmup_kernels({**real_shape(tokens=4), "num_experts": 32}, 1))
def test_an_output_of_a_graph_is_combined_eagerly_after_its_ids_were_overwritten():
    """Captured through a communicator, whose handles say how often ids had been changed when they were dispatched."""
    with moelink.init(**{**real_shape(tokens=4), "num_experts": 32}, device="cuda:0", transport="symmetric") as ep:
        x = torch.randn(4, 7168, device="cuda:0").bfloat16()
        ids = torch.stack([torch.randperm(32)[:8] for _ in range(4)]).cuda()
        weights = torch.full((4, 8), 0.125, device="cuda:0")
        ep.warmup()
        ep.dispatch(x, ids, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recv = ep.dispatch(x, ids, weights)
        for keep in (4, 2):
            ids.copy_(torch.stack([torch.randperm(32)[:8] for _ in range(4)]))
            ids[keep:] = -1
            graph.replay()
            out = ep.combine(torch.ones_like(recv.tokens, dtype=torch.bfloat16), recv)
            assert torch.equal(out[:keep], torch.ones_like(out[:keep]))
            assert not out[keep:].any()
        ep.check()


def test_missing_peer_poisons_within_the_timeout():
    if WORLD < 2:
        pytest.skip("needs two devices")
    transport = one_process({**real_shape(tokens=4), "timeout": 0.5}, 2, "cuda")
    rank = transport.ranks.pop()
    x = torch.randn(4, 7168, device="cuda:0").bfloat16()
    ids = torch.zeros(4, 8, dtype=torch.int32, device="cuda:0")
    transport.dispatch([DispatchRequest(x, ids)]).wait()
    with pytest.raises(moelink.PeerTimeoutError) as error:
        transport.check()
    assert error.value.peer == 1
    assert int(rank.memory.local[:8].view(torch.int64)) == 1
    with pytest.raises(moelink.PeerTimeoutError):
        transport.dispatch([DispatchRequest(x, ids)])
