"""Experts outlive their ranks: host copies and replicas give the survivors of real kills every weight, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import moelink
from moelink.errors import ArgumentError, ConfigError
from moelink.nn import MoE, Placement, RestoredExperts, refresh_host_copies
from moelink.nn.host_copies import keepers
from moelink.routing import ExpertMap
from moelink.testing import assert_bitwise_equal, run_ranks
from tests.nn import survival_ranks
from tests.nn.survival_ranks import EXPERTS, INNER, SIZES, tokens, whole


@pytest.mark.parametrize(
    "kind, transport, victims",
    [
        ("quantised", "collective", (1,)),
        ("mxfp4", "collective", (1,)),
        ("bf16", "collective", (0, 2)),
        ("fused shared expert", "symmetric", (2,)),
        ("fp32", "symmetric", (0,)),
    ],
)
def test_survivors_of_a_kill_have_all_weights(
    tmp_path: Path, kind: str, transport: str, victims: tuple[int, ...]
) -> None:
    said = run_ranks(survival_ranks.survive, 3, kind, transport, str(tmp_path), victims, mortal=victims)
    expected, left = whole(kind), 3 - len(victims)
    shared = int("shared" in kind)
    for rounds, rank, weights in (each for each in said if each is not None):
        for report, right in rounds:
            assert all(right)
            assert {layer.name for layer in report} == {"a", "b"}
            assert all(layer.copied and layer.refresh and not layer.missing for layer in report)
        first, owned = ExpertMap(EXPERTS, left).first(rank), ExpertMap(EXPERTS, left).num_local(rank)
        for name, (got, all_of_them) in enumerate(zip(weights, expected, strict=True)):
            assert_bitwise_equal(got[shared:], all_of_them[shared + first : shared + first + owned], f"tensor {name}")
            assert_bitwise_equal(got[:shared], all_of_them[:shared], f"tensor {name}, shared")


def test_replicas_survive_without_host_copies_and_lost_experts_are_named(tmp_path: Path) -> None:
    reports, right, placed, words, partly, nan = run_ranks(
        survival_ranks.replicas_alone, 3, str(tmp_path), mortal={1, 2}
    )[0]
    assert all(right)
    assert all(layer.copied == 0 and layer.moved and not layer.missing for layer in reports)
    lost = sorted(set(range(EXPERTS)) - set(placed[:4]))
    assert lost
    assert f"got none of experts {lost} of a" in words
    assert "allow_missing=True" in words
    assert partly[0].missing == tuple(lost)
    assert nan == [sum(expert in lost for expert in placed)] * 2


def test_a_new_process_gets_its_experts_where_they_are() -> None:
    said = run_ranks(survival_ranks.admitted, 2)
    assert said[0] == said[1]
    # Rank 1 has experts 3 and 4, of which rank 0 keeps copies, and a replica of 0.
    a = said[0][0]
    assert (a.name, a.stayed, a.moved, a.copied, a.missing, a.refresh) == ("a", 3, 1, 2, (), 1)
    assert a.nbytes > 0


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_a_process_in_the_place_of_a_masked_rank_gets_its_experts(transport: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = run_ranks(survival_ranks.masked_and_admitted, 4, store.port, transport, mortal={1})
    assert said[1] is None
    expected = whole("bf16")
    for rank, (reports, right, weights) in ((0, said[0]), (1, said[3]), (2, said[2])):
        assert right
        assert all(layer.copied and not layer.missing for layer in reports)
        first, owned = ExpertMap(EXPERTS, 3).first(rank), ExpertMap(EXPERTS, 3).num_local(rank)
        for got, all_of_them in zip(weights, expected, strict=True):
            assert_bitwise_equal(got.view(torch.uint8), all_of_them[first : first + owned])


def test_gradients_after_a_death_are_those_of_one_rank(tmp_path: Path) -> None:
    said = run_ranks(survival_ranks.trained, 3, str(tmp_path), mortal={0})
    with moelink.init(**survival_ranks.sizes_of("fp32", max_tokens_per_rank=12), device="cpu") as ep:
        layer = MoE(ep, intermediate_size=INNER, seed=1)
        survival_ranks.gradients(layer, torch.cat([tokens(1), tokens(2)]))
        for first, down, router in said[1:]:
            torch.testing.assert_close(down, layer.experts.down_proj.grad[first : first + len(down)])
            torch.testing.assert_close(router, layer.router.weight.grad)


def test_copies_are_on_ranks_that_do_not_own_the_expert() -> None:
    placement = Placement((0, 1, 2, 3, 0, 4, 5, 1))  # two of each of four ranks
    assert list(keepers(placement, 4, 1)) == [(0, 0, 1), (1, 0, 1), (2, 1, 2), (3, 1, 2), (4, 2, 3), (5, 3, 0)]
    by_expert: dict[int, set[int]] = {}
    for expert, source, keeper in keepers(placement, 4, 3):
        by_expert.setdefault(expert, set()).add(keeper)
        assert source != keeper
    assert by_expert[0] == {1, 3}  # ranks 0 and 2 own it
    assert by_expert[2] == {0, 2, 3}


@pytest.mark.quick("milliseconds")
def test_bad_arguments_are_refused() -> None:
    with moelink.init(**SIZES, device="cpu") as ep:
        for wrong in (1, -1, True, "1"):
            with pytest.raises(ConfigError, match=r"host_copies: expected an integer in \[0, 1\), as only other"):
                MoE(ep, intermediate_size=32, host_copies=wrong)  # type: ignore[arg-type]
        layer = MoE(ep, intermediate_size=32)
        with pytest.raises(ArgumentError, match="model: expected moelink.nn.MoE layers made with host_copies >= 1"):
            refresh_host_copies(layer)
        with moelink.init(**{**SIZES, "topk": 1}, device="cpu") as other:
            with pytest.raises(ArgumentError, match="ep: expected a communicator as moe was made for.*'topk': 1"):
                moelink.nn.restore_experts(layer, other)
            with pytest.raises(ArgumentError, match="model: expected layers of moelink.nn.MoE, got Linear"):
                moelink.nn.restore_experts(torch.nn.Linear(1, 1), other)
        with pytest.raises(ArgumentError, match="max_bytes: expected a positive number"):
            moelink.nn.restore_experts(layer, ep, max_bytes=0)
        pending = ep.dispatch_async(torch.ones(1, 128).bfloat16(), torch.tensor([[0, 1]]))
        with pytest.raises(moelink.PendingError, match="dispatch: expected no pending dispatch"):
            moelink.nn.restore_experts(layer, ep)
        pending.wait()
        (report,) = moelink.nn.restore_experts(layer, ep)
        assert report == RestoredExperts("moe", EXPERTS, 0, 0, (), 0, 0)
