"""How a launch is cut: which sums go without flags, and that other token counts need no other kernels."""

from __future__ import annotations

import pytest
import torch

import moelink
import moelink.memory.workspace as workspaces
from moelink.kernels.launch import grid as cut
from tests.support.cases import Case, Setup, check_case
from tests.support.symmetric_ranks import one_process, run_case

WORLD = 3


@pytest.mark.parametrize("dtype, hidden", [
    (torch.bfloat16, 36), (torch.bfloat16, 46), (torch.bfloat16, 47), (torch.float16, 46), (torch.float32, 36),
    (torch.float32, 47), (torch.float64, 36),
], ids=str)  # fmt: skip
def test_small_calls_equal_oracle_without_flags_and_with(monkeypatch, blocks, dtype, hidden):
    """Of three ranks two have few enough tokens to need no flags, so that both forms meet in one call."""
    row = 128 * -(-hidden * dtype.itemsize // 128)
    monkeypatch.setattr(workspaces, "LAMPORT_BYTES", WORLD * row * 4)
    blocks(16)
    dispatch_format = "fp64" if dtype == torch.float64 else "bf16"
    setup = Setup(dispatch_format, (("hidden_size", hidden), ("combine_dtype", dtype)))
    words = dtype.itemsize < 8 and hidden * dtype.itemsize % 4 == 0
    assert workspaces.Workspace(setup.config(WORLD)).lamport_tokens == (4 if words else 0)
    transport = one_process(setup.fields, WORLD)
    for seed in range(2):
        case = Case(setup, "uniform", seed=seed)
        check_case(case, WORLD, run_case(transport, case, range(WORLD)))
    transport.check()
    transport.close()


@pytest.mark.parametrize("fields", [{}, {"num_sms": 24}, {"dispatch_format": "nvfp4"}, {"mode": "allreduce"}], ids=str)
@pytest.mark.parametrize("most", [128, 4096])
def test_other_token_counts_need_no_other_kernels(monkeypatch, most, fields):
    """What is compiled is keyed on a spec, which knows no token counts, and on options, which must not."""
    monkeypatch.setattr(cut, "sm_count", lambda device: 132)
    config = moelink.EPConfig(
        num_experts=256, topk=8, hidden_size=7168, max_tokens_per_rank=most, world_size=8, **fields
    )
    device = torch.device("cuda", 0)
    counts = [*range(0, most, 7), most]
    for encodes in (False, True):
        assert len({str(cut.dispatch_launch(config, device, n, encodes=encodes).options) for n in counts}) == 1
    workspace = workspaces.Workspace(config)
    assert len({str(cut.combine_launch(workspace, device, n, sums=True).options) for n in counts}) == 1


@pytest.mark.parametrize("world_size, most, small, programs", [
    (2, 1, 1, (9, 5)), (8, 256, 256, (529, 528)), (16, 256, 146, (529, 528)), (8, 257, 257, (396, 264)),
    (8, 293, 0, (528, 132)), (4, 585, 585, (396, 264)), (4, 586, 0, (528, 132)), (2, 1024, 1024, (396, 264)),
    (2, 1025, 0, (528, 132)),
])  # fmt: skip
def test_sums_go_without_flags_where_there_is_room(monkeypatch, world_size, most, small, programs):
    """Rows of 14336 bytes on a device of 132 SMs; ``programs`` that send and that sum."""
    monkeypatch.setattr(cut, "sm_count", lambda device: 132)
    fields = {"num_experts": 256, "topk": 8, "hidden_size": 7168, "max_tokens_per_rank": most}
    device = torch.device("cuda", 0)
    workspace = workspaces.Workspace(moelink.EPConfig(**fields, world_size=world_size))
    launch = cut.combine_launch(workspace, device, most, sums=True)
    assert workspace.lamport_tokens == small
    assert (launch.send, launch.receive) == programs
    rows = workspaces.Workspace(moelink.EPConfig(**fields, world_size=world_size, pre_reduce=False))
    assert rows.lamport_tokens == 0
    by_rank = workspaces.Workspace(moelink.EPConfig(**fields, world_size=world_size, layout="rank"))
    assert world_size == 2 or by_rank.lamport_tokens == small
    for block, sums in ((workspace, False), (rows, True)):
        none = cut.combine_launch(block, device, most, sums=sums)
        assert (none.send, none.receive) == (programs if most <= 256 else (528, 132))


@pytest.mark.quick("each choice takes milliseconds")
@pytest.mark.parametrize("most, small, fields", [
    (128, 128, {}), (1025, 1025, {}), (4096, 4096, {}), (4681, 4681, {}), (4682, 0, {}),
    (2340, 2340, {"combine_dtype": torch.float32}), (2341, 0, {"combine_dtype": torch.float32}),
], ids=str)  # fmt: skip
def test_sums_of_two_copies_go_without_flags_where_there_is_more_room(most, small, fields):
    sizes = {"num_experts": 256, "topk": 8, "hidden_size": 7168, "max_tokens_per_rank": most, "world_size": 2}
    workspace = workspaces.Workspace(moelink.EPConfig(**sizes, layout="rank", **fields))
    assert workspace.lamport_tokens == small
    assert ("lamport_slots" in {region.name for region in workspace.regions}) == (small > 0)
