"""Results do not depend on how a launch is cut: programs of each role, tokens and messages at a time."""

from __future__ import annotations

import dataclasses

import pytest

from cases import FIELDS, Case, Packed, Result, Setup, check_case
from moelink.kernels.cut import Launch
from moelink.transports.symmetric import combining, dispatching
from symmetric_ranks import combine_requests, dispatch_requests, one_process

WORLD = 3
SHAPES = [  # programs that send and that receive; tokens and messages at a time
    (1, 1, 1, 1),
    (7, 5, 2, 2),
    (2, 9, 1, 4),
    (20, 16, 4, 1),
]
SETUPS = [
    Setup("fp8_block128", (("expert_alignment", 3),)),
    Setup("bf16", (("pre_reduce", False), ("fused_shared_expert", True))),
    Setup("nvfp4", (("layout", "rank"),)),
]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.dispatch_format)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_oracle(monkeypatch, shape, setup):
    send, receive, batch, gather = shape
    spec_of = dispatching.dispatch_spec
    monkeypatch.setattr(dispatching, "dispatch_launch", lambda *args, **options: Launch(send, receive))
    monkeypatch.setattr(combining, "combine_launch", lambda *args: Launch(receive, send))
    monkeypatch.setattr(
        dispatching, "dispatch_spec",
        lambda *args, **options: dataclasses.replace(spec_of(*args, **options), BATCH=batch, GATHER=gather),
    )  # fmt: skip
    transport = one_process(setup.fields, WORLD)
    for case in (Case(setup, "uniform", seed=3), Case(setup, "one_rank_empty", seed=5)):
        ranks = range(WORLD)
        recvs = transport.dispatch(dispatch_requests(case, ranks)).wait()
        outs = transport.combine(combine_requests(case, ranks, recvs)).wait()
        check_case(case, WORLD, [
            Result({name: Packed.of(getattr(recv, name)) for name in FIELDS}, Packed.of(out))
            for recv, out in zip(recvs, outs, strict=True)
        ])  # fmt: skip
    transport.check()
    transport.close()
