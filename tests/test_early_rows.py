"""Rows before counts (``kernels.send_early``): the same results as rows after counts, under every schedule and cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

import moelink
from cases import FORMATS, Case, Result, Setup, check_case
from interleaving import Deadlock
from moelink.kernels import message, receive, send_early, send_one, spec
from moelink.kernels.cut import Launch
from moelink.protocol import CALL_SHIFT, DISPATCH_SENT
from moelink.transports.base import DispatchRequest
from moelink.transports.symmetric import dispatching
from moelink.workspace import Workspace
from protocol_runs import FORMAT, Small, caught, one_call, run, scenarios, two_calls
from symmetric_ranks import apart, combine_requests, dispatch_requests, one_process, over, run_case

WORLD = 3
ONE, TWO, SCENARIOS = one_call(FORMAT), two_calls(FORMAT), scenarios(FORMAT)
MANY = [dataclasses.replace(case, tokens=(4, 3)) for case in ONE]
BF16 = Setup("bf16")
OPTIONS: tuple[tuple[tuple[str, object], ...], ...] = (
    (),
    (("layout", "rank"),),
    (("expert_alignment", 4), ("fused_shared_expert", True)),
    (("mode", "allreduce"), ("layout", "rank")),
)


@pytest.fixture(autouse=True)
def early(monkeypatch):
    """Not the default, as no GPU has compared it with the other way yet."""
    monkeypatch.setattr(spec, "EARLY_ROWS", True)
    spec.dispatch_spec.cache_clear()
    yield
    spec.dispatch_spec.cache_clear()


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_under_every_schedule(name):
    for seed in range(40, 44):
        run(seed, **SCENARIOS[name])


def test_scales_that_are_laid_out_later():
    """Of messages at their tokens' numbers, programs that count alone and together in turn."""
    setup = Setup("fp8_block128", (("max_tokens_per_rank", 6), ("hidden_size", 128)), num_experts=3, topk=2)
    for seed in range(4):
        run(seed, [Small(setup, "uniform", seed=seed, tokens=each) for each in ((3, 3), (6, 4), (3, 5))], combine=False)


def test_call_numbers_of_more_than_31_bits():
    for seed in range(3):
        run(seed, [*TWO, *MANY], combine=False, calls=2**31 - 2)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_oracle(fmt, options):
    setup = Setup(fmt, options)
    transport = one_process(setup.fields, WORLD)
    assert transport.ranks[0].workspace.config.max_tokens_per_rank > 4
    for case in (Case(setup, "uniform", seed=3), Case(setup, "one_rank_empty", seed=5)):
        check_case(case, WORLD, run_case(transport, case, range(WORLD)))
    transport.check()
    transport.close()


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 0), (7, 5, 2, 2, 0), (2, 9, 1, 4, 100), (2, 4, 4, 4, 0), (4, 16, 4, 1, 100)], ids=str
)
def test_results_do_not_depend_on_how_a_launch_is_cut(monkeypatch, shape):
    send, receive_, batch, gather, alone = shape
    spec_of = dispatching.dispatch_spec
    monkeypatch.setattr(dispatching, "dispatch_launch", lambda *args, **options: Launch(send, receive_))
    monkeypatch.setattr(
        dispatching, "dispatch_spec",
        lambda *a, **o: dataclasses.replace(spec_of(*a, **o), BATCH=batch, GATHER=gather, ALONE=alone),
    )  # fmt: skip
    setup = Setup("fp8_block128", (("expert_alignment", 3),))
    transport = one_process(setup.fields, WORLD)
    for case in (Case(setup, "uniform", seed=3), Case(setup, "one_rank_empty", seed=5)):
        requests = dispatch_requests(case, range(WORLD))
        first = transport.dispatch(requests).wait()
        for recvs in (first, transport.dispatch(over(first, requests)).wait()):
            outs = transport.combine(combine_requests(case, range(WORLD), recvs)).wait()
            check_case(case, WORLD, [Result.of(recv, out) for recv, out in zip(recvs, outs, strict=True)])
    transport.check()
    transport.close()


def test_messages_lie_at_their_tokens_numbers_and_say_their_slots():
    """The docstring's example: ranks own experts 0, 1 and 2, 3, and rank 0's first two tokens have [1, 2] messages."""
    sizes = (("hidden_size", 8), ("max_tokens_per_rank", 5))
    ranks = apart(Setup("bf16", sizes, num_experts=4, topk=2), 2)
    workspace, memories = ranks[0].ranks[0].workspace, [transport.ranks[0].memory for transport in ranks]
    ids = torch.tensor([[2, 3], [3, 0], [0, 3], [1, 0]])
    x = torch.arange(4.0)[:, None].expand(4, 8).bfloat16().contiguous()
    pending = [transport.dispatch([DispatchRequest(x, ids)]) for transport in ranks]

    def said(rank):
        """Token and slot of every message that rank 0 may have stored at ``rank``."""
        part = workspace.message["token"]
        return workspace.regions["messages"].view(memories[rank].local)[0, :, part.offset : part.end].view(torch.int32)

    flags = [workspace.regions["message_flag"].view(memory.local)[0].tolist() for memory in memories]
    assert flags == [[3, 2, 2, 2, 0], [2, 2, 2, 3, 0]], "call 1: 2, and 3 where none comes"
    assert said(0)[1:4].tolist() == [[1, 0], [2, 1], [3, 2]]
    assert said(1)[:3].tolist() == [[0, 0], [1, 1], [2, 2]]
    for one in pending:
        one.wait()


