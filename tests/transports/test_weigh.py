"""``combine(weigh=False)``: weights travel, the experts multiply by them, and combine sums what it gets."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import moelink
import moelink.memory.workspace as workspaces
from moelink.testing import assert_bitwise_equal, rank_data, run_ranks
from tests.ops.gradients import Case as GradientCase
from tests.ops.op_layers import IDS, H, T, one_rank
from tests.ops.test_autograd import check_all
from tests.support.mismatches import no_host_ends_it

SETUP: dict[str, Any] = {"num_experts": 6, "topk": 2, "hidden_size": 16, "max_tokens_per_rank": 3, "timeout": 60}
TRANSPORTS = pytest.mark.parametrize("transport", ["collective", "symmetric"])


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("pre_reduce", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_where_nothing_travels_it_changes_nothing(pre_reduce: bool, weights: bool) -> None:
    given = torch.rand(T, 2)
    with one_rank(pre_reduce=pre_reduce) as ep:
        x = torch.randn(T, H).bfloat16()
        recv = ep.dispatch(x, IDS, given if weights else None)
        plain = ep.dispatch(x, IDS)
        want = ep.combine(plain.tokens, plain)
        assert_bitwise_equal(ep.combine(recv.tokens, recv, weigh=False), want)
        assert_bitwise_equal(ep.combine_async(recv.tokens, recv, weigh=False).wait(), want)


def differing(rank: int, world_size: int, transport: str, most: int) -> bool:
    """Rank 1 leaves the weights to its experts, the others do not; what comes after is right."""
    with (
        mock.patch.object(workspaces, "LAMPORT_BYTES", most),
        moelink.init(**SETUP, transport=transport) as ep,
    ):
        d = rank_data(seed=3, rank=rank, num_tokens=3, hidden_size=16, num_experts=6, topk=2)
        for _ in range(1 if most else 2):
            recv = ep.dispatch(d.x, d.topk_ids, d.topk_weights)
            words = "rank 1 calls combine .* with other options .* router weights .* as on most ranks, got sums of rows"
            with no_host_ends_it(), pytest.raises(moelink.ProtocolError, match=words):
                ep.combine(recv.tokens, recv, weigh=rank != 1)
            assert_bitwise_equal(ep.combine(recv.tokens, recv, weigh=False), (d.x.float() * 2).bfloat16())
            # Without weights there is nothing to differ in.
            recv = ep.dispatch(d.x, d.topk_ids)
            assert_bitwise_equal(ep.combine(recv.tokens, recv, weigh=rank != 1), (d.x.float() * 2).bfloat16())
    return True


@pytest.mark.quick("sums with flags, sums without, and headers tell it in ways of their own")
@pytest.mark.parametrize("transport, most", [("collective", 0), ("symmetric", 1 << 25), ("symmetric", 0)])
def test_ranks_that_differ_are_named(transport: str, most: int) -> None:
    assert run_ranks(differing, 3, transport, most, timeout=200) == [True] * 3


def test_bad_values_are_refused() -> None:
    with one_rank(pre_reduce=False) as ep:
        recv = ep.dispatch(torch.randn(T, H).bfloat16(), IDS)
        for y in (recv.tokens, recv.tokens.clone().requires_grad_()):
            with pytest.raises(moelink.ArgumentError, match="weigh: expected True or False, got a int"):
                ep.combine(y, recv, weigh=0)  # type: ignore[arg-type]
            with pytest.raises(moelink.ArgumentError, match="weigh: expected True with topk_weights"):
                ep.combine(y, recv, torch.ones(T, 2), weigh=False)
        assert ep.combine(recv.tokens, recv).shape == (T, H)


def test_the_gradient_of_weights_is_that_of_their_own_use() -> None:
    cases = [
        GradientCase(weights="left", scenario="one_rank_empty", lazy=True, frozen=True),
        GradientCase(weights="left", split=True, added="shared"),
    ]
    check_all(cases, 2, {"transport": "collective"})


def test_it_compiles() -> None:
    torch._dynamo.reset()
    with one_rank() as ep:

        def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            recv = ep.dispatch(x, IDS, weights)
            assert recv.weights is not None
            return ep.combine((recv.tokens * recv.weights[:, None]).bfloat16(), recv, weigh=False)

        results = []
        for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            torch.manual_seed(0)
            x, weights = torch.randn(T, H).bfloat16().requires_grad_(), torch.rand(T, 2, requires_grad=True)
            out = run(x, weights)
            out.float().square().sum().backward()
            results.append((out.detach(), x.grad, weights.grad))
        for eager, compiled in zip(*results, strict=True):
            assert_bitwise_equal(compiled, eager)
        want = results[0][0].float()
        assert torch.allclose(want, (x.detach().float() * weights.detach().sum(1)[:, None]), atol=0.05, rtol=0.02)
