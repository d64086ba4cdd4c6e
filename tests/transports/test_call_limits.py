"""``num_sms`` of a call: which kernels and how many CTAs it launches, and who refuses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moelink
import moelink.kernels.launch.constants as constants
import moelink.transports.symmetric.rank as ranks
from moelink.kernels.launch.grid import Launch
from moelink.kernels.launch.launcher import Launcher
from moelink.testing import run_ranks
from tests.gpu.gpu_compile import Kernel, kernels_of, warmup_kernels
from tests.transports import call_limit_ranks

FIELDS = {"num_experts": 5, "topk": 2, "hidden_size": 48, "max_tokens_per_rank": 3}
WORLD = min(8, torch.cuda.device_count())


def limit_on_cpu(config: moelink.EPConfig, device: torch.device) -> int:
    return config.num_sms or 0


def forget_constants() -> None:
    constants.dispatch_spec.cache_clear()
    constants.combine_spec.cache_clear()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The SM limits of the kernels of calls that were launched since the list was emptied; none of them runs."""
    found: list[int] = []
    monkeypatch.setattr(ranks, "sm_limit_of", limit_on_cpu)
    monkeypatch.setattr(constants, "sm_limit_of", limit_on_cpu)
    monkeypatch.setattr(Launcher, "launch", lambda _, kernel, *__, **___: found.append(kernel.S.NUM_SMS))
    monkeypatch.setattr(ranks.Rank, "grant_credits", lambda _: None)  # of no call
    forget_constants()
    yield found
    forget_constants()


def taken(limits: list[int]) -> set[int]:
    """What is in the list, which is emptied."""
    found = set(limits)
    limits.clear()
    return found