@triton.jit
def store_nothing(slot, places, S: tl.constexpr):
    pass


def test_a_slot_that_is_not_said_is_caught(monkeypatch):
    monkeypatch.setattr(send_early, "store_slots", store_nothing)
    assert caught(MANY) is not None


@triton.jit
def publish_without_release(words, mask, value):
    tl.atomic_xchg(words, value, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def publish_what_comes(words, mask, value):
    tl.debug_barrier()
    tl.atomic_xchg(words, value, mask=mask & (value % 2 == 0), sem="release", scope="sys")


@triton.jit
def wait_for_nobody(looked, table, record, control, me, phase, call, limit, S: tl.constexpr):
    return tl.full([], 1, tl.int32)


def test_missing_release_is_caught(monkeypatch):
    for module in (send_one, send_early):
        monkeypatch.setattr(module, "publish", publish_without_release)
    slow = ("kernel[0]", "kernel[1]", "kernel[2]")
    assert caught(MANY, drain=0.01, speed=lambda name: 0.05 if name.endswith(slow) else 1.0) is not None


def test_silence_about_a_token_that_does_not_come_is_a_deadlock(monkeypatch):
    monkeypatch.setattr(send_early, "publish", publish_what_comes)
    with pytest.raises((Deadlock, moelink.PeerTimeoutError)) as error:
        run(0, MANY)
    assert "wait_any" in str(error.value)


def test_reuse_of_a_buffer_too_early_is_caught(monkeypatch):
    monkeypatch.setattr(send_early, "wait_until_drained", wait_for_nobody)
    tokens = ((4, 3), (3, 4), (3, 3), (4, 4), (4, 3), (4, 4), (3, 4), (4, 4))
    cases = [Small(FORMAT, "uniform", seed=seed, tokens=each) for seed, each in enumerate(tokens, 1)]
    assert caught(cases, combine=False) is not None


@triton.jit
def the_flag_of_the_call_before(call, S: tl.constexpr):
    return call * 2 - 2


def test_a_flag_of_the_call_before_is_caught(monkeypatch):
    monkeypatch.setattr(receive, "flag_for", the_flag_of_the_call_before)
    cases = [dataclasses.replace(MANY[0], seed=seed) for seed in range(4)]
    slow = ("kernel[0]", "kernel[1]", "kernel[2]")
    assert caught(cases, combine=False, drain=0.01, speed=lambda n: 0.05 if n.endswith(slow) else 1.0) is not None


@pytest.mark.parametrize("slot", [-(2**31), -1, 5, 2**31 - 1])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_slot_that_cannot_be_is_an_error_and_stays_in_bounds(monkeypatch, layout, slot):
    monkeypatch.setenv("MOELINK_DEBUG", "1")
    setup = Setup("bf16", (("layout", layout),))
    ranks = apart(setup, 2)
    victim = ranks[0].ranks[0]
    case = Case(setup, "uniform", seed=1, small=True)
    pending = [t.dispatch(dispatch_requests(case, [r])) for r, t in enumerate(ranks)]
    assert ranks[1].ranks[0].control[DISPATCH_SENT] == 1 << CALL_SHIFT
    part = victim.workspace.message["token"]
    raw = victim.workspace.regions["messages"].view(victim.memory.local)[1, :, part.offset : part.end]
    raw.view(torch.int32)[:, 1] = slot
    for one in pending:
        one.wait()
    with pytest.raises(moelink.ProtocolError, match="rank 1 sent counts or indices that cannot be"):
        ranks[0].check()


def test_more_messages_than_tokens_are_an_error():
    """Some would never be looked for."""
    ranks = apart(BF16, 2)
    victim = ranks[0].ranks[0]
    pending = [t.dispatch(dispatch_requests(Case(BF16, "uniform", seed=1), [r])) for r, t in enumerate(ranks)]
    header = victim.workspace.regions["counts"].view(victim.memory.local)[1]
    messages, tokens = (int(word) & 0xFFFFFFFF for word in header[1:3])
    assert 1 < messages <= tokens
    header[2] -= tokens - 1
    for one in pending:
        one.wait()
    with pytest.raises(moelink.ProtocolError, match="rank 1 sent counts or indices that cannot be"):
        ranks[0].check()


def test_flags_of_other_calls_say_twice_their_number():
    """One token a program, and calls over a routing, use the same words."""
    assert message.flag_for.fn(7, dataclasses.replace(_spec(), EARLY=True)) == 14
    assert message.flag_for.fn(7, dataclasses.replace(_spec(), EARLY=False)) == 7


def _spec():
    config = FORMAT.config(2)
    return spec.dispatch_spec(
        Workspace(config), torch.device("cpu"), input_dtype=torch.bfloat16, quantized=False, weights=True
    )
