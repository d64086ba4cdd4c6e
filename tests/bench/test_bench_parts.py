"""The parts of the bench, by hand-computed numbers and by contenders that only note how they are called."""

import dataclasses
import os
from typing import get_args
from unittest import mock

import pytest
import torch

import moelink
from moelink.errors import ConfigError
from moelink.tools.results import COLLECTIVE, SYMMETRIC
from moelink_bench import PRESETS, Case, Settings, make_plan, names
from moelink_bench.ceiling import CeilingSamples, ceiling_of
from moelink_bench.contenders import compile_calls, expert_factor, open_communicator, row_factors
from moelink_bench.layer.plan import LAYER_PRESETS, SHAPES
from moelink_bench.measure import PhaseSamples
from moelink_bench.peers import group_of_expert
from moelink_bench.report import CaseResult, PhaseResult, Row, figure_of, judge, phase_result
from moelink_bench.timing import Figure, kernel_times_of, short_name, slowest_rank
from moelink_bench.workload import (
    WireBytes,
    combine_row_bytes,
    count_messages,
    dispatch_message_bytes,
    draw_ids,
    num_copies,
    output_rows,
    rank_batch,
    rank_ids,
    rows_needed,
    wire_bytes,
)

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")

SMALL = Case(tokens=4, hidden_size=64, num_experts=6, topk=2, format="bf16")
CPU = torch.device("cpu")


def test_expert_factors() -> None:
    assert expert_factor(torch.arange(4)).tolist() == [0.5, -1.0, 2.0, -0.5]


def test_bytes_on_the_wire_by_hand() -> None:
    case = Case(tokens=2, hidden_size=7168, num_experts=4, topk=2)
    assert count_messages(torch.tensor([[0, 1], [1, 2], [3, 3]]), case, 2) == [2, 2]
    assert dispatch_message_bytes(case, 2) == 7168 + 224 + 16 + 16 + 16  # payload, scales, token, ids, weights
    assert combine_row_bytes(case, 2) == 14336
    bf16 = dataclasses.replace(case, format="bf16", topk=3)
    assert dispatch_message_bytes(bf16, 2) == 14336 + 16 + 16 + 16
    assert wire_bytes([[[5, 3]], [[4, 9]]], 10) == WireBytes(70.0, 40.0, 10)
    # All three ranks send 2 messages to rank 0: its way in is the busiest. The second input moves nothing.
    skewed = [[[2, 0, 0], [1, 0, 0]], [[2, 0, 0], [0, 1, 0]], [[2, 0, 0], [0, 0, 1]]]
    assert wire_bytes(skewed, 100) == WireBytes(200.0, 200.0, 100)
    assert wire_bytes([[[7]]], 100) == WireBytes(0.0, 0.0, 100)
    assert WireBytes(0.0, 3.44e6, 1).microseconds(344.0) == pytest.approx(10.0)


def test_figures_are_of_the_slowest_rank() -> None:
    figure = slowest_rank([[10, 20, 30], [12, 18, 60]])
    assert figure == Figure(median=20.0, p20=pytest.approx(15.2), p80=pytest.approx(44.0), skew=2.0, samples=3)
    assert slowest_rank([[7.0]]) == Figure(7.0, 7.0, 7.0, 0.0, 1)
    for bad in ([], [[], []], [[1.0], [1.0, 2.0]]):
        with pytest.raises(ValueError, match="same number of samples"):
            slowest_rank(bad)
    assert figure_of([[1.0, 3.0], []]) is None
    assert figure_of([[1.0, 3.0], [4.0]]) == Figure(4.0, 4.0, 4.0, 2.0, 1)


def test_kernel_names_are_short() -> None:
    assert short_name("void at::native::fill<int, 4>(long, F)") == "at::native::fill"
    assert short_name("ep_fused_dispatch_kernel") == "ep_fused_dispatch_kernel"


def test_kernel_times_are_per_call() -> None:
    spans = [(0.0, 1.0, "ep_a"), (2.0, 2.0, "ep_b"), (5.0, 3.0, "ep_a"), (9.0, 4.0, "ep_b")]
    assert kernel_times_of([], calls=2) is None
    found = kernel_times_of(spans, calls=2)
    assert found is not None
    assert (found.microseconds, found.names) == ([3.0, 7.0], ("ep_a", "ep_b"))
    uneven = kernel_times_of(spans, calls=3)
    assert uneven is not None
    assert uneven.microseconds == [pytest.approx(10 / 3)]


