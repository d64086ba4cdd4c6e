"""``max_tokens``: outputs, gradients and memory of the size of the call, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import moelink
from moelink.kernels.launch import grid
from moelink.kernels.launch.constants import DispatchSpec
from moelink.kernels.launch.launcher import Launcher
from moelink.memory.workspace import Workspace
from moelink.nn import MoE
from moelink.nn.experts import known_max_tokens
from moelink.testing import assert_bitwise_equal
from moelink.transports.base import Rehearsal
from moelink.transports.symmetric.dispatch import Dispatch
from moelink.transports.symmetric.rank import Rank
from moelink.transports.symmetric.warmup import prepare_calls
from tests.support.cases import FIELDS, Case, Result, Setup, check_case
from tests.support.symmetric_ranks import combine_requests, dispatch_requests, one_process

LOOSE, TIGHT, SPLIT = (3, 3), (2, 2), (1, 2)
"""Bounds that ranks state, of which rank 0 sends 1 token and rank 1 sends 2: with room to spare, exact, and different
ones, the first of which is too small for what rank 1 sends."""

SETUPS = (
    Setup("bf16"),
    Setup("fp8_block128", (("layout", "rank"),)),
    Setup("nvfp4", (("expert_alignment", 24), ("fused_shared_expert", True), ("pre_reduce", False))),
    Setup("mxfp8", (("mode", "allreduce"), ("fused_shared_expert", True))),
    Setup("fp8_block128", (("capacity", 7), ("expert_alignment", 4))),
    Setup("bf16", (("mode", "allreduce"), ("layout", "rank"))),
    Setup("fp8_block128", (("layout", "masked"), ("rows_per_expert", 16))),
)


def transport_of(name: str, setup: Setup, world: int = 2) -> Any:
    """The transport of all ranks in this process."""
    if name == "symmetric":
        return one_process(setup.fields, world)
    return moelink.init_devices(["cpu"] * world, **setup.fields, transport="collective")._session.transport


def bounded(requests: list[Any], bounds: tuple[int, ...]) -> list[Any]:
    return [dataclasses.replace(r, max_tokens=bound) for r, bound in zip(requests, bounds, strict=True)]


def test_a_bound_that_a_peer_exceeds_loses_rows_and_counts_them():
    """What LOOSE, TIGHT and SPLIT stand for, in numbers: rank 0 owns expert 2, which gets 3 rows of each token."""
    case = Case(SETUPS[0], "one_expert", small=True)
    made = transport_of("collective", SETUPS[0])
    recvs = [made.dispatch(bounded(dispatch_requests(case, range(2)), b)).wait() for b in (LOOSE, TIGHT, SPLIT)]
    assert [(len(r[0].tokens), int(r[0].num_recv_tokens), int(r[0].overflow)) for r in recvs] == [
        (18, 9, 0), (12, 9, 0), (6, 6, 3),
    ]  # fmt: skip
    outs = made.combine(combine_requests(case, range(2), recvs[2])).wait()
    assert outs[0].any()
    assert outs[1][0].any()
    assert not outs[1][1].any(), "the dropped rows are those of the last token"


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_host_counts_and_out(transport):
    """Exact rows are exact, an output to write into has the rows of the bound, and exact rows can be routed again."""
    case = Case(SETUPS[4], "uniform", small=True)
    with moelink.init_devices(["cpu"] * 2, **case.setup.fields, transport=transport) as ep:
        data = [case.data(rank) for rank in range(2)]
        given = [d.x for d in data], [d.topk_ids for d in data], [d.topk_weights for d in data]
        exact = ep.dispatch(*given, max_tokens=2, host_counts=True)
        whole = ep.dispatch(*given, max_tokens=2)
        for cut, full in zip(exact, whole, strict=True):
            assert len(cut.tokens) == int(full.row_offsets[-1])
            assert_bitwise_equal(cut.tokens, full.tokens[: len(cut.tokens)])
        again = ep.dispatch(given[0], None, given[2], routing=exact)
        for cut, full in zip(again, exact, strict=True):
            assert cut.tokens.shape == full.tokens.shape
            assert_bitwise_equal(cut.tokens, full.tokens)
            assert int(cut.overflow) == int(full.overflow)
        ys = [case.expert_rows(rank, len(recv.tokens)) for rank, recv in enumerate(exact)]
        for one, two in zip(ep.combine(ys, exact), ep.combine(ys, again), strict=True):
            assert_bitwise_equal(one, two)
        assert ep.dispatch(*given, max_tokens=2, out=whole)[0].tokens is whole[0].tokens
        with pytest.raises(moelink.ArgumentError, match=r"out.tokens: expected shape \[7, 384\], got \[6, 384\]"):
            ep.dispatch(*given, out=[dataclasses.replace(recv, tokens=recv.tokens[:6]) for recv in whole])
        bf16 = Case(SETUPS[0], "uniform", small=True)
    with moelink.init_devices(["cpu"] * 2, **bf16.setup.fields, transport=transport) as ep:
        given = [bf16.data(rank).x for rank in range(2)], given[1]
        out = ep.dispatch(*given, max_tokens=2)
        with pytest.raises(moelink.ArgumentError, match=r"out.tokens: expected shape \[18, 40\], got \[12, 40\]"):
            ep.dispatch(*given, max_tokens=3, out=out)


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_refusals(transport):
    fields = {"num_experts": 4, "topk": 2, "hidden_size": 8, "max_tokens_per_rank": 5, "transport": transport}
    x, ids = torch.ones(3, 8, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
    with moelink.init(**fields, device="cpu") as ep:
        recv = ep.dispatch(x, ids, max_tokens=3)
        assert len(recv.tokens) == 6
        for bound, got in ((2, "2"), (6, "6"), (-1, "-1")):
            expected = f"max_tokens: expected an integer from the 3 rows of x to max_tokens_per_rank = 5, got {got}"
            with pytest.raises(moelink.ArgumentError, match=expected):
                ep.dispatch(x, ids, max_tokens=bound)
        for bound in (True, 3.0, [3], torch.tensor(3)):
            for rows in (x, x.clone().requires_grad_()):
                with pytest.raises(moelink.ArgumentError, match="max_tokens: expected an integer or None, got a"):
                    ep.dispatch_async(rows, ids, max_tokens=bound)
        with pytest.raises(moelink.ArgumentError, match="max_tokens: expected None with routing="):
            ep.dispatch(x, None, routing=recv, max_tokens=3)
        assert len(ep.dispatch_async(x, ids, max_tokens=4).wait().tokens) == 8, "the next call works"
        assert len(ep.dispatch(x[:0], ids[:0], max_tokens=0).tokens) == 0


@pytest.mark.parametrize(
    "fields", [{}, {"fused_shared_expert": True, "expert_alignment": 8}, {"layout": "rank"}], ids=str
)
@pytest.mark.parametrize("mode", ["alltoall", "allreduce"])
@pytest.mark.parametrize("fmt", ["nvfp4", "bf16"])
def test_a_decode_step_takes_the_memory_of_a_decode_communicator(fmt, mode, fields):
    """Tensors of a call, and of the experts' rows behind it, on a communicator of 4096 tokens and on one of 8."""
    sizes = {
        "num_experts": 16, "topk": 4, "hidden_size": 256, "dispatch_format": fmt, "mode": mode,
        "transport": "collective", **fields,
    }  # fmt: skip
    taken = {}
    for most in (4096, 8):
        with moelink.init_devices(["cpu"] * 2, max_tokens_per_rank=most, **sizes) as ep:
            xs = [torch.zeros(8, 256, dtype=torch.bfloat16)] * 2
            ids = [torch.arange(32).view(8, 4) % 16] * 2
            weights = [torch.ones(8, 4)] * 2
            recv = ep.dispatch(xs, ids, weights, max_tokens=8 if most > 8 else None)[0]
            tensors = [getattr(recv, name) for name in FIELDS]
            y = torch.empty(len(recv.tokens), 256, dtype=torch.bfloat16)
            taken[most] = sum(t.untyped_storage().nbytes() for t in (*tensors, y) if t is not None)
            report = ep.configs[0].memory_report(max_tokens=8)
            assert report.outputs < ep.configs[0].memory_report().outputs or most == 8
            assert report.block == ep.configs[0].memory_report().block
            for wrong in (-1, most + 1, "8", True, 4.0):
                with pytest.raises(moelink.ConfigError, match="^max_tokens: expected an integer in"):
                    ep.configs[0].memory_report(max_tokens=wrong)
            counted = report.outputs - 8 * ep.configs[0].combine_row_bytes * (1 if fields else 4)
            returned = taken[most] - y.nbytes
            assert 0.9 * returned <= counted <= 1.1 * returned
    assert taken[4096] <= 1.1 * taken[8]


