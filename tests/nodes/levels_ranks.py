"""What ranks do in the tests of two levels between nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import moelink
import moelink.epilogues
from moelink.testing import rank_data
from tests.support.cases import FORMATS, SCENARIOS, Case, Setup
from tests.support.fault_ranks import EXPIRY, refusals
from tests.support.patience import hurry, join, meet

PLAIN = {
    "num_experts": 8, "topk": 3, "hidden_size": 32, "max_tokens_per_rank": 2, "transport": "symmetric",
    "ranks_per_node": 2, "two_level": True,
}  # fmt: skip


OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"layout": "rank"},
    {"fused_shared_expert": True, "expert_alignment": 2},
    {"capacity": 5},
    {"layout": "masked"},
    {"combine_format": "mxfp8", "hidden_size": 96},
    {"layout": "rank", "global_ids": True, "combine_format": "fp8_block128", "hidden_size": 384},
    {"layout": "masked", "rows_per_expert": 128},
    {"capacity": 7, "expert_alignment": 3},
)


def cases_of(ranks: int) -> list[Case]:
    """Each format and each option, with ``ranks`` ranks a node."""
    cases = []
    for index, fmt in enumerate(FORMATS):
        options = {"ranks_per_node": ranks, **OPTIONS[index]}
        if "combine_format" in options:
            fmt = {"mxfp8": "mxfp8", "fp8_block128": "fp8_block128"}[str(options["combine_format"])]
        for i, weights in enumerate(("dispatch", "none")):
            scenario = SCENARIOS[(index + i) % len(SCENARIOS)]
            cases.append(Case(Setup(fmt, tuple(options.items())), scenario, weights, seed=index, small=True))
    return cases


def in_two_levels(case: Case) -> Case:
    """The case as the oracle sums it."""
    options = (*case.setup.options, ("transport", "symmetric"), ("two_level", True))
    return dataclasses.replace(case, setup=dataclasses.replace(case.setup, options=options))


def _data(rank: int, seed: int, tokens: int) -> Any:
    """Rows of small whole numbers, whose sums are exact in any order."""
    data = rank_data(
        seed=seed, rank=rank, num_tokens=tokens, hidden_size=PLAIN["hidden_size"], num_experts=PLAIN["num_experts"],
        topk=PLAIN["topk"],
    )  # fmt: skip
    return dataclasses.replace(data, x=(data.x * 4).round())


def every_way(rank: int, world_size: int, fields: dict[str, Any]) -> bool:
    """Calls of all kinds, each of which brings the rows three times: eager ones, of which the second takes the quick
    lane, halves, over a routing, on two lanes at once, with gradients, without tokens."""
    with moelink.init(**{**PLAIN, **fields}, lanes=2, timeout=60.0) as ep:
        for call, most in enumerate((2, 2, 0)):
            d = _data(rank, call, min(most, 1 + rank % 2))
            recv = ep.dispatch(d.x, d.topk_ids, max_tokens=max(most, 1))
            assert torch.equal(ep.combine(recv.tokens, recv), d.x * 3)
            first, second = ep.lane(0), ep.lane(1)
            pending = [first.dispatch_async(d.x, d.topk_ids), second.dispatch_async(d.x * 2, d.topk_ids)]
            recvs = [each.wait() for each in pending]
            recvs[1] = second.dispatch(d.x * 2, None, routing=recvs[1])
            halves = [first.combine_async(recvs[0].tokens, recvs[0]), second.combine_async(recvs[1].tokens, recvs[1])]
            assert [torch.equal(half.wait(), d.x * 3 * (i + 1)) for i, half in enumerate(halves)] == [True, True]
        _options(ep, d)
        x = d.x.clone().requires_grad_()
        weights = torch.full(d.topk_ids.shape, 0.5, requires_grad=True)
        recv = ep.dispatch(x, d.topk_ids, weights)
        ep.combine(recv.tokens * 2, recv).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 3.0))
        assert weights.grad is not None
        torch.testing.assert_close(
            weights.grad, (2 * d.x.float()).sum(1, keepdim=True).expand(-1, 3), rtol=0.05, atol=0.05
        )
        ep.check()
    return True


def _options(ep: moelink.Communicator, d: Any) -> None:
    """What else a call may be given; bound calls."""
    recv = ep.dispatch(d.x, d.topk_ids, host_counts=True)
    threes = d.x * 3
    assert torch.equal(ep.combine(recv.tokens, recv, shared=d.x), d.x * 4)
    bias = torch.ones(d.x.shape[1], dtype=ep.config.combine_dtype)
    assert torch.equal(ep.combine(recv.tokens, recv, epilogue=bias), (threes.float() + 1).to(threes.dtype))
    out = torch.empty_like(threes)
    assert ep.combine(recv.tokens, recv, epilogue=moelink.epilogues.residual(d.x, out), num_sms=2) is out
    assert torch.equal(out, d.x * 4)
    bound = ep.bind(d.x, d.topk_ids)
    for _ in range(2):
        recv = bound()
        home = bound.combine(recv.tokens)
        assert torch.equal(home(), threes)


def faults(rank: int, world_size: int, fields: dict[str, Any]) -> bool:
    """Refusals of either phase, other options, and at last a rank that does not call; then the others recover."""
    ep = join(**PLAIN)
    d = _data(rank, 3, 2)
    recv = refusals(ep, rank, d, {})
    with pytest.raises(moelink.ArgumentError, match="True with two_level=True"):
        ep.combine(recv.tokens, recv, reduce=False)
    assert torch.equal(ep.combine(recv.tokens, recv), d.x * 3)
    meet()
    if rank == 1:
        ep.close()
        return True
    hurry(ep, EXPIRY["nodes"])
    with pytest.raises(moelink.PeerTimeoutError) as told:
        ep.dispatch(d.x, d.topk_ids)
    assert told.value.peer == 1
    new = ep.recover([0, 2, 3])
    assert (new.config.ranks_per_node, new.config.two_level) == (None, False)
    recv = new.dispatch(d.x, d.topk_ids)
    assert torch.equal(new.combine(recv.tokens, recv), d.x * 3)
    new.close()
    return True
