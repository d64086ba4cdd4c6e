"""Rows that travel home in a format: schedules, the error bound, gradients, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moelink
from moelink.config import COMBINE_FORMATS
from moelink.formats import get_format
from moelink.memory.workspace import Workspace
from moelink.testing import rank_data, run_ranks
from moelink.transports.build import layout_digest
from tests.support.cases import Case, Packed, Result, Setup, check_case, run_cases, unpack
from tests.support.protocol_runs import Small, run
from tests.support.symmetric_ranks import combine_requests, dispatch_requests
from tests.tiers import seeds

FIELDS = {"num_experts": 4, "topk": 2, "hidden_size": 256, "max_tokens_per_rank": 3}


WAYS: dict[str, dict[str, object]] = {
    "zero_copy": {"layout": "rank", "zero_copy": True},
    "zero_copy_fp32": {"layout": "rank", "zero_copy": True, "combine_dtype": torch.float32},
    "expert": {},
    "expert_rows": {"pre_reduce": False},
    "expert_fused": {"fused_shared_expert": True},
    "rank": {"layout": "rank"},
    "masked": {"layout": "masked"},
    "masked_rows": {"layout": "masked", "pre_reduce": False},
}
"""Ways in which a combine takes rows that it sends home."""


def check_ways_home(transport: str, fmt: str, way: str, scenario: str, scales: int) -> None:
    """Compare a dispatch and a combine of three ranks, rows home with ``scales`` scales each, with the oracle."""
    options = {"combine_format": fmt, "hidden_size": scales * get_format(fmt).group, **WAYS[way]}
    case, ranks = Case(Setup("bf16", tuple(options.items())), scenario, seed=scales, small=True), [0, 1, 2]
    with moelink.init_devices(["cpu"] * 3, **case.setup.fields, transport=transport) as ep:
        link = ep._session.transport
        recvs = link.dispatch(dispatch_requests(case, ranks)).wait()
        asked = combine_requests(case, ranks, recvs)
        taken = [Result.of(recv, torch.empty(0)) for recv in recvs]  # rows that stay in place end with the combine
        outs = link.combine(asked).wait()
    check_case(case, 3, [dataclasses.replace(t, combined=Packed.of(out)) for t, out in zip(taken, outs, strict=True)])


@pytest.mark.quick("each has branches of its own, in milliseconds")
@pytest.mark.parametrize("scenario", ["all_empty", "one_expert", "one_rank_empty", "uniform"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fmt", COMBINE_FORMATS)
def test_any_number_of_rows_goes_home(fmt: str, way: str, scenario: str) -> None:
    """With ``one_expert`` all rows are one rank's, and the others have none to return."""
    for scales in (1, 2, 3):
        check_ways_home("collective", fmt, way, scenario, scales)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fmt", COMBINE_FORMATS)
def test_kernels_return_any_number_of_rows(fmt: str, way: str) -> None:
    check_ways_home("symmetric", fmt, way, "one_expert", 1)


SMALL = (("max_tokens_per_rank", 4), ("hidden_size", 32), ("combine_format", "mxfp8"))


@seeds(1, 6)
@pytest.mark.parametrize(
    "options", [(), (("pre_reduce", False),), (("ranks_per_node", 1),)], ids=["sums", "rows", "far"]
)
def test_every_schedule(options: tuple[tuple[str, object], ...], seeds: range) -> None:
    setup = Setup("bf16", (*SMALL, *options), num_experts=3, topk=2)
    for seed in seeds:
        run(seed, [Small(setup, "uniform", seed=2, tokens=(1, 2)), Small(setup, "uniform", seed=3, tokens=(3, 1))])


@pytest.mark.parametrize("pre_reduce", [True, False])
@pytest.mark.parametrize("fmt", COMBINE_FORMATS)
def test_the_error_is_within_the_bound(fmt: str, pre_reduce: bool) -> None:
    """|out - exact| <= tolerance x the sum over what travels (a rank's sum, or a row times its weight) of its largest
    magnitude in the group, and the rounding of fp32 sums."""
    options = (("combine_format", fmt), ("hidden_size", 384), ("combine_dtype", torch.float32))
    setup = Setup("fp32", (*options, ("pre_reduce", pre_reduce)))
    case, world = Case(setup, "uniform", "dispatch" if pre_reduce else "combine", seed=5), 3
    config = case.setup.config(world)
    results = run_cases_in_one_process(case, world)
    group, worst = get_format(fmt).group, 0.0
    data = [case.data(rank) for rank in range(world)]
    travelling = [torch.zeros(len(d.x), world if pre_reduce else config.topk, 384, dtype=torch.float64) for d in data]
    for rank, result in enumerate(results):
        fields = {name: unpack(value) for name, value in result.fields.items()}
        y = case.expert_rows(rank, len(fields["tokens"])).double()
        for row in range(int(fields["row_offsets"][-1])):
            source, token, slot = fields["src_info"][row].tolist()
            weight = data[source].topk_weights[token, slot].double()
            travelling[source][token, rank if pre_reduce else slot] += y[row] * weight
    for home, parts in enumerate(travelling):
        amax = parts.view(*parts.shape[:2], -1, group).abs().amax(3).clamp(min=1e-4).sum(1)
        bound = ((get_format(fmt).tolerance + 2.0**-20) * amax)[..., None]
        error = (results[home].combined.tensor().double() - parts.sum(1)).view(len(parts), -1, group).abs()
        assert bool((error <= bound).all()), (home, (error / bound).max())
        worst = max(worst, float((error / bound).max()))
    assert worst > 0.2, "the bound says nothing"
    assert config.combine_row_bytes * 3 < 384 * 4


