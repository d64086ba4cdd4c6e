"""Several ranks on one GPU: all kernels compiled, the whole protocol, no second device. Run by hand: ``-m gpu``.

Ranks take turns: every rank's sending half runs before any receiving half, so no launch waits for a later one.
"""

import dataclasses

import pytest
import torch

import moelink
from moelink.memory import create_all
from moelink.memory.workspace import Workspace
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.symmetric import SymmetricTransport
from tests.gpu.gpu_compile import HALVES, HALVES_OVER_ROUTING, Kernel, kernels_of
from tests.support.cases import FORMATS, Case, Packed, Result, Setup, check_case, real_shapes

WORLD = 4
OPTIONS = ({}, {"layout": "rank"}, {"pre_reduce": False}, {"mode": "allreduce"}, {"expert_alignment": 130})

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def kernels(setup: Setup) -> list[Kernel]:
    """What :func:`check_on_one_device` launches with a setup."""
    return kernels_of(setup.fields, WORLD, (*HALVES, *HALVES_OVER_ROUTING))


def check_on_one_device(cases: list[Case]) -> None:
    """Each case, and once more over its routing."""
    setup = cases[0].setup
    configs = [moelink.EPConfig(**setup.fields, world_size=WORLD, rank=rank) for rank in range(WORLD)]
    memories = create_all(["cuda:0"] * WORLD, Workspace(configs[0]).nbytes)
    transport = SymmetricTransport(configs, memories, "test")
    for case in cases:
        data = [case.data(rank) for rank in range(WORLD)]
        requests = [DispatchRequest(d.x.cuda(), d.topk_ids.cuda(), d.topk_weights.cuda()) for d in data]
        recvs = transport.dispatch(requests).wait()
        again = transport.dispatch([
            dataclasses.replace(request, routing=recv)
            for request, recv in zip(requests, recvs, strict=True)
        ]).wait()  # fmt: skip
        for each in (recvs, again):
            ys = [case.expert_rows(rank, len(recv.tokens)).cuda() for rank, recv in enumerate(each)]
            outs = transport.combine([CombineRequest(y, recv) for y, recv in zip(ys, each, strict=True)]).wait()
            check_case(case, WORLD, [
                Result.of(recv, out)
                for recv, out in zip(each, outs, strict=True)
            ])  # fmt: skip
    transport.check()
    transport.close()


@pytest.mark.kernels(of=lambda index: kernels(real_shapes()[3 * index].setup))
@pytest.mark.parametrize("index", range(len(real_shapes()) // 3))
def test_real_shapes(index):
    check_on_one_device(real_shapes()[3 * index : 3 * index + 3])


@pytest.mark.kernels(of=lambda fmt, options: kernels(Setup(fmt, tuple(options.items()))))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format(fmt, options):
    setup = Setup(fmt, tuple(options.items()))
    check_on_one_device([Case(setup, scenario, seed=i) for i, scenario in enumerate(("uniform", "holes", "repeats"))])


def many(options: dict[str, object]) -> Setup:
    return Setup("bf16", (("max_tokens_per_rank", 1100), *options.items()))


@pytest.mark.kernels(of=lambda options: kernels(many(options)))
@pytest.mark.parametrize("options", [{}, {"layout": "rank", "zero_copy": True}], ids=str)
def test_init_devices(options):
    """Without ``options`` the GPU holds one rank's launch of both roles: side by side they would wait for ever."""
    case = Case(many(options), "uniform", seed=2)
    data = [case.data(rank) for rank in range(WORLD)]
    x, ids, weights = ([getattr(d, name).cuda() for d in data] for name in ("x", "topk_ids", "topk_weights"))
    with moelink.init_devices(["cuda:0"] * WORLD, **case.setup.fields, timeout=20) as ep:
        for again in range(3):
            recvs = ep.dispatch(x, ids, weights)
            if again:
                recvs = ep.dispatch(x, None, weights, routing=recvs)
            ys = [case.expert_rows(rank, *recv.tokens.shape[:-1]).cuda() for rank, recv in enumerate(recvs)]
            got = [Result.of(recv, ys[0]) for recv in recvs]  # rows in place end with combine
            outs = ep.combine(ys, recvs)
            check_case(case, WORLD, [
                dataclasses.replace(each, combined=Packed.of(out))
                for each, out in zip(got, outs, strict=True)
            ])  # fmt: skip
        ep.check()


def few_programs(fmt: str) -> Setup:
    return Setup(fmt, (("num_sms", 4), ("max_tokens_per_rank", 1100)))


@pytest.mark.kernels(of=lambda fmt: kernels(few_programs(fmt)))
@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128"])
def test_many_tokens_on_few_programs(fmt):
    """Tokens in runs, shared tallies and cursors that take turns, as 4096 tokens on a whole device have them."""
    check_on_one_device([Case(few_programs(fmt), "uniform", seed=1)])