def test_a_large_communicator_takes_the_grid_of_a_small_one(monkeypatch):
    """CTAs of a dispatch of few tokens, which the bound alone makes known."""
    monkeypatch.setattr(grid, "sm_count", lambda device: 132)
    fields = {"num_experts": 256, "topk": 8, "hidden_size": 7168, "world_size": 8}
    device = torch.device("cuda", 0)
    large, small = (moelink.EPConfig(max_tokens_per_rank=most, **fields) for most in (4096, 64))
    for tokens in (0, 1, 64):
        choose = [(large, 64), (small, None), (large, None), (large, 257)]
        got = [grid.dispatch_launch(c, device, tokens, encodes=False, max_tokens=m) for c, m in choose]
        assert got[0] == got[1] != got[2] == got[3]


def test_a_large_communicator_takes_the_kernels_of_a_small_one():
    device, cpu = torch.device("cuda", 0), torch.device("cpu")
    fields = {"num_experts": 4, "topk": 2, "hidden_size": 128}
    large, middle, small = (moelink.EPConfig(max_tokens_per_rank=most, **fields) for most in (4096, 512, 256))

    def tokens(config: moelink.EPConfig, *bounds: int | None) -> list[int]:
        return [grid.tokens_of_kernels(config, device, bound) for bound in bounds]

    assert tokens(large, 0, 256, 257, 1024, 1025, None) == [256, 256, 1024, 1024, 4096, 4096]
    assert tokens(middle, 256, 257, None) == [256, 512, 512]
    assert tokens(small, 1, None) == [256, 256]
    assert [grid.bounds_of_kernels(each, device) for each in (large, middle, small)] == [
        [256, 1024, None], [256, None], [None],
    ]  # fmt: skip
    assert grid.bounds_of_kernels(large, device, (None, 8, 7)) == [256, None]
    assert grid.bounds_of_kernels(dataclasses.replace(large, max_tokens_per_rank=5), cpu) == [4, None]


