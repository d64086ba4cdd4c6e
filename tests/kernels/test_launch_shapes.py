"""Results do not depend on how a launch is cut: programs of each role, tokens and messages at a time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moelink
import moelink.memory.workspace as workspaces
from moelink.kernels.launch import grid as cut
from moelink.kernels.launch.grid import Launch
from moelink.transports.symmetric import combine as combining
from moelink.transports.symmetric import plans as dispatching
from tests.support.cases import Case, Result, Setup, check_case
from tests.support.symmetric_ranks import combine_requests, dispatch_requests, one_process, over, run_case

WORLD = 3
SHAPES = [  # programs that send and that receive; tokens and messages at a time
    (1, 1, 1, 1),
    (7, 5, 2, 2),
    (2, 9, 1, 4),
    (20, 16, 4, 1),
]
SETUPS = [
    Setup("fp8_block128", (("expert_alignment", 3),)),
    Setup("bf16", (("pre_reduce", False), ("fused_shared_expert", True))),
    Setup("nvfp4", (("layout", "rank"),)),
]


@pytest.mark.parametrize("setup, shape", [
    (1, 1), (0, 0), (2, 0), (2, 1), (0, 2), (1, 2), (1, 3), (2, 3)
])  # fmt: skip
def test_equals_oracle(monkeypatch, setup, shape):
    setup, shape = SETUPS[setup], SHAPES[shape]
    send, receive, batch, gather = shape
    spec_of = dispatching.dispatch_spec
    monkeypatch.setattr(dispatching, "dispatch_launch", lambda *args, **options: Launch(send, receive))
    monkeypatch.setattr(combining, "combine_launch", lambda *args, **options: Launch(receive, send))
    monkeypatch.setattr(
        dispatching, "dispatch_spec",
        lambda *args, **options: dataclasses.replace(spec_of(*args, **options), TOKENS_PER_BATCH=batch,
        MESSAGES_PER_STEP=gather),
    )  # fmt: skip
    transport = one_process(setup.fields, WORLD)
    for case in (Case(setup, "uniform", seed=3), Case(setup, "one_rank_empty", seed=5)):
        ranks = range(WORLD)
        requests = dispatch_requests(case, ranks)
        first = transport.dispatch(requests).wait()
        again = transport.dispatch(over(first, [dataclasses.replace(r, x=-r.x) for r in requests])).wait()
        for recvs in (first, transport.dispatch(over(again, requests)).wait()):
            outs = transport.combine(combine_requests(case, ranks, recvs)).wait()
            check_case(case, WORLD, [
                Result.of(recv, out)
                for recv, out in zip(recvs, outs, strict=True)
            ])  # fmt: skip
    transport.check()
    transport.close()


@pytest.mark.parametrize("send, receive", [(3, 1), (2, 40), (1, 5)])
def test_whole_rows_that_need_no_flags_equal_oracle(monkeypatch, blocks, send, receive):
    """As of 257 to 1024 tokens: rows of 44 columns travel whole, in three blocks, several a program."""
    blocks(16, few=2)
    monkeypatch.setattr(combining, "combine_launch", lambda *args, **options: Launch(send, receive))
    setup = Setup("bf16", (("hidden_size", 44),))
    workspace = workspaces.Workspace(setup.config(WORLD))
    assert (workspace.combine_parts, workspace.lamport_tokens) == (1, workspace.config.max_tokens_per_rank)
    transport = one_process(setup.fields, WORLD)
    for seed in range(2):
        case = Case(setup, "uniform", seed=seed)
        check_case(case, WORLD, run_case(transport, case, range(WORLD)))
    transport.check()
    transport.close()


@pytest.mark.parametrize("reduce", [True, False], ids=["sums", "rows"])
@pytest.mark.parametrize("send, receive, spread", [(3, 1, 3), (2, 40, 1), (7, 40, 3), (1, 5, 1)])
def test_rows_in_parts_equal_oracle(monkeypatch, blocks, send, receive, spread, reduce):
    """Blocks of 16 columns: rows of 44 travel home in 3 parts."""
    blocks(16)
    monkeypatch.setattr(combining, "combine_launch", lambda *args, **options: Launch(send, receive, spread=spread))
    setup = Setup("bf16", (("hidden_size", 44), ("pre_reduce", reduce)))
    assert workspaces.Workspace(setup.config(WORLD)).combine_parts == 3
    transport = one_process(setup.fields, WORLD)
    case = Case(setup, "uniform", seed=3)
    check_case(case, WORLD, run_case(transport, case, range(WORLD)))
    transport.check()
    transport.close()


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
