"""EPConfig: what it refuses, in which words, and the sizes that follow from it."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moelink
from moelink import EPConfig
from moelink.formats.fp8 import FP8Block128
from moelink.formats.registry import REGISTRY
from moelink.memory.layout import DispatchMessage, Region, RegionTable
from moelink.memory.workspace import Workspace
from moelink.routing import ExpertMap, aligned_offsets, plan_rows, plan_sends, shared_slice
from moelink.transports.symmetric.notes import NotesLayout, SymmetricNotes

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")

BASE = {"num_experts": 8, "topk": 2, "hidden_size": 256, "max_tokens_per_rank": 4}


@pytest.mark.parametrize(
    "field, value, expectation",
    [
        ("num_experts", 0, "an integer >= 1"),
        ("topk", 1.5, "an integer >= 1"),
        ("topk", True, "an integer >= 1"),
        ("hidden_size", -1, "an integer >= 1"),
        ("max_tokens_per_rank", -1, "an integer >= 0"),
        ("expert_alignment", 0, "an integer >= 1"),
        ("capacity", -1, "an integer >= 0"),
        ("num_sms", 0, "an integer >= 1"),
        ("dispatch_format", "fp3", "fp8_block128"),
        ("combine_dtype", torch.int8, "torch.bfloat16"),
        ("layout", "column", "one of 'expert', 'rank', 'masked'"),
        ("rows_per_expert", -1, "an integer >= 0"),
        ("rows_per_expert", 8, "None with layout='expert'"),
        ("mode", "reduce", "one of 'alltoall', 'allreduce'"),
        ("transport", "carrier", "one of 'auto', 'collective', 'symmetric'"),
        ("pre_reduce", 1, "True or False"),
        ("timeout", 0, "a positive number of seconds"),
        ("timeout", float("inf"), "a positive number of seconds"),
        ("rank", 3, "below world_size 2"),
        ("ranks_per_node", 3, "a divisor of world_size 2"),
    ],
)
def test_refusals_name_field_expectation_and_value(field, value, expectation):
    with pytest.raises(moelink.ConfigError) as caught:
        EPConfig(**(BASE | {"world_size": 2, field: value}))
    assert caught.value.field == field
    assert expectation in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_group_that_does_not_divide_names_format_and_group():
    with pytest.raises(
        moelink.ConfigError, match="hidden_size: expected a multiple of 128 .*'fp8_block128'.*, got 200"
    ):
        EPConfig(**(BASE | {"hidden_size": 200, "dispatch_format": "fp8_block128"}))


@pytest.mark.parametrize("field", ["fused_shared_expert", "pre_reduce", "expert_alignment"])
def test_rank_layout_refuses_what_it_cannot_mean(field):
    value = {"fused_shared_expert": True, "pre_reduce": False, "expert_alignment": 8}[field]
    with pytest.raises(moelink.ConfigError, match=f"{field}: expected .* with layout='rank'"):
        EPConfig(**(BASE | {"layout": "rank", field: value}))


@pytest.mark.parametrize(
    "field, value",
    [
        ("pre_reduce", True), ("mode", "allreduce"), ("layout", "rank"), ("capacity", 9), ("rows_per_expert", 8),
        ("dispatch_format", "fp8_of_all_rows"),
    ],
)  # fmt: skip
def test_batch_invariant_refuses_all_in_which_other_tokens_or_ranks_count(field, value, monkeypatch):
    monkeypatch.setitem(REGISTRY._registered, "fp8_of_all_rows", OneScale())
    layout = {"layout": "masked"} if field == "rows_per_expert" else {}
    with pytest.raises(moelink.ConfigError, match=f"{field}: expected .* with batch_invariant=True") as caught:
        EPConfig(**(BASE | layout | {"batch_invariant": True, field: value}))
    assert caught.value.field == field


def test_rows_travel_home_one_by_one_if_bits_depend_on_the_token_alone():
    assert EPConfig(**BASE).pre_reduce is True
    for fmt in moelink.format_names():
        assert EPConfig(**BASE, batch_invariant=True, dispatch_format=fmt).pre_reduce is False


class OneScale(FP8Block128):
    """One scale for all rows of a call."""

    name = "fp8_of_all_rows"

    def quantize(self, x, input_scale=None):
        rows = super().quantize(x)
        return dataclasses.replace(rows, scales=rows.scales.amax().expand(rows.scales.shape))


@pytest.mark.parametrize(
    "field, value", [("fused_shared_expert", True), ("expert_alignment", 8), ("capacity", 9), ("global_ids", True)]
)
def test_masked_layout_refuses_what_it_cannot_mean(field, value):
    with pytest.raises(moelink.ConfigError, match=f"{field}: expected .* with layout='masked'") as caught:
        EPConfig(**(BASE | {"layout": "masked", field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize("fmt, multiple", [("nvfp4", 128), ("fp8_block128", 4)])
def test_rows_per_expert_are_whole_blocks_of_scales(fmt, multiple):
    fields = BASE | {"layout": "masked", "dispatch_format": fmt}
    with pytest.raises(moelink.ConfigError, match=f"rows_per_expert: expected a multiple of {multiple}, .*'{fmt}'"):
        EPConfig(**fields, rows_per_expert=multiple // 2)
    assert EPConfig(**fields, rows_per_expert=multiple).row_capacity == multiple
    most = EPConfig(**fields, world_size=2)
    assert most.row_capacity == most.max_rows == -(-2 * 4 * 2 // multiple) * multiple
    assert EPConfig(**fields, rows_per_expert=4 * multiple).output_rows(1) == multiple
    with pytest.raises(moelink.ConfigError, match="rows_per_expert: expected sizes with at most"):
        EPConfig(**fields, rows_per_expert=2**29)


def test_derived_sizes():
    config = EPConfig(
        num_experts=7,
        topk=3,
        hidden_size=7168,
        max_tokens_per_rank=128,
        dispatch_format="fp8_block128",
        world_size=3,
        rank=1,
    )
    assert config.num_local_experts == 2
    assert config.num_groups == 2
    assert config.row_alignment == 4
    assert config.max_rows == 3 * 128 * 3 + 2 * 3
    assert config.row_capacity == config.max_rows
    assert config.combine_row_bytes == 14336
    aligned = EPConfig(**(BASE | {"dispatch_format": "fp8_block128", "expert_alignment": 6}))
    assert aligned.row_alignment == 12, "both 6 and the format's 4 must divide the group sizes"


def test_message_layout_in_literal_numbers():
    message = DispatchMessage(moelink.get_format("fp8_block128"), 7168, 8, weight_dtype=torch.float32)
    assert [(part.name, part.offset, part.nbytes) for part in message.parts] == [
        ("payload", 0, 7168), ("scales", 7168, 224), ("token", 7392, 4), ("ids", 7408, 32), ("weights", 7440, 32),
    ]  # fmt: skip
    assert message.nbytes == 7472
    assert DispatchMessage(moelink.get_format("nvfp4"), 7168, 8, with_ids=False).nbytes == 3584 + 448


def test_memory_report_counts_before_anything_is_allocated():
    config = EPConfig(**(BASE | {"world_size": 4}))
    report = config.memory_report()
    assert report.wire_recv == max(4 * 4 * config.dispatch_message.nbytes, 4 * 2 * (512 + 16))
    assert (
        report.outputs == config.row_capacity * (512 + 12 + 4) + 4 * (3 * config.num_groups + 3) + 4 * config.topk * 512
    )
    assert report.total == report.wire_send + report.wire_recv + report.outputs
    assert report.symmetric_total == report.block + report.notes + report.outputs
    workspace = Workspace(config)
    notes = torch.empty(workspace.note_words(4), dtype=torch.int32)
    parts = SymmetricNotes(NotesLayout.of(workspace), notes).parts
    assert [tuple(part.shape) for part in parts] == list(workspace.note_shapes(4))
    assert all(part.data_ptr() % 128 == notes.data_ptr() % 128 for part in parts)
    assert report.block == workspace.nbytes
    assert report.notes == notes.nbytes + 4 * config.row_capacity
    assert "symmetric transport" in str(report)


def test_regions_do_not_overlap_and_refuse_foreign_memory():
    table = RegionTable.pack(("a", torch.int32, (3,)), ("b", torch.uint8, (5,)))
    assert [(r.name, r.offset, r.nbytes) for r in table] == [("a", 0, 12), ("b", 128, 5)]
    assert table.nbytes == 256
    memory = torch.zeros(table.nbytes, dtype=torch.uint8)
    table["a"].view(memory)[2] = 7
    assert memory[8] == 7
    with pytest.raises(moelink.MoelinkError, match=r"region 'b' \[128, 133\) does not fit memory of 64"):
        table["b"].view(memory[:64])
    with pytest.raises(KeyError, match="no region 'c'; there are a, b"):
        table["c"]
    assert Region("x", torch.int32, (2, 2), 16).end == 32


def test_routing_examples_of_the_docstrings():
    experts = ExpertMap(7, 3)
    assert [experts.first(rank) for rank in range(4)] == [0, 3, 5, 7]
    assert experts.owner(torch.tensor([0, 3, 6, -1])).tolist() == [0, 1, 2, -1]
    assert experts.local(torch.tensor([0, 3, 4, -1]), 1).tolist() == [-1, 0, 1, -1]
    sends = plan_sends(torch.tensor([[0, 3], [1, 0]]), ExpertMap(4, 2))
    assert (sends.tokens.tolist(), sends.counts.tolist()) == ([0, 1, 0], [2, 1])
    assert aligned_offsets(torch.tensor([10, 10, 10, 10]), 4).tolist() == [0, 12, 24, 36, 48]
    ids, sources = torch.tensor([[0, 1], [1, -1], [0, 0]]), torch.tensor([0, 0, 1])
    rows = plan_rows(ids, sources, num_local_experts=2, world_size=2)
    assert (rows.message.tolist(), rows.slot.tolist(), rows.row_offsets.tolist()) == (
        [0, 2, 2, 0, 1], [0, 0, 1, 1, 0], [0, 3, 5],
    )  # fmt: skip
    rows = plan_rows(ids, sources, num_local_experts=2, world_size=2, alignment=4)
    assert (rows.row.tolist(), rows.row_offsets.tolist()) == ([0, 1, 2, 4, 5], [0, 4, 8])
    rows = plan_rows(ids, sources, num_local_experts=2, world_size=2, rows_per_group=2)
    assert (rows.message.tolist(), rows.row.tolist(), rows.row_offsets.tolist()) == (
        [0, 2, 0, 1], [0, 1, 2, 3], [0, 2, 4],
    )  # fmt: skip
    assert rows.counts.tolist() == [[1, 2], [2, 0]]
    assert [list(shared_slice(7, rank=rank, parts=3)) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


@given(num_experts=st.integers(1, 40), world_size=st.integers(1, 12))
def test_every_expert_has_one_owner(num_experts, world_size):
    experts = ExpertMap(num_experts, world_size)
    ids = torch.arange(num_experts)
    owners = experts.owner(ids)
    for rank in range(world_size):
        local = experts.local(ids, rank)
        assert local[local >= 0].tolist() == list(range(experts.num_local(rank)))
        assert ((local >= 0) == (owners == rank)).all()
        config = EPConfig(**(BASE | {"num_experts": num_experts, "world_size": world_size, "rank": rank}))
        assert config.num_local_experts == experts.num_local(rank)
    assert sum(experts.num_local(rank) for rank in range(world_size)) == num_experts
    counts = [experts.num_local(rank) for rank in range(world_size)]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1