@pytest.mark.parametrize("bounds", [(3, 7), (7, 3)], ids=str)
@pytest.mark.parametrize("number", [0, 2, 4, 6])
def test_ranks_need_not_take_kernels_of_the_same_tokens(number, bounds):
    """On CPUs kernels are for up to 4 tokens, or for the 7 of the communicator; these have a launch for scales in
    columns and tiles."""
    setup, ranks = SETUPS[number], range(2)
    case = Case(setup, "skewed", small=True, max_tokens=bounds)
    transport = transport_of("symmetric", setup)
    requests = bounded(dispatch_requests(case, ranks), bounds)
    plans = [Dispatch.plan_of(transport.ranks[0], dataclasses.replace(requests[0], max_tokens=m)) for m in (4, 5, None)]
    few, more, most = ((plan.both.S.MAX_TOKENS_ALONE, plan.layout is not None) for plan in plans)
    assert few == (0, False)
    assert more == most == (3, setup.dispatch_format != "bf16" and "layout" not in dict(setup.options))
    for fused in (True, False):
        recvs = transport.dispatch(requests, fused=fused).wait()
        outs = transport.combine(combine_requests(case, ranks, recvs)).wait()
        check_case(case, 2, [Result.of(recv, out) for recv, out in zip(recvs, outs, strict=True)])


@pytest.mark.parametrize(("bounds", "later"), [((), {True, False}), ((None,), {True}), ((None, 3), {True, False})])
def test_a_warmup_makes_calls_of_each_bound(monkeypatch, bounds, later):
    """On devices it compiles what these calls launch; nothing is launched here."""
    made: list[Any] = []
    monkeypatch.setattr(Launcher, "launch", lambda _, kernel, *rest: made.append(kernel.S))
    monkeypatch.setattr(Rank, "grant_credits", lambda _: None)
    transport = transport_of("symmetric", SETUPS[2])
    prepare_calls(transport.ranks[0], None, Rehearsal(bounds=bounds))
    assert {spec.SCALES_LATER for spec in made if isinstance(spec, DispatchSpec)} == later


