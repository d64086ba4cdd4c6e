"""Bytes of a plan: against what transports count, token by token, and against the memory that moelink reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from moelink.errors import ConfigError
from moelink.memory.workspace import Workspace
from moelink.routing import ExpertMap
from moelink.testing import run_ranks
from moelink.tools.plan import Layer, make_plan, parse_ranks
from moelink.tools.plan.report import Memory
from moelink.tools.plan.routing import Statistics, Trace, Uniform
from moelink.tools.plan.traffic import COPIES, PHASES, LinkBytes, Units, link_bytes, nodes_of
from moelink.transports.base import CombineRequest, DispatchRequest
from tests.plan.plan_ranks import send_and_return
from tests.support.symmetric_ranks import one_process

RANKS = 4


def fields_of(layer: Layer) -> dict[str, Any]:
    return {
        "num_experts": layer.num_experts, "topk": layer.topk, "hidden_size": layer.hidden_size,
        "max_tokens_per_rank": layer.tokens, "dispatch_format": layer.dispatch_format, "transport": layer.transport,
    }  # fmt: skip


def ids_of(layer: Layer, seed: int = 0) -> np.ndarray:
    """Uneven routing with holes."""
    rng = np.random.default_rng(seed)
    scores = rng.gumbel(size=(layer.tokens, layer.num_experts)) - 0.1 * np.arange(layer.num_experts)
    ids = np.argsort(-scores, axis=1)[:, : layer.topk]
    ids[rng.random(ids.shape) < 0.1] = -1
    return ids


def planned(layer: Layer, ids: np.ndarray) -> dict[str, LinkBytes]:
    """What a plan says when every rank has these tokens: then expectations are what happens."""
    (size,) = make_plan(layer, [RANKS], ranks_per_node=8, routing=Trace(ids)).sizes
    return {phase: size.schemes["rank"][phase].links for phase in PHASES}


@pytest.mark.parametrize(("experts", "fmt"), [(10, "fp8_block128"), (3, "bf16")])
def test_bytes_are_those_the_collective_transport_counts(experts: int, fmt: str) -> None:
    layer = Layer(
        num_experts=experts, topk=3, hidden_size=384, tokens=37, dispatch_format=fmt, transport="collective"
    )  # fmt: skip
    ids = ids_of(layer)
    counted = run_ranks(send_and_return, RANKS, fields_of(layer), ids)
    links, units = planned(layer, ids), Units.of(layer, layer.ep_config(RANKS))
    assert links["dispatch"].total_nvlink == pytest.approx(sum(entry[0] for entry in counted))
    assert links["combine"].total_nvlink == pytest.approx(sum(entry[1] for entry in counted))
    into = [messages for _, _, messages in counted]
    for phase, index, each in (("dispatch", 0, units.message), ("combine", 1, units.home)):
        # Messages come where rows leave, so `into` is the other direction of dispatch's bytes as well as of combine's.
        messages = [max(entry[0] // units.message, arrived) for entry, arrived in zip(counted, into, strict=True)]
        assert links[phase].nvlink == pytest.approx(max(messages) * each)
        assert counted[0][index] % each == 0
        assert links[phase].network == links[phase].total_network == 0


def test_bytes_are_those_the_symmetric_transport_counts() -> None:
    layer = Layer(num_experts=6, topk=2, hidden_size=64, tokens=5, dispatch_format="bf16")
    ids = ids_of(layer)
    fields = fields_of(layer) | {"combine_dtype": torch.bfloat16}
    transport = one_process(fields, RANKS)
    x, topk_ids = torch.randn(5, 64).bfloat16(), torch.from_numpy(ids).int()
    requests = [DispatchRequest(x, topk_ids, torch.ones(ids.shape)) for _ in range(RANKS)]
    recvs = transport.dispatch(requests).wait()
    transport.combine([CombineRequest(recv.tokens, recv) for recv in recvs]).wait()
    traffic, links = transport.traffic(), planned(layer, ids)
    transport.close()
    assert links["dispatch"].total_nvlink == pytest.approx(traffic.dispatch)
    assert links["combine"].total_nvlink == pytest.approx(traffic.combine)


def walked(ids: np.ndarray, experts: ExpertMap, nodes: int, copies: str) -> dict[str, np.ndarray]:
    """Messages [ranks] by link and direction when every rank sends ``ids``, one token after the other."""
    ranks = experts.world_size
    size = ranks // nodes
    counts = {name: np.zeros(ranks, dtype=int) for name in ("nvlink out", "nvlink in", "network out", "network in")}

    def move(source: int, target: int) -> None:
        if source != target:
            link = "nvlink" if source // size == target // size else "network"
            counts[f"{link} out"][source] += 1
            counts[f"{link} in"][target] += 1

    for source in range(ranks):
        for row in ids:
            owners = {int(experts.owner(torch.tensor(int(e)))) for e in row if e >= 0}
            if copies == "rank":
                for target in owners:
                    move(source, target)
                continue
            for node in {target // size for target in owners}:
                landing = source if node == source // size else node * size + source % size
                move(source, landing)
                for target in owners:
                    if target // size == node:
                        move(landing, target)
    return counts


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize(("ranks", "nodes", "experts"), [(4, 2, 10), (6, 2, 5), (6, 3, 13), (4, 4, 9), (3, 1, 7)])
def test_bytes_by_link_against_walking_every_token(copies: str, ranks: int, nodes: int, experts: int) -> None:
    layer = Layer(num_experts=experts, topk=5, hidden_size=128, tokens=11, combine_format="fp8_block128")
    ids = ids_of(layer, seed=ranks)
    statistics = Statistics.of(Trace(ids), num_experts=experts, ranks=ranks, nodes=nodes)
    units = Units.of(layer, layer.ep_config(ranks))
    assert units.relay > units.message
    counts = walked(ids, ExpertMap(experts, ranks), nodes, copies)
    for phase, each in (("dispatch", units.message), ("combine", units.home)):
        links = link_bytes(phase, copies, units, statistics, layer.tokens)
        assert links.nvlink == pytest.approx(each * max(counts["nvlink out"].max(), counts["nvlink in"].max()))
        far = units.relay if phase == "dispatch" and copies == "node" else each
        assert links.network == pytest.approx(far * max(counts["network out"].max(), counts["network in"].max()))
        assert links.total_nvlink == pytest.approx(each * counts["nvlink out"].sum())
        assert links.total_network == pytest.approx(far * counts["network out"].sum())


def test_memory_traffic_by_hand() -> None:
    layer = Layer(num_experts=2, topk=1, hidden_size=128, tokens=10, dispatch_format="bf16", transport="collective")
    ids = np.zeros((10, 1), dtype=int)  # everything to rank 0
    links = planned_on(layer, ids, ranks=2)
    units = Units.of(layer, layer.ep_config(2))
    assert (units.activation, units.row, units.output) == (256, 256, 256)
    assert links["dispatch"].memory == 10 * 256 + 20 * units.message + 20 * 256
    assert links["combine"].memory == 20 * 256 + 10 * units.home + 10 * 256


def planned_on(layer: Layer, ids: np.ndarray, *, ranks: int) -> dict[str, LinkBytes]:
    (size,) = make_plan(layer, [ranks], ranks_per_node=8, routing=Trace(ids)).sizes
    return {phase: size.schemes["rank"][phase].links for phase in PHASES}


def test_how_far_the_busiest_link_fluctuates_above_its_expectation() -> None:
    """What the docstring of ``plan.traffic`` says of 8 ranks with 128 tokens of top-8."""
    rng = np.random.default_rng(0)
    ranks, tokens, busiest = 8, 128, []
    for _ in range(60):
        ids = np.argsort(rng.random((ranks, tokens, 256)), axis=2)[:, :, :8] // 32
        sent = np.array([[(ids[s] == d).any(1).sum() * (s != d) for d in range(ranks)] for s in range(ranks)])
        busiest.append(max(sent.sum(0).max(), sent.sum(1).max()))
    statistics = Statistics.of(Uniform(256, 8), num_experts=256, ranks=ranks, nodes=1)
    expected = tokens * (statistics.rank_hits.sum() - statistics.rank_hits[0])
    assert 1.03 < np.mean(busiest) / expected < 1.05


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("ranks", [1, 2, 8, 48, 512])
def test_memory_is_what_moelink_reports(ranks: int) -> None:
    layer = Layer(num_experts=256, topk=8, hidden_size=7168, tokens=128)
    config = layer.ep_config(ranks)
    memory, report = Memory.of(config), config.memory_report()
    assert memory.collective == report.total
    assert memory.symmetric == Workspace(config).nbytes + report.outputs
    capped = Layer(num_experts=256, topk=8, hidden_size=7168, tokens=128, capacity=100)
    assert Memory.of(capped.ep_config(ranks)).outputs < memory.outputs


def test_memory_of_several_nodes_has_their_send_buffers() -> None:
    layer = Layer(num_experts=256, topk=8, hidden_size=7168, tokens=128)
    one, two = (
        make_plan(layer, [16], ranks_per_node=ranks, routing=Uniform(256, 8)).sizes[0].memory for ranks in (16, 8)
    )
    workspace = Workspace(layer.ep_config(16, ranks_per_node=8))
    staged = sum(region.nbytes for region in workspace.regions if region.name.startswith("staged"))
    small = Workspace(layer.ep_config(16)).regions["lamport_slots"].nbytes  # of one node only
    assert two.block == workspace.nbytes
    assert staged < two.block - one.block + small < 1.01 * staged
    assert two.staging == one.staging
    assert one.two_levels is None
    levels = dataclasses.replace(layer.ep_config(16, ranks_per_node=8), two_level=True)
    assert two.block_of_levels == Workspace(levels).nbytes != two.block
    assert two.two_levels == Workspace(levels).nbytes + two.outputs


def test_ranges() -> None:
    assert parse_ranks("8..2048") == (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    assert parse_ranks("3") == (3,)
    assert parse_ranks("2, 4, 8..16, 8, 24") == (2, 4, 8, 16, 24)


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("text", ["", "8..", "eight", "0", "0..8", "16..8", "8..100", "8...16", "-8", "8,,16"])
def test_bad_ranges_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ranks: expected"):
        parse_ranks(text)


def test_a_range_that_misses_its_end_says_which_do_not() -> None:
    with pytest.raises(ConfigError, match=r"such as 8\.\.64 or 8\.\.128, got '8\.\.100'"):
        parse_ranks("8..100")


def test_uneven_sizes_are_refused_before_anything_is_computed() -> None:
    assert [nodes_of(ranks, 8) for ranks in (1, 4, 8, 24)] == [1, 1, 1, 3]
    layer = Layer(num_experts=16, topk=2, hidden_size=128, tokens=4)
    with pytest.raises(ConfigError, match="a multiple of ranks_per_node = 8, or fewer than that, got 12"):
        make_plan(layer, [8, 12], ranks_per_node=8, routing=Uniform(16, 2))


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topk": 17}, "topk: expected at most num_experts = 16"),
        ({"hidden_size": 100}, "hidden_size: expected a multiple of 128"),
        ({"dispatch_format": "fp3"}, "dispatch_format"),
        ({"tokens": 0}, "tokens: expected at least 1"),
        ({"transport": "auto"}, "transport: expected 'symmetric' or 'collective'"),
    ],
)
def test_bad_layers_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Layer(**{"num_experts": 16, "topk": 2, "hidden_size": 128, "tokens": 4, **changes})


def test_experts_that_do_not_divide_and_ranks_without_any() -> None:
    layer = Layer(num_experts=20, topk=2, hidden_size=128, tokens=4)
    sizes = make_plan(layer, [8, 32], ranks_per_node=8, routing=Uniform(20, 2)).sizes
    assert [(size.experts, size.idle_ranks) for size in sizes] == [(3, 0), (1, 12)]
    assert sizes[1].statistics.ranks_per_token == pytest.approx(2)


def test_quantised_bytes_of_both_phases() -> None:
    """A sender brings its tokens into the format once; an expert's rank every row that goes home."""
    layer = Layer(num_experts=8, topk=2, hidden_size=256, tokens=10, combine_format="mxfp8")
    statistics = Statistics.of(Uniform(8, 2), num_experts=8, ranks=4, nodes=1)
    units = Units.of(layer, layer.ep_config(4))
    dispatch, combine = (link_bytes(phase, "rank", units, statistics, 10) for phase in PHASES)
    assert dispatch.quantised == 10 * 512
    assert combine.quantised == pytest.approx(10 * 4 * statistics.rank_hits[0] * 512)
    plain = Layer(num_experts=8, topk=2, hidden_size=256, tokens=10, dispatch_format="bf16")
    assert Units.of(plain, plain.ep_config(4)).quantised == Units.of(plain, plain.ep_config(4)).quantised_home == 0


def test_the_collective_transport_has_one_level() -> None:
    layer = Layer(num_experts=16, topk=2, hidden_size=128, tokens=4, transport="collective")
    (size,) = make_plan(layer, [8], ranks_per_node=4, routing=Uniform(16, 2)).sizes
    assert list(size.schemes) == ["rank"]
    assert size.auto == "rank"
