"""The choice between one level and two: copies by hand, the ratios that docs/ name, and what "auto" decides by."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from moelink import levels
from moelink.levels import ASSUMED, Rates, Routes, crossing, hit_probability, prefers_two_levels
from moelink.memory.workspace import Workspace
from moelink.tools.plan import Constants, Layer, make_plan
from moelink.tools.plan.model import PhaseConstants
from moelink.tools.plan.report import chosen_copies
from moelink.tools.plan.routing import Uniform
from moelink.tools.plan.traffic import PHASES

FORMATS = [("fp8_block128", None), ("fp8_block128", "fp8_block128"), ("bf16", None)]


def deepseek(tokens: int = 128, fmt: str = "fp8_block128", home: str | None = None, **changes: int) -> Layer:
    fields = {"num_experts": 256, "topk": 8, "hidden_size": 7168, **changes}
    return Layer(**fields, tokens=tokens, dispatch_format=fmt, combine_format=home)


def test_copies_by_hand() -> None:
    """4 ranks on 2 nodes; a token goes to ranks 0 to 3 with 1, 0.5, 0.25, 0.25, and to the nodes with 1 and 0.4."""
    hits, nodes = (1.0, 0.5, 0.25, 0.25), (1.0, 0.4)
    one, two = (crossing(hits, nodes, two_level=both) for both in (False, True))
    assert (one.nvlink, one.network) == (1.0, 2.0)  # into rank 0: of its neighbour, of two ranks of the other node
    assert (one.total_nvlink, one.total_network) == (1.5 + 0.5, 2 * 0.5 + 2 * 1.5)
    assert (two.nvlink, two.network) == (2.0, 1.0)  # rank 1 stores tokens of two ranks in rank 0
    assert two.total_nvlink == 2 * one.total_nvlink
    assert two.total_network == pytest.approx(2 * 0.4 + 2 * 1.0)


def test_one_node_and_nodes_of_one_rank() -> None:
    same = [crossing((0.5, 0.5, 0.5), (0.8,), two_level=both) for both in (False, True)]
    assert same[0] == same[1]
    assert (same[0].network, same[0].total_network) == (0, 0)
    alone = crossing((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), two_level=True)
    assert (alone.nvlink, alone.total_nvlink) == (0, 0)
    assert alone.network == pytest.approx(1.0)


def test_probabilities_are_counted() -> None:
    assert doctest.testmod(levels).failed == 0
    draws = np.argsort(np.random.default_rng(0).random((20000, 20)), axis=1)[:, :4]
    assert hit_probability(20, 4, 6) == pytest.approx((draws < 6).any(1).mean(), abs=0.01)
    assert [hit_probability(8, 2, owned) for owned in (0, 8)] == [0, 1]


@pytest.mark.parametrize(("fmt", "home"), FORMATS)
@pytest.mark.parametrize(("nodes", "times"), [(2, 3.3), (8, 1.4)])
def test_two_levels_send_so_many_times_fewer_network_bytes(
    fmt: str, home: str | None, nodes: int, times: float
) -> None:
    """Two nodes of eight 3.3 times, eight nodes 1.4 times: dispatch and combine together."""
    (size,) = make_plan(deepseek(fmt=fmt, home=home), [8 * nodes], ranks_per_node=8, routing=Uniform(256, 8)).sizes
    one, two = (sum(size.schemes[copies][phase].links.network for phase in PHASES) for copies in ("rank", "node"))
    assert one / two == pytest.approx(times, abs=0.06)
    load = [crossing(size.statistics.rank_hits, size.statistics.node_hits, two_level=both) for both in (False, True)]
    copies = load[0].network / load[1].network
    assert round(copies, 1) == times
    assert 1 < one / two < copies < 1.04 * one / two, "relays are a little longer than messages"


@pytest.mark.parametrize(("ranks", "per_node", "experts"), [(16, 8, 256), (12, 4, 50), (6, 3, 4)])
def test_auto_counts_as_the_plan_does(ranks: int, per_node: int, experts: int) -> None:
    layer = deepseek(tokens=64, num_experts=experts, topk=4)
    routes = Routes.uniform(num_experts=experts, topk=4, tokens=64, ranks=ranks, per_node=per_node)
    (size,) = make_plan(layer, [ranks], ranks_per_node=per_node, routing=Uniform(experts, 4)).sizes
    assert routes.rank_hits == pytest.approx(size.statistics.rank_hits.tolist())
    assert routes.node_hits == pytest.approx(size.statistics.node_hits.tolist())
    space = Workspace(layer.ep_config(ranks, ranks_per_node=per_node))
    for two_level, copies in ((False, "rank"), (True, "node")):
        far = space.relay_bytes if two_level else space.message_bytes
        links = size.schemes[copies]["dispatch"].links
        expected = ASSUMED.microseconds(links.nvlink, links.network) + two_level * ASSUMED.forward_us
        found = routes.microseconds(two_level=two_level, near=space.message_bytes, far=far)
        assert found == pytest.approx(expected)


def test_auto_is_what_a_plan_with_the_same_rates_finds_faster() -> None:
    """The rates of levels.ASSUMED and nothing else: then the faster one of the plan's pairs is that of "auto"."""
    rates = PhaseConstants(0.0, 0.0, ASSUMED.nvlink_gb_per_s, ASSUMED.network_gb_per_s)
    chosen = set()
    for tokens in (1, 8, 32, 128, 4096):
        plan = make_plan(
            deepseek(tokens), [16, 64, 256, 1024], ranks_per_node=8, routing=Uniform(256, 8),
            constants=Constants(dict.fromkeys(PHASES, rates)),
        )  # fmt: skip
        for size in plan.sizes:
            pairs = {
                copies: math.fsum(phase.time.total_us or 0.0 for phase in phases.values())
                for copies, phases in size.schemes.items()
            }
            assert size.auto == ("node" if pairs["node"] < pairs["rank"] else "rank"), (tokens, size.ranks)
            chosen.add(size.auto)
    assert chosen == {"rank", "node"}


def test_auto_needs_what_two_levels_need() -> None:
    layer = deepseek(4096)
    assert chosen_copies(layer.ep_config(16, ranks_per_node=8)) == "node"
    assert chosen_copies(layer.ep_config(16)) == "rank", "one node"
    assert chosen_copies(layer.ep_config(16, ranks_per_node=1)) == "rank", "nobody to forward to"


def test_slower_forwarding_or_a_faster_network_keep_one_level() -> None:
    routes = Routes.uniform(num_experts=256, topk=8, tokens=128, ranks=16, per_node=8)
    sizes = {"message": 7552, "relay": 7680, "row": 14336}
    assert prefers_two_levels(routes, **sizes)
    assert not prefers_two_levels(routes, **sizes, rates=Rates(350.0, 50.0, 200.0))
    assert not prefers_two_levels(routes, **sizes, rates=Rates(350.0, 350.0, 8.0))