def test_a_limited_call_launches_the_kernels_of_a_limited_communicator(
    limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that either can compile for the other: the bench compiles for all limits by calls of one communicator."""
    launched: list[tuple[Any, ...]] = []

    def note(_: Launcher, kernel: Any, *__: Any, **___: Any) -> None:
        launched.append((kernel.function, kernel.programs, kernel.count, kernel.S, kernel.options))

    monkeypatch.setattr(Launcher, "launch", note)
    x, ids, y = torch.randn(3, 48).bfloat16(), torch.randint(5, (3, 2)), torch.zeros(15, 48, dtype=torch.bfloat16)
    for init, call in ((2, None), (None, 2), (None, None)):
        with moelink.init(**FIELDS, layout="rank", capacity=15, transport="symmetric", num_sms=init) as ep:
            ep.combine(y, ep.dispatch(x, ids, num_sms=call), num_sms=call)
    assert launched[:2] == launched[2:4] != launched[4:]


def test_every_form_of_a_call_launches_what_its_limit_allows(limits: list[int]) -> None:
    x, ids = torch.randn(3, 48).bfloat16(), torch.randint(5, (3, 2))
    with moelink.init(**FIELDS, transport="symmetric") as ep:
        y = torch.zeros(ep.config.row_capacity, 48, dtype=torch.bfloat16)
        for num_sms in (3, None, 2, None, 3):  # kinds that were seen before, in the fast path and out of it
            want = {num_sms or 0}
            recv = ep.dispatch(x, ids, num_sms=num_sms)
            assert taken(limits) == want
            ep.combine(y, recv, num_sms=num_sms)
            assert taken(limits) == want
            pending = ep.dispatch_async(x, ids, num_sms=num_sms)
            assert taken(limits) == want
            recv = pending.wait()
            assert taken(limits) == want
            back = ep.combine_async(y, recv, num_sms=num_sms)
            assert taken(limits) == want
            back.wait()
            assert taken(limits) == want
            ep.dispatch(x, None, routing=recv, num_sms=num_sms)
            assert taken(limits) == want
            bound = ep.bind(x, ids, num_sms=num_sms)
            bound()
            assert taken(limits) == want
            bound.combine(y, num_sms=num_sms)()
            assert taken(limits) == want
    with moelink.init(**FIELDS, transport="symmetric", num_sms=4) as ep:
        recv = ep.dispatch(x, ids)
        assert taken(limits) == {4}
        ep.combine(y, recv, num_sms=4)
        ep.combine(y, recv, num_sms=1)
        assert taken(limits) == {4, 1}


def test_the_grid_follows_the_limit_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """71 CTAs on 24 of 132 SMs are launched as 396 (the example of ``grid``); on 71 of them as 71."""
    monkeypatch.setattr(ranks, "sm_limit_of", limit_on_cpu)
    with moelink.init(**FIELDS, transport="symmetric", num_sms=100) as ep:
        (rank,) = ep._session.transport.ranks
        rank.launcher._available, rank.launcher._num_sms = 132, 100
        launch = Launch(10, 61, resident=3)
        counts = []
        for num_sms in (None, 24, 71):
            config, workspace, kernel = rank.within(num_sms)
            assert (config.num_sms, workspace.config.num_sms) == (num_sms or 100,) * 2
            assert workspace.regions == rank.workspace.regions
            counts.append(kernel(None, 71, S=None, launch=launch).count)
        assert counts == [71, 396, 71]


@pytest.mark.parametrize(("num_sms", "words"), [
    (0, "num_sms: expected an integer >= 1 and <= 4, which the communicator may use, got 0"),
    (5, "num_sms: expected an integer >= 1 and <= 4, which the communicator may use, got 5"),
    (True, "num_sms: expected an integer or None, got a bool"),
    (2.0, "num_sms: expected an integer or None, got a float"),
])  # fmt: skip
def test_limits_that_cannot_be_are_refused(num_sms: Any, words: str) -> None:
    x, ids = torch.randn(3, 48).bfloat16(), torch.randint(5, (3, 2))
    with moelink.init(**FIELDS, transport="symmetric", num_sms=4) as ep:
        recv = ep.dispatch(x, ids, num_sms=1)
        bound = ep.bind(x, ids)
        bound()
        y = recv.tokens
        for call in (
            lambda: ep.dispatch(x, ids, num_sms=num_sms),
            lambda: ep.dispatch_async(x, ids, num_sms=num_sms),
            lambda: ep.combine(y, recv, num_sms=num_sms),
            lambda: ep.combine_async(y, recv, num_sms=num_sms),
            lambda: ep.bind(x, ids, num_sms=num_sms),
            lambda: bound.combine(y, num_sms=num_sms),
            lambda: ep.warmup(num_sms=[1, num_sms]),
        ):
            with pytest.raises(moelink.ArgumentError, match=re.escape(words)):
                call()
        with pytest.raises(moelink.ArgumentError, match="num_sms: expected a sequence of integers"):
            ep.warmup(num_sms=3)  # type: ignore[arg-type]
        out = ep.combine(ep.dispatch(x, ids).tokens, recv)
        assert torch.equal(out, ep.combine(ep.dispatch(x, ids, num_sms=4).tokens, recv, num_sms=2))


def test_the_collective_transport_refuses_a_limit() -> None:
    x, ids = torch.randn(3, 48).bfloat16(), torch.randint(5, (3, 2))
    with moelink.init(**FIELDS, transport="collective") as ep:
        recv = ep.dispatch(x, ids)
        bound = ep.bind(x, ids)
        bound()
        for call in (
            lambda: ep.dispatch(x, ids, num_sms=1),
            lambda: ep.combine(recv.tokens, recv, num_sms=1),
            lambda: ep.bind(x, ids, num_sms=1),
            lambda: bound.combine(recv.tokens, num_sms=1),
            lambda: ep.warmup(num_sms=[1]),
        ):
            with pytest.raises(moelink.UnsupportedError, match="num_sms: expected None with transport='collective'"):
                call()
    with (
        moelink.init_devices(["cpu"] * 2, **FIELDS, transport="collective") as both,
        pytest.raises(moelink.UnsupportedError, match="num_sms: expected None with transport='collective'"),
    ):
        both.dispatch([x, x], [ids, ids], num_sms=1)


def test_an_operator_refuses_a_limit() -> None:
    words = "num_sms: expected None for a call with gradients or under a tracer"
    x, ids = torch.randn(3, 48).bfloat16(), torch.randint(5, (3, 2))
    with moelink.init(**FIELDS, transport="symmetric") as ep:
        learns = x.clone().requires_grad_()
        recv = ep.dispatch(learns, ids)
        for call in (
            lambda: ep.dispatch(learns, ids, num_sms=1),
            lambda: ep.dispatch_async(learns, ids, num_sms=1),
            lambda: ep.combine(recv.tokens, recv, num_sms=1),
        ):
            with pytest.raises(moelink.UnsupportedError, match=words):
                call()
        traced = torch.compile(lambda x: ep.dispatch(x, ids, num_sms=1).tokens, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=words):
            traced(x)


def test_ranks_may_pass_different_limits() -> None:
    assert run_ranks(call_limit_ranks.same_rows, 2, {"device": "cpu"}) == [True, True]


def kernels(more: dict[str, Any]) -> list[Kernel]:
    """What :func:`test_ranks_may_pass_different_limits_on_gpus` launches: a call's limit decides as the field does."""
    fields = call_limit_ranks.on_gpus(WORLD, more)
    limits = {limit for rank in range(WORLD) for limit in call_limit_ranks.limits_on_gpu(rank)}
    setups = [fields, *({**fields, "num_sms": limit} for limit in sorted(limits))]
    routed = [kernel for setup in setups for kernel in kernels_of(setup, WORLD, ["over_routing"])]
    return routed + [kernel for setup in setups for kernel in warmup_kernels(setup, WORLD)]


@pytest.mark.gpu
@pytest.mark.skipif(WORLD < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("more", [{}, {"num_sms": 32}, {"dispatch_format": "nvfp4"}, {"pre_reduce": False}])
@pytest.mark.kernels(of=kernels)
def test_ranks_may_pass_different_limits_on_gpus(more: dict[str, Any]) -> None:
    fields = call_limit_ranks.on_gpus(WORLD, more)
    assert run_ranks(call_limit_ranks.same_rows, WORLD, fields, timeout=400) == [True] * WORLD


@pytest.mark.gpu
@pytest.mark.skipif(WORLD < 1, reason="needs a CUDA device")
def test_a_device_has_so_many_sms() -> None:
    most = torch.cuda.get_device_properties(0).multi_processor_count
    x, ids = torch.randn(3, 48).bfloat16().cuda(), torch.randint(5, (3, 2)).cuda()
    with moelink.init(**FIELDS, transport="symmetric", device="cuda:0") as ep:
        ep.warmup(num_sms=[most])
        ep.dispatch(x, ids, num_sms=most)
        with pytest.raises(moelink.ArgumentError, match=f"num_sms: expected an integer >= 1 and <= {most}"):
            ep.dispatch(x, ids, num_sms=most + 1)
        ep.check()