def test_the_ceiling_is_that_of_the_best_variant() -> None:
    fast, slow = (10.0, 11.0, 10.0), (20.0, 20.0, 20.0)
    ceiling = ceiling_of([CeilingSamples(3_000_000, (slow, fast)), CeilingSamples(3_000_000, (slow, slow))], "cuda")
    assert ceiling.gb_per_s == pytest.approx(150.0)
    other = ceiling_of([CeilingSamples(3_000_000, (slow, fast))] * 2, "cuda")
    assert other.gb_per_s == pytest.approx(300.0)
    assert other.by_rank == (pytest.approx(300.0), pytest.approx(300.0))
    none = ceiling_of([CeilingSamples(0, (), "one rank has no link")], "cpu")
    assert (none.gb_per_s, none.reason) == (None, "one rank has no link")


def make_row(
    contender: str, *, graph: float | None = None, pairs: float | None = None, eager: float | None = None
) -> Row:
    figures = [None if value is None else Figure(value, value, value, 0.0, 3) for value in (graph, pairs, eager)]
    return Row(0, contender, "", "", {"dispatch": PhaseResult(*figures, None, (), None, "")})


def case_result(tokens: int, busiest: float, **changes: object) -> CaseResult:
    wire = WireBytes(2 * busiest, busiest, 1)
    return CaseResult(0, Case(tokens=tokens, **changes), 3, 100, wire, wire, 100.0)


def test_verdicts() -> None:
    case = case_result(4096, 4e6)  # 40 us at 100 GB/s, so 52 us are allowed
    rows = [
        make_row(COLLECTIVE, eager=500.0),
        make_row("peer", graph=51.0, eager=60.0),
        Row(0, "absent", "", "not installed", {}),
        make_row(SYMMETRIC, graph=50.0, eager=70.0),
    ]
    (verdict,) = judge([case], rows)
    assert [(duel.contender, duel.method, duel.faster) for duel in verdict.duels] == [
        (COLLECTIVE, "eager", True), ("peer", "graph", True),
    ]  # fmt: skip
    assert (verdict.faster, verdict.within_wire) == (True, True)
    assert (verdict.wire_us, verdict.allowed_us) == (pytest.approx(40.0), pytest.approx(52.0))
    rows[-1] = make_row(SYMMETRIC, graph=53.0)
    (verdict,) = judge([case], rows)
    assert (verdict.faster, verdict.within_wire, len(verdict.duels)) == (False, False, 1)
    assert "NOT faster, NOT at the wire" in verdict.text
    (verdict,) = judge([case_result(128, 4e6)], [make_row(SYMMETRIC, graph=53.0)])
    assert (verdict.faster, verdict.within_wire) == (None, None)
    (verdict,) = judge([case_result(4096, 4e6, num_sms=8)], [make_row(SYMMETRIC, graph=53.0)])
    assert verdict.within_wire is None
    assert judge([case], rows[:-1]) == ()


def test_a_duel_is_fought_by_the_best_method_of_both() -> None:
    """moelink is the fastest by graph replay and by pairs, and the slowest by eager calls."""
    rows = [
        make_row(COLLECTIVE, eager=60.0),
        make_row("repeats", graph=51.0, pairs=56.0, eager=60.0),
        make_row("alternates", pairs=56.0, eager=60.0),
        make_row(SYMMETRIC, graph=50.0, pairs=55.0, eager=70.0),
    ]
    (verdict,) = judge([case_result(4096, 4e6)], rows)
    assert [(duel.contender, duel.method, duel.ours, duel.theirs) for duel in verdict.duels] == [
        (COLLECTIVE, "eager", 70.0, 60.0), ("repeats", "graph", 50.0, 51.0), ("alternates", "pairs", 55.0, 56.0),
    ]  # fmt: skip
    assert "1.02 times as fast as alternates, pairs" in verdict.text
    assert verdict.within_wire, "by graph replay"
    rows[-1] = make_row(SYMMETRIC, graph=50.0, eager=70.0)
    (verdict,) = judge([case_result(4096, 4e6)], rows)
    assert [duel.method for duel in verdict.duels] == ["eager", "graph", "eager"]