def test_whoever_writes_padding_is_not_alone(monkeypatch):
    """One message needs few receivers, which would zero the scales of all groups; so there are more for padding."""
    monkeypatch.setattr(grid, "sm_count", lambda device: 132)
    fields = {"num_experts": 256, "topk": 8, "hidden_size": 7168, "world_size": 2, "max_tokens_per_rank": 1}
    receivers = {
        (name, layout, alignment): grid.dispatch_launch(
            moelink.EPConfig(dispatch_format=name, layout=layout, expert_alignment=alignment, **fields),
            torch.device("cuda", 0), 1, encodes=True,
        ).receive
        for name in ("mxfp4", "mxfp8", "nvfp4")
        for layout, alignment in (("expert", 1), ("expert", 8), ("rank", 1))
    }  # fmt: skip
    assert all(receivers[key] == 133 for key in receivers if key[2] > 1)
    tiles = {key for key, receive in receivers.items() if receive == 67}
    assert tiles == {key for key in receivers if key[0] != "mxfp4" and key[1:] == ("expert", 1)}
    assert {receivers[key] for key in receivers.keys() - tiles if key[2] == 1} == {5}


def step(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Result, and gradient of ``x``."""
    x = x.clone().requires_grad_()
    out = run(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad]


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_gradients_and_traced_calls_have_the_rows_of_the_bound(transport):
    """Eager with gradients and traced, forward and backward: the same numbers with the bound as without, and no
    tensor of the worst case in between."""
    fields = {"num_experts": 3, "topk": 2, "hidden_size": 8, "max_tokens_per_rank": 64, "transport": transport}
    ids, weights = torch.tensor([[0, 1], [2, -1], [1, 2]]), torch.rand(3, 2)
    x, sizes = torch.randn(3, 8).bfloat16(), []
    with moelink.init(**fields, device="cpu") as ep:

        def layer(x: torch.Tensor, bound: int | None) -> torch.Tensor:
            recv = ep.dispatch(x, ids, weights, max_tokens=bound)
            if recv.tokens.requires_grad:
                recv.tokens.register_hook(lambda grad: sizes.append(len(grad)))
            return ep.combine(recv.tokens * 2, recv)

        plain, bounded = step(lambda x: layer(x, None), x), step(lambda x: layer(x, 3), x)
        assert sizes == [128, 6]

        def traced(x: torch.Tensor) -> torch.Tensor:
            recv = ep.dispatch(x, ids, weights, max_tokens=x.shape[0])
            assert recv.tokens.shape == (6, 8)
            return ep.combine(recv.tokens * 2, recv)

        compiled = step(torch.compile(traced, backend="aot_eager", fullgraph=True), x)
        for got in (bounded, compiled):
            for one, two in zip(got, plain, strict=True):
                assert_bitwise_equal(one, two)


@pytest.mark.parametrize("mode", ["alltoall", "allreduce"])
def test_a_layer_knows_the_bound_where_only_own_tokens_come(mode):
    fields = {"num_experts": 4, "topk": 2, "hidden_size": 16, "max_tokens_per_rank": 4096, "mode": mode}
    with moelink.init(**fields, device="cpu") as ep, torch.no_grad():
        layer, seen = MoE(ep, intermediate_size=32), []
        layer.experts.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
        x = torch.randn(5, 16).bfloat16()
        want = layer(x)
        assert_bitwise_equal(layer(x, max_tokens=7), want)
        assert seen == [10, 14]
        with pytest.raises(moelink.ArgumentError, match="max_tokens: expected an integer from the 5 rows of x"):
            layer(x, max_tokens=4)
    several = dataclasses.replace(ep.config, world_size=2)
    assert known_max_tokens(several, 5) == (5 if mode == "allreduce" else None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_of_a_decode_step_on_a_gpu():
    """A layer's step of 8 tokens: the same peak on a communicator of 4096 tokens as on one of 8, workspace aside."""
    fields = {"num_experts": 16, "topk": 8, "hidden_size": 2048, "dispatch_format": "fp8_block128"}
    peaks = {}
    for most in (8, 4096):
        with moelink.init(**fields, max_tokens_per_rank=most, transport="symmetric") as ep, torch.no_grad():
            layer, x = MoE(ep, intermediate_size=1024), torch.randn(8, 2048, device=ep.device, dtype=torch.bfloat16)
            layer(x, max_tokens=8)  # compiles
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            layer(x, max_tokens=8)
            torch.cuda.synchronize()
            peaks[most] = torch.cuda.max_memory_allocated() - before
            # Routing notes are as long as the communicator's messages.
            peaks[most] -= 4 * Workspace(ep.config).note_words(8)
    assert peaks[4096] <= 1.1 * peaks[8], peaks