def run_cases_in_one_process(case: Case, world: int) -> list[Result]:
    """The collective transport has the same bits, and is faster than interpreted kernels."""
    return [result[0] for result in run_ranks(run_cases, world, [case], {"transport": "collective"}, timeout=60)]


def gradients(rank: int, world_size: int, transport: str) -> list[list[torch.Tensor]]:
    """Gradients of rows, of their weights and of expert outputs, without a combine format and with one."""
    found = []
    for fmt in (None, "mxfp8"):
        data = rank_data(seed=4, rank=rank, num_tokens=3, hidden_size=32, num_experts=4, topk=2)
        x, weights = (t.clone().requires_grad_() for t in (data.x, data.topk_weights))
        with moelink.init(
            num_experts=4, topk=2, hidden_size=32, max_tokens_per_rank=3, combine_format=fmt, transport=transport,
            timeout=60.0,
        ) as ep:  # fmt: skip
            recv = ep.dispatch(x, data.topk_ids, weights)
            y = (recv.tokens * 1.5).detach().requires_grad_()
            scaled = y + recv.tokens * 0.5
            ep.combine(scaled, recv).float().mul(torch.arange(32) - 7.25).sum().backward()
            end = int(recv.row_offsets[-1])
            assert x.grad is not None
            assert weights.grad is not None
            assert y.grad is not None
            found.append([x.grad, weights.grad, y.grad[:end]])
    return found


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_gradients_are_those_without_a_format(transport: str) -> None:
    for plain, coded in run_ranks(gradients, 2, transport, timeout=120):
        for one, other in zip(plain, coded, strict=True):
            assert torch.equal(one, other)
            assert bool(one.any())


@pytest.mark.quick("each case is another refusal, in no time")
@pytest.mark.parametrize(
    "fields, field, told",
    [
        ({"combine_format": "nvfp4"}, "combine_format", "None or one of 'fp8_block128', 'mxfp8'"),
        ({"combine_format": "bf16"}, "combine_format", "None or one of"),
        ({"combine_format": 8}, "combine_format", "None or one of"),
        ({"combine_format": "mxfp8", "combine_dtype": torch.float64}, "combine_format", "sums are fp64"),
        ({"combine_format": "mxfp8", "mode": "allreduce"}, "combine_format", "nothing travels"),
        ({"combine_format": "fp8_block128", "hidden_size": 160}, "hidden_size", "multiple of 128"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, object], field: str, told: str) -> None:
    with pytest.raises(moelink.ConfigError, match=told) as caught:
        moelink.EPConfig(**{**FIELDS, **fields})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_sizes_and_digest() -> None:
    fields = dict(num_experts=8, topk=2, hidden_size=7168, max_tokens_per_rank=4096, world_size=4)
    plain, coded, other = (
        moelink.EPConfig(**fields, combine_format=name)  # type: ignore[arg-type]
        for name in (None, "fp8_block128", "mxfp8")
    )
    parts = [(part.name, part.offset, part.nbytes) for part in coded.home_row.parts]
    assert parts == [("payload", 0, 7168), ("scales", 7168, 224)]
    assert (plain.combine_row_bytes, coded.combine_row_bytes, other.combine_row_bytes) == (14336, 7392, 7392)
    assert {config.result_row_bytes for config in (plain, coded, other)} == {14336}
    before, after = plain.memory_report(), coded.memory_report()
    assert before.outputs == after.outputs
    assert before.block - after.block == 4 * 4096 * (14336 - 7424)
    assert len({layout_digest(config) for config in (plain, coded, other)}) == 2  # the last two have the same bytes
    assert coded.shared_fields() != other.shared_fields()
    few = moelink.EPConfig(**{**fields, "max_tokens_per_rank": 4}, combine_format="mxfp8")  # type: ignore[arg-type]
    assert Workspace(few).lamport_tokens == 0 < Workspace(dataclasses.replace(few, combine_format=None)).lamport_tokens