def test_share_of_the_ceiling() -> None:
    samples = PhaseSamples(graph=(50.0, 50.0), eager=(80.0, 80.0))
    assert phase_result([samples, samples], 40.0).share_of_ceiling == pytest.approx(0.8)
    assert phase_result([samples, samples], None).share_of_ceiling is None
    assert phase_result([PhaseSamples(eager=(80.0,))], 40.0).share_of_ceiling == pytest.approx(0.5)
    turns = phase_result([PhaseSamples(pairs=(64.0, 64.0), eager=(80.0, 80.0))], 40.0)
    assert turns.share_of_ceiling == pytest.approx(0.625)
    assert turns.pairs == Figure(64.0, 64.0, 64.0, 0.0, 2)


def test_inputs_are_a_function_of_seed_rank_and_copy() -> None:
    draws = {"seed": 1, "rank": 1, "copy": 2, "world_size": 2}
    first, again = (rank_batch(SMALL, **draws, device=CPU) for _ in range(2))
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.topk_ids, rank_ids(SMALL, **draws))
    assert torch.allclose(first.topk_weights.sum(-1), torch.ones(4))
    other = rank_batch(SMALL, **{**draws, "copy": 1}, device=CPU)
    assert not torch.equal(first.x, other.x)
    assert all(len(set(row)) == 2 for row in first.topk_ids.tolist())


def test_a_layout_that_is_not_timed_is_refused() -> None:
    with pytest.raises(moelink.ConfigError, match="layout: expected expert or rank in a benchmark, got 'masked'"):
        Case(tokens=1, layout="masked")


def test_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {"tokens": 400, "num_experts": 16, "topk": 2, "hidden_size": 8, "format": "bf16"}
    zipf = torch.bincount(draw_ids(Case(**sizes, distribution="zipf"), generator, 4).flatten(), minlength=16)
    assert zipf[0] > 2 * zipf[7]
    uniform = torch.bincount(draw_ids(Case(**sizes), generator, 4).flatten(), minlength=16)
    assert uniform.min() > 20
    assert int(draw_ids(Case(**sizes, distribution="one-rank"), generator, 4).max()) == 3
    repeated = draw_ids(Case(**{**sizes, "topk": 6}, distribution="one-rank"), generator, 4)
    assert int(repeated.max()) == 3


