"""How many rows each expert got: on the device, and on the host with ``host_counts=True``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moelink
from cases import Case, Setup, check_case
from op_layers import IDS, H, T, one_rank
from test_devices import run_devices

EXPERT: list[dict[str, Any]] = [
    {"expert_alignment": 4, "fused_shared_expert": True},
    {"expert_alignment": 4, "fused_shared_expert": True, "capacity": 9},
    {"mode": "allreduce"},
]
RANK: list[dict[str, Any]] = [
    {"layout": "rank"},
    {"layout": "rank", "capacity": 2},
    {"layout": "rank", "mode": "allreduce"},
]


@pytest.mark.quick("each transport counts in a way of its own")
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("options", [EXPERT, RANK], ids=["expert", "rank"])
def test_counts_per_expert_are_those_of_the_oracle(
    transport: str, options: list[dict[str, Any]], filled_memory: None
) -> None:
    for each in options:
        case = Case(Setup("bf16", tuple(each.items())), "repeats", small=True)
        with moelink.init_devices(["cpu"] * 2, **case.setup.fields, transport=transport) as ep:
            check_case(case, 2, run_devices(ep, case, 2))


def test_a_rank_without_experts_counts_none() -> None:
    with moelink.init_devices(["cpu"] * 2, num_experts=1, topk=1, hidden_size=8, max_tokens_per_rank=2) as ep:
        x, ids = torch.ones(2, 8, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int32)
        recvs = ep.dispatch([x, x], [ids, ids], host_counts=True)
        assert [recv.host_counts for recv in recvs] == [[4], []]
        assert [recv.num_recv_per_expert.tolist() for recv in recvs] == [[4], []]


def test_operators_give_the_list_too() -> None:
    with one_rank() as ep:
        x = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
        assert ep.dispatch(x, IDS, host_counts=True).host_counts == [2, 2, 2, 2]
        assert ep.dispatch_async(x, IDS, host_counts=True).wait().host_counts == [2, 2, 2, 2]
        assert ep.dispatch(x, IDS).host_counts is None
        counts = torch.compile(lambda: ep.dispatch(x, IDS).num_recv_per_expert, backend="aot_eager", fullgraph=True)
        assert counts().tolist() == [2, 2, 2, 2]


def test_a_reused_output_does_not_keep_the_list() -> None:
    with one_rank() as ep:  # IDS fill the worst case, so an exact output has the size of any
        x = torch.randn(T, H).bfloat16()
        exact = ep.dispatch(x, IDS, host_counts=True)
        again = ep.dispatch(x, torch.zeros_like(IDS), out=exact)
        assert again.host_counts is None
        assert again.num_recv_per_expert.tolist() == [8, 0, 0, 0]
