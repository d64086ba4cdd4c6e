"""The contract's launchers on one device that plays all ranks, and on several, against the oracle.

Interpreted on CPUs, compiled where there is a GPU. In split form nobody waits for a launch that comes later on the same
device, so one GPU serves all ranks.
"""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from moelink import contract
from moelink.contract import warmup
from moelink.contract.notes import CallNotes
from moelink.errors import ArgumentError
from moelink.kernels.launch.device import launches_overlap
from tests.contract.contract_ranks import (
    Buffers,
    Launched,
    combine_all,
    dispatch_all,
    params_of,
    ranks_of,
    run,
    setup,
    warm_up,
)
from tests.contract.test_contract_phases import combine_in_phases
from tests.support.cases import FORMATS, Case, Packed, Result, check_case

CUDA = pytest.param(
    "cuda:0",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
CPU = pytest.param(
    "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
)
DEVICES = (CPU, CUDA)


def case_of(fmt: str, fused_shared_expert: bool, **options) -> Case:
    return Case(setup(fmt, fused_shared_expert=fused_shared_expert, **options), "skewed", weights="combine")


@pytest.mark.kernels(of=lambda fmt, shared, world_size: [Launched(case_of(fmt, shared), world_size)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", (3, 2, 8))
@pytest.mark.parametrize("shared", (True, False), ids=("shared", "routed"))
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_device_plays_all_ranks(fmt: str, shared: bool, world_size: int, device: str) -> None:
    """``distributed_*``, which launch the split form where ranks share a device."""
    case = case_of(fmt, shared)
    eps = ranks_of(params_of(case.setup, world_size), device)
    for seed, scenario in enumerate(("skewed", "holes")):
        run(eps, dataclasses.replace(case, seed=seed, scenario=scenario))


def with_sums(fmt: str) -> list[Case]:
    """Cases in which sums travel, and in which nothing does."""
    options = ({"pre_reduce": True}, {"mode": "allreduce"})
    return [Case(setup(fmt, fused_shared_expert=True, **each), "repeats", weights="dispatch") for each in options]


@pytest.mark.kernels(of=lambda fmt, world_size: [Launched(case, world_size) for case in with_sums(fmt)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("fmt", ("bf16", "fp8_block128", "nvfp4"))
def test_sums_travel_and_nothing_travels(fmt: str, world_size: int, device: str) -> None:
    for case in with_sums(fmt):
        run(ranks_of(params_of(case.setup, world_size), device), case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", (3, 2))
@pytest.mark.parametrize("shared", (True, False), ids=("shared", "routed"))
def test_phases_on_one_device(shared: bool, world_size: int, device: str) -> None:
    case = case_of("bf16", shared)
    eps = ranks_of(params_of(case.setup, world_size), device)
    buffers = [Buffers.allocate(ep) for ep in eps]
    for n_sms in (2, 16):
        # A dispatch grants credit for the phases' combine, which nothing else does on one device.
        dispatch_all(eps, buffers, case)
        outs = combine_in_phases(eps, buffers, case, n_sms=n_sms)
        dispatch_all(eps, buffers, case)
        for out, want in zip(outs, combine_all(eps, buffers, case), strict=True):
            assert torch.equal(out, want)
    check_case(case, world_size, [Result(b.fields(), Packed.of(out)) for b, out in zip(buffers, outs, strict=True)])


def warmed(case: Case, world_size: int, forms: Sequence[str] = ("fused", "split")) -> list[Launched]:
    """What :func:`warm_up` compiles, form by form."""
    return [Launched(case, world_size, (form,)) for form in forms]


@pytest.mark.parametrize("device", DEVICES)
def test_one_device_combines_a_dispatch_twice(device: str) -> None:
    """Nothing that a rank launches later can grant the credit for the first combine: its own launch has to."""
    case = case_of("bf16", True)
    eps = ranks_of(params_of(case.setup, 3, timeout=10), device)
    buffers = [Buffers.allocate(ep) for ep in eps]
    for _ in range(2):
        dispatch_all(eps, buffers, case)
    for _ in range(3):
        outs = combine_all(eps, buffers, case)
    check_case(case, 3, [Result(b.fields(), Packed.of(out)) for b, out in zip(buffers, outs, strict=True)])


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda fmt, shared: warmed(case_of(fmt, shared), min(8, torch.cuda.device_count())))
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("warm", (False, True), ids=("cold", "warm"))
@pytest.mark.parametrize("shared", (True, False), ids=("shared", "routed"))
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_device_of_the_process(fmt: str, shared: bool, warm: bool) -> None:
    """One fused launch per device. Cold, the first call compiles before the first launch."""
    count = min(8, torch.cuda.device_count())
    case = case_of(fmt, shared)
    eps = ranks_of(params_of(case.setup, count, timeout=20), *[f"cuda:{i}" for i in range(count)])
    if warm:
        for ep in eps:
            ep.warmup()
    for seed in range(2):
        run(eps, dataclasses.replace(case, seed=seed))


def kinds(launched) -> set:
    """What a launch is compiled for: its function, constants, options, and the dtypes of the caller's tensors."""
    return {(function.__name__, repr(S), tuple(options.items()), dtypes) for function, S, options, dtypes in launched}


def record(monkeypatch, ep, launched, *, runs: bool) -> None:
    """Note every launch of ``ep`` in ``launched``; without ``runs`` nothing else happens."""
    launch = ep.launcher.launch

    def noting(kernel, records, numbers, given=(), **more):
        if kernel.function.__name__ != "ep_grant_credits_kernel":  # CPUs only
            launched.append((kernel.function, kernel.S, kernel.options, tuple(t.dtype for t in given)))
        if runs:
            launch(kernel, records, numbers, given, **more)

    monkeypatch.setattr(ep.launcher, "launch", noting)


WARM = [
    Case(setup("nvfp4"), "skewed", weights="combine"),
    Case(setup("bf16", fused_shared_expert=True), "skewed", weights="combine"),
    Case(setup("fp8_block128", pre_reduce=True), "skewed", weights="dispatch"),
    Case(setup("bf16", mode="allreduce", fused_shared_expert=True), "skewed", weights="dispatch"),
    Case(setup("bf16"), "holes", weights="none", reduce=False),
    Case(setup("fp64"), "uniform", weights="combine", shared=True),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("case", WARM, ids=lambda case: case.id)
@pytest.mark.quick("each has other forms")
def test_every_form_that_runs_was_warmed_up(monkeypatch, case: Case) -> None:
    ran, warmed = [], []
    for world_size in (1, 2):  # alone the fused kernels, together the split ones
        eps = ranks_of(params_of(case.setup, world_size))
        for ep in eps:
            record(monkeypatch, ep, ran, runs=True)
        run(eps, case)
        buffers = [Buffers.allocate(ep, weighted=case.weights == "dispatch") for ep in eps]
        dispatch_all(eps, buffers, case)
        combine_in_phases(eps, buffers, case)
    for world_size in (1, 2):
        (ep, *_) = ranks_of(params_of(case.setup, world_size))
        before = ep.memory.local.clone()
        record(monkeypatch, ep, warmed, runs=False)
        data = case.data(0)
        for start in warmup.launches(ep, (data.x.dtype,), (data.topk_ids.dtype,), warmup.FORMS, (), case.shared):
            start()
        assert torch.equal(ep.memory.local, before)
        assert vars(ep.notes) == vars(CallNotes())  # nothing of it is taken for a call
    assert {each[0] for each in kinds(ran)} <= {each[0] for each in kinds(warmed)}
    assert kinds(ran) <= kinds(warmed)


def test_a_warmup_of_what_there_is_not_is_refused() -> None:
    params = params_of(setup("bf16"), 1)
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU")
    (ep,) = ranks_of(params)
    for name, value in (("input_dtypes", torch.int8), ("id_dtypes", torch.int16), ("forms", "whole")):
        with pytest.raises(ArgumentError, match=f"{name}: expected of .*got {value}"):
            ep.warmup(**{name: (value,)})
    ep.warmup(forms=warmup.FORMS, epilogues=(torch.ones(params.hidden_size),))
    assert not ep.memory.local.any()


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda case: warmed(case, 2, warmup.FORMS))
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", WARM, ids=lambda case: case.id)
def test_after_a_warmup_nothing_is_compiled(monkeypatch, case: Case) -> None:
    eps = ranks_of(params_of(case.setup, 2), "cuda:0")
    for ep in eps:
        warm_up(ep, case, warmup.FORMS)
    loaded = [set(ep.launcher._loaded) for ep in eps]
    run(eps, case)
    buffers = [Buffers.allocate(ep, weighted=case.weights == "dispatch") for ep in eps]
    dispatch_all(eps, buffers, case)
    combine_in_phases(eps, buffers, case)
    assert [set(ep.launcher._loaded) - before for ep, before in zip(eps, loaded, strict=True)] == [set(), set()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_of_one_device_in_fused_form_do_not_wait_for_a_compiler() -> None:
    """Fused launches on streams of their own: each waits for the other's, which must not have to be compiled first."""
    case = case_of("bf16", True)
    eps = ranks_of(params_of(case.setup, 2, timeout=5, n_sms=16), "cuda:0")
    buffers, streams = [Buffers.allocate(ep) for ep in eps], [torch.cuda.Stream() for _ in eps]
    for ep in eps:
        ep.warmup(id_dtypes=(torch.int32, torch.int64))
    datas = [case.data(rank) for rank in range(2)]
    given = [(d.x.cuda(), d.topk_ids.cuda(), d.topk_weights.cuda()) for d in datas]
    ys = [case.expert_rows(rank, len(b.src_info)).cuda() for rank, b in enumerate(buffers)]
    outs = [torch.empty_like(x) for x, _, _ in given]
    torch.cuda.synchronize()
    for ep, own, (x, ids, _), stream in zip(eps, buffers, given, streams, strict=True):
        with torch.cuda.stream(stream):
            outputs = (own.handler, own.row_offsets, own.expert_ids, own.src_info)
            contract.ep_fused_dispatch(ep, *outputs, ep.atomic_counters[0], x, ids, ep.pointers[0], own.routing)
    for ep, own, (_, ids, weights), y, out, stream in zip(eps, buffers, given, ys, outs, streams, strict=True):
        with torch.cuda.stream(stream):
            contract.ep_fused_combine(
                ep, out, ep.atomic_counters[1], y, own.routing, ep.pointers[1], ids, router_weights=weights
            )
    for ep in eps:
        ep.check()
    check_case(case, 2, [Result(b.fields(), Packed.of(out)) for b, out in zip(buffers, outs, strict=True)])


def test_ranks_that_share_a_gpu_are_launched_in_halves() -> None:
    def of(*devices: str) -> bool:
        return launches_overlap([torch.device(device) for device in devices])

    assert of("cuda:0", "cuda:1", "cuda:2")
    assert of("cpu")
    assert of("cuda:0")
    assert not of("cuda:0", "cuda:0")
    assert not of("cuda:0", "cuda:1", "cuda:0")
    assert not of("cpu", "cpu")
