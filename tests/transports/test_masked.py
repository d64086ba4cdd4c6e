"""Layout "masked": what does not fit a group, what no row fills, shapes, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import moelink
from moelink import nn, ops, reference
from moelink.formats.base import ScaleLayout
from moelink.kernels.launch.constants import DispatchSpec
from moelink.kernels.launch.launcher import Launcher
from moelink.output import OutputShape
from moelink.testing import assert_bitwise_equal
from moelink.transports.symmetric.rank import Rank
from moelink.transports.symmetric.warmup import prepare_calls
from tests.support.cases import FIELDS, Case, Setup, check_rows, rows_of_scales, used_rows
from tests.support.symmetric_ranks import dispatch_requests, one_process

TRANSPORTS = ("collective", "symmetric")


def masked(fmt: str, *, num_experts: int = 7, **options: Any) -> Setup:
    """A setup; rows of scales in tiles are a multiple of 128."""
    if options.get("rows_per_expert") and fmt in ("nvfp4", "mxfp8"):
        options["rows_per_expert"] = 128
    return Setup(fmt, (("layout", "masked"), *options.items()), num_experts=num_experts)


def transport_of(name: str, setup: Setup, world: int = 2) -> Any:
    """The transport of all ranks in this process."""
    if name == "symmetric":
        return one_process(setup.fields, world)
    return moelink.init_devices(["cpu"] * world, **setup.fields, transport="collective")._session.transport


@pytest.mark.quick("the two transports drop rows in ways of their own")
@pytest.mark.parametrize("name", TRANSPORTS)
def test_rows_that_do_not_fit_their_expert_are_dropped_and_counted(name):
    """Expert 0 gets 3 rows from rank 0 and 2 from rank 1, expert 1 one, and both have room for 4."""
    fields = dict(num_experts=4, topk=1, hidden_size=8, max_tokens_per_rank=4, layout="masked", rows_per_expert=4)
    with moelink.init_devices(["cpu"] * 2, **fields, transport=name) as ep:
        xs = [torch.arange(1.0, 5)[:, None].expand(4, 8).bfloat16().contiguous() * (1 + 9 * rank) for rank in range(2)]
        ids = [torch.tensor([[0], [0], [0], [1]]), torch.tensor([[0], [0], [3], [-1]])]
        recvs = ep.dispatch(xs, ids)
        assert recvs[0].tokens[0, :, 0].tolist() == [1, 2, 3, 10]
        assert recvs[0].src_info[0].tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0], [1, 0, 0]]
        assert recvs[0].tokens[1, 0, 0] == 4
        assert recvs[0].num_recv_per_expert.tolist() == [4, 1]
        assert recvs[0].row_offsets.tolist() == [0, 4, 8]
        assert [int(recv.num_recv_tokens) for recv in recvs] == [5, 1]
        assert [int(recv.overflow) for recv in recvs] == [1, 0]
        y = [torch.where(recv.tokens > 0, recv.tokens, 7) for recv in recvs]
        outs = ep.combine(y, recvs)
        assert [out[:, 0].tolist() for out in outs] == [[1, 2, 3, 4], [10, 0, 30, 0]]
        text = r"rank 0: 1 rows did not fit rows_per_expert 4: .*; raise rows_per_expert \(None never drops rows\)"
        with pytest.raises(moelink.CapacityError, match=text) as caught:
            ep.check()
        assert caught.value.capacity == 4
        ep.check()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_the_tiles_of_an_expert_end_with_its_rows(name):
    """Of 3 x 48 rows for one expert 128 fit."""
    setup = masked("nvfp4", hidden_size=16, max_tokens_per_rank=48, rows_per_expert=128)
    case = Case(dataclasses.replace(setup, topk=1), "one_expert")
    x, ids = torch.randn(48, 16).bfloat16(), torch.full((48, 1), 2)
    transport = transport_of(name, case.setup, 3)
    requests = [
        dataclasses.replace(r, x=x * (1 + i), topk_ids=ids) for i, r in enumerate(dispatch_requests(case, range(3)))
    ]
    requests = [dataclasses.replace(r, topk_weights=None) for r in requests]
    rows = reference.reference_dispatch(case.setup.config(3), [r.x for r in requests], [ids] * 3)
    for recv, want in zip(transport.dispatch(requests).wait(), rows, strict=True):
        check_rows(name, want, {field: getattr(recv, field) for field in FIELDS})
    assert [int(want.overflow) for want in rows] == [16, 0, 0]
    transport.close()


@pytest.mark.quick("the two transports write rows in ways of their own")
@pytest.mark.parametrize("name", TRANSPORTS)
def test_what_no_row_fills_is_not_written(name):
    """To write it would take as long as the worst case."""
    for fmt in ("fp8_block128", "mxfp8"):
        case = Case(masked(fmt), "uniform", small=True)
        with moelink.init_devices(["cpu"] * 2, **case.setup.fields, transport=name) as ep:
            data = [case.data(rank) for rank in range(2)]
            given = [d.x for d in data], [d.topk_ids for d in data], [d.topk_weights for d in data]
            out = ep.dispatch(*given)
            for recv in out:
                for tensor in (recv.tokens, recv.scales, recv.src_info, recv.weights):
                    tensor.view(torch.uint8).fill_(0xAA)
            for recv in ep.dispatch(*given, out=out):
                used = used_rows(recv.num_recv_per_expert, recv.tokens.shape[1])
                assert used.any()
                assert not used.all()
                by_row = (recv.tokens, recv.src_info, recv.weights, rows_of_scales(recv.scales, used.shape[1]))
                for rows in by_row:
                    unused = rows[~used] if rows.element_size() > 1 else rows.view(torch.uint8)[~used]
                    assert (unused.contiguous().view(torch.uint8) == 0xAA).all()


@pytest.mark.quick("each layout of scales, in milliseconds")
@pytest.mark.parametrize(
    "fmt, scales, rows",
    [
        ("bf16", None, 42), ("fp8_block128", (4, 3, 44), 44), ("fp8_block128_e8m0", (4, 2, 44), 44),
        ("nvfp4", (4, 1, 1, 32, 4, 4), 128), ("mxfp4", (4, 42, 3), 42), ("fp8_token", (4, 42, 1), 42),
    ],
)  # fmt: skip
def test_shapes(fmt, scales, rows):
    """2 ranks x 7 tokens x topk 3, as a multiple of what the scales demand; and bytes as the memory report says."""
    config = masked(fmt).config(2)
    made = OutputShape.of(config, rows=config.row_capacity, weighted=True)
    shapes = {name: blank.shape for name, blank in made.present}
    assert shapes["tokens"][:2] == shapes["weights"] == (4, rows)
    assert shapes.get("scales") == scales
    assert shapes["src_info"] == (4, rows, 3)
    assert "scales_offsets" in made.absent
    assert config.output_rows(2) == (128 if rows == 128 else 12)
    tensors = [blank.on(torch.device("cpu")) for _, blank in made.present]
    outputs = config.memory_report().outputs - config.max_tokens_per_rank * config.topk * config.combine_row_bytes
    assert 0 <= outputs - sum(tensor.nbytes for tensor in tensors) <= 4 * (config.num_groups + 1)
    assert config.most_total_rows == 4 * rows
    assert masked(fmt).config(2, rank=1).most_total_rows == 4 * rows


def test_a_layout_of_scales_has_blocks_of_its_own():
    """A layout that somebody registers is asked for one group at a time."""
    assert ScaleLayout.block_rows == 1
    assert moelink.get_format("mxfp8").scale_layout.group_shape(256, 6) == (2, 2, 32, 4, 4)


@pytest.mark.quick("calls of known kinds are checked in another way")
@pytest.mark.parametrize("name", TRANSPORTS)
def test_refusals(name):
    """What is for other layouts is refused by name, and the next call works."""
    fields = dict(num_experts=4, topk=2, hidden_size=128, max_tokens_per_rank=4, layout="masked", transport=name)
    x, ids = torch.randn(3, 128).bfloat16(), torch.tensor([[0, 1], [2, 3], [0, -1]])
    with moelink.init(**fields, device="cpu") as ep:
        recv = ep.dispatch(x, ids)
        y = recv.tokens.clone()
        for rows in (x.clone().requires_grad_(), torch.nn.Parameter(x)):
            with pytest.raises(
                moelink.UnsupportedError, match="layout: expected 'expert' or 'rank' for a call with grad"
            ):
                ep.dispatch(rows, ids)
            with torch.no_grad():
                assert ep.dispatch(rows, ids).tokens.shape == (4, 8, 128)
        with pytest.raises(moelink.UnsupportedError, match="use layout='expert'"):
            ep.combine_async(y.clone().requires_grad_(), recv)
        small = ep.dispatch(x, ids, max_tokens=3)
        ep.combine(y, recv)
        with pytest.raises(moelink.ArgumentError, match=r"y: expected shape \[4, 6, 128\], got \[4, 8, 128\]"):
            ep.combine(y, small)
        with pytest.raises(moelink.ArgumentError, match=r"y: expected shape \[4, 8, 128\], got \[32, 128\]"):
            ep.combine(y.flatten(0, 1), recv)
        with pytest.raises(
            moelink.UnsupportedError, match="dequantize: expected an output of layout 'expert' or 'rank'"
        ):
            ops.dequantize(ep, recv)
        with pytest.raises(moelink.ConfigError, match=r"layout: expected 'expert' for moelink.nn.MoE .*, got 'masked'"):
            nn.MoE(ep, intermediate_size=64)
        gate_up, down = torch.randn(4, 128, 128).bfloat16(), torch.randn(4, 128, 64).bfloat16()
        with pytest.raises(moelink.ArgumentError, match=r"tokens: expected shape \[R, 128\], got \[4, 8, 128\]"):
            nn.grouped_experts(y, recv.row_offsets, gate_up, down, activation=torch.nn.functional.silu)
        assert_bitwise_equal(ep.combine(y, recv), ep.combine(ep.dispatch(x, ids).tokens, recv))


def test_warmup_makes_calls_of_this_layout(monkeypatch):
    """On devices it compiles what these calls launch; nothing is launched here."""
    made: list[Any] = []
    monkeypatch.setattr(Launcher, "launch", lambda _, kernel, __, numbers, *___: made.append((kernel.S, numbers)))
    monkeypatch.setattr(Rank, "grant_credits", lambda _: None)
    transport = one_process(masked("nvfp4", num_experts=4, max_tokens_per_rank=2).fields, 1)
    prepare_calls(transport.ranks[0], None)
    assert {bool(spec.MASKED) for spec, _ in made if isinstance(spec, DispatchSpec)} == {True}
    assert {bool(spec.SCALES_LATER) for spec, _ in made if isinstance(spec, DispatchSpec)} == {False}
    assert {numbers.y_rows for spec, numbers in made if not isinstance(spec, DispatchSpec)} == {4 * 128}