def test_capacity_fits_what_is_received() -> None:
    case = dataclasses.replace(SMALL, format="fp8_block128", hidden_size=128)
    needed = rows_needed(case, seed=0, copies=2, world_size=2)
    most = 0
    for copy in range(2):
        ids = torch.cat([rank_ids(case, seed=0, rank=rank, copy=copy, world_size=2).flatten() for rank in range(2)])
        groups = [-(-int((ids == expert).sum()) // 4) * 4 for expert in range(6)]
        most = max(most, sum(groups[:3]), sum(groups[3:]))
    assert needed == most
    assert needed <= output_rows(case, needed, 2) <= case.ep_config(0, 2).max_rows
    assert output_rows(case, 10_000, 2) == 10_000


def test_capacity_by_rank_fits_the_messages() -> None:
    """The example of rows_needed, too, whose groups of four experts' rows are not."""
    case = dataclasses.replace(SMALL, format="fp8_block128", hidden_size=128, layout="rank")
    most = 0
    for copy in range(3):
        for rank in range(3):
            every = [rank_ids(case, seed=0, rank=source, copy=copy, world_size=3) for source in range(3)]
            most = max(most, sum(int((ids // 2 == rank).any(1).sum()) for ids in every))
    assert rows_needed(case, seed=0, copies=3, world_size=3) == most
    assert output_rows(case, most, 3) <= case.ep_config(0, 3).max_rows == 12


def test_factors_of_rows_are_sums_where_rows_are_by_rank() -> None:
    recv = mock.Mock(topk_ids=torch.tensor([[0, 1], [1, -1], [9, 9]]), topk_weights=torch.tensor([[0.5, 0.25]] * 3))
    assert row_factors(recv, 2, first=0).tolist() == [0.0, -0.5]
    assert row_factors(recv, 2, first=1).tolist() == [0.5 * -1 + 0.25 * 2, 0.5 * 2]
    recv = mock.Mock(topk_ids=None, row_offsets=torch.tensor([0, 1, 3]))
    assert row_factors(recv, 3, first=0).tolist() == [0.5, -1.0, -1.0]


def test_inputs_rotate_past_the_cache() -> None:
    settings = Settings()
    assert num_copies(Case(tokens=1), settings) == 20
    assert num_copies(Case(tokens=4096), settings) == 3
    assert num_copies(Case(tokens=1024), settings) * 1024 * 7168 * 2 > 60e6
    assert num_copies(SMALL, Settings(calls=2, rotation_bytes=0)) == 2


def test_presets() -> None:
    assert list(dict.fromkeys(case.tokens for case in PRESETS["decode"]())) == [1, 8, 32, 128, 256]
    assert {case.tokens for case in PRESETS["prefill"]()} == {512, 1024, 2048, 4096, 8192}
    assert {case.distribution for case in PRESETS["skew"]()} == {"uniform", "zipf", "one-rank"}
    assert {case.num_sms for case in PRESETS["sms"]()} >= {8, 64, None}
    by_layout = [
        [case.tokens for case in PRESETS["layouts"]() if (case.layout, case.zero_copy, case.quantised) == form]
        for form in (("expert", False, False), ("rank", False, False), ("rank", True, False), ("rank", True, True))
    ]
    assert all(tokens == [1, 128, 4096] for tokens in by_layout)
    assert Case(tokens=3, layout="rank", zero_copy=True).label == "3 tokens, fp8_block128, by rank, views"
    assert Case(tokens=3, layout="rank", num_sms=8).label == "3 tokens, fp8_block128, 8 SMs, by rank"
    assert {case.layout for case in make_plan("decode", ranks=2, device="cuda", layout="rank").cases} == {"rank"}
    for name in PRESETS:
        plan = make_plan(name, ranks=4, device="cuda")
        assert len(plan.cases) == len(set(plan.cases))
    plan = make_plan("formats", ranks=2, device="cuda", tokens=(8, 16), formats=("bf16",), samples=4, hidden_size=64)
    assert [(c.tokens, c.format, c.hidden_size) for c in plan.cases] == [(8, "bf16", 64), (16, "bf16", 64)]
    assert plan.settings.samples == 4


@pytest.mark.parametrize(
    "changes",
    [{"preset": "fast"}, {"ranks": 0}, {"tokens": (0,)}, {"topk": 7, "num_experts": 6}, {"samples": 0},
     {"formats": ("fp8_block128",), "hidden_size": 100}, {"formats": ("fp7",)}],
)  # fmt: skip
def test_unusable_plans_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_plan(**{"preset": "smoke", "ranks": 2, "device": "cpu", **changes})


def test_neighbouring_experts_share_groups_where_torch_takes_no_more() -> None:
    case = dataclasses.replace(SMALL, num_experts=64)
    groups = group_of_expert(case, 2)
    assert groups.tolist()[:4] == [0, 0, 1, 1]
    assert (int(groups[32]), int(groups[-1])) == (16, 31)
    assert group_of_expert(case, 8).tolist() == list(range(64))
    with pytest.raises(moelink.UnsupportedError, match="as many experts on every rank"):
        group_of_expert(SMALL, 4)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interpreted kernels")
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ceiling_kernel_fills_every_peers_region(world_size: int) -> None:
    from moelink.memory import create_all
    from moelink_bench.push import BLOCK, ceiling_push_kernel

    words = 3 * BLOCK
    memories = create_all(["cpu"] * world_size, world_size * words * 4)
    sources = [torch.arange(world_size * words, dtype=torch.int32) + rank * 7 for rank in range(world_size)]
    programs = 2 * (world_size - 1)
    for rank, (memory, source) in enumerate(zip(memories, sources, strict=True)):
        ceiling_push_kernel[(programs,)](memory.pointers, source, rank, words, W=world_size, BLOCK=BLOCK)
    for peer, memory in enumerate(memories):
        regions = memory.local.view(torch.int32).view(world_size, words)
        for rank, source in enumerate(sources):
            expected = source.view(world_size, words)[peer]
            assert torch.equal(regions[rank], torch.zeros_like(expected) if rank == peer else expected)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interpreted kernels")
def test_what_is_compiled_ahead_can_be_called() -> None:
    several = dataclasses.replace(SMALL, tokens=8)
    with open_communicator(several, transport="symmetric", capacity=32, device=CPU, timeout=30.0) as ep:
        compile_calls(ep, bounds=(1, 8))


def test_the_choices_of_the_command_are_the_tables() -> None:
    assert list(get_args(names.PresetName)) == list(PRESETS)
    assert list(get_args(names.LayerPresetName)) == list(LAYER_PRESETS)
    assert list(get_args(names.CaseName)) == list(SHAPES)
    assert get_args(names.PeerName) == names.PEERS
