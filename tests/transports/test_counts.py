"""How many rows each expert got: on the device, and on the host with ``host_counts=True``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moelink
from moelink.testing import run_ranks
from tests.gpu.gpu_compile import warmup_kernels
from tests.ops.op_layers import IDS, H, T, one_rank

COUNTED: dict[str, Any] = {"num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": T}


@pytest.mark.quick("each transport fills in a way of its own")
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("global_ids", [True, False])
def test_ids_of_unused_rows_are_minus_one_again_in_a_reused_output(transport: str, global_ids: bool) -> None:
    """Also over a routing, where ids are an output as well, and where no row comes."""
    fields = {"num_experts": 3, "topk": 2, "hidden_size": 8, "max_tokens_per_rank": 3, "layout": "rank"}
    with moelink.init_devices(["cpu"] * 2, **fields, global_ids=global_ids, transport=transport) as ep:
        x, ids = torch.ones(3, 8, dtype=torch.bfloat16), torch.tensor([[2, 1], [0, 0], [-1, 2]])
        full = ep.dispatch([x, x], [torch.full_like(ids, 2)] * 2)
        recvs = ep.dispatch([x, x], [ids, ids], out=full)
        id_2 = 2 if global_ids else 0
        assert recvs[0].topk_ids.tolist() == [[-1, 1], [0, 0], [-1, 1], [0, 0], [-1, -1], [-1, -1]]
        assert recvs[1].topk_ids.tolist() == [[id_2, -1], [-1, id_2]] * 2 + [[-1, -1]] * 2
        assert [recv.num_recv_per_expert.tolist() for recv in recvs] == [[4, 2], [4]]
        recvs[1].topk_ids.fill_(7)
        again = ep.dispatch([x, x], None, routing=recvs, out=recvs)
        assert again[1].topk_ids.tolist() == [[id_2, -1], [-1, id_2]] * 2 + [[-1, -1]] * 2
        none = ep.dispatch([x, x], [torch.full_like(ids, -1)] * 2, out=again)
        assert (none[1].topk_ids == -1).all()
        assert none[1].num_recv_per_expert.tolist() == [0]


def test_global_ids_are_those_of_layout_rank() -> None:
    with pytest.raises(moelink.ConfigError, match="global_ids: expected False with layout='expert'"):
        one_rank(global_ids=True)
    with pytest.raises(moelink.ConfigError, match="global_ids: expected True or False"):
        one_rank(layout="rank", global_ids=1)


def operators_count_global_ids(rank: int, world_size: int) -> bool:
    fields = {"num_experts": 4, "topk": 2, "hidden_size": H, "max_tokens_per_rank": T, "layout": "rank"}
    with moelink.init(**fields, global_ids=True, timeout=60) as ep:
        x = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
        recv = ep.dispatch(x, IDS, host_counts=True)
        assert set(recv.topk_ids.flatten().tolist()) == {-1, 2 * rank, 2 * rank + 1}
        assert recv.host_counts == [4, 4]
    return True


def test_operators_count_global_ids() -> None:
    assert run_ranks(operators_count_global_ids, 2) == [True] * 2


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.kernels(of=lambda layout: warmup_kernels(COUNTED | {"layout": layout}, 1))
def test_a_graph_counts_anew_at_each_replay(layout: str) -> None:
    with moelink.init(**COUNTED, layout=layout, device="cuda", transport="symmetric") as ep:
        x, ids = torch.randn(T, 128, device="cuda").bfloat16(), IDS.cuda()
        ep.warmup()
        ep.dispatch(x, ids).num_recv_per_expert  # noqa: B018 - loads the kernels that it uses
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recv = ep.dispatch(x, ids)
            counts = recv.num_recv_per_expert
        for wanted, value in (([2, 2, 2, 2], IDS), ([0, 8, 0, 0], torch.ones_like(IDS)), ([0] * 4, IDS * 0 - 1)):
            ids.copy_(value)
            graph.replay()
            assert counts.tolist() == wanted
            if recv.topk_ids is not None:
                assert (recv.topk_ids[int(recv.row_offsets[-1]) :] == -1).all()
