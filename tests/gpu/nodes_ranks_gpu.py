"""What each rank does in the GPU tests between nodes: processes with a device each, and nodes forced on one machine."""

from __future__ import annotations

from typing import Any

import torch

import moelink
from tests.gpu import gpu_ranks
from tests.gpu.gpu_compile import FUSED, HALVES, Kernel, kernels_of
from tests.gpu.gpu_ranks import prepare
from tests.support.cases import FORMATS, SCENARIOS, Case, Result, Setup, by_setup, run_case

TIMEOUT = 100.0
SHAPE = {"num_experts": 8, "topk": 1, "hidden_size": 128, "max_tokens_per_rank": 1, "transport": "symmetric"}


def all_cases() -> list[Case]:
    """Every format, as sums and as rows on their way home, in every scenario."""
    return [
        Case(Setup(fmt, (("pre_reduce", pre_reduce),)), scenario, seed=seed)
        for fmt in FORMATS
        for pre_reduce in (True, False)
        for seed, scenario in enumerate(SCENARIOS)
    ]


def kernels(world_size: int, node: int, case_list: list[Case]) -> list[Kernel]:
    """What :func:`run_nodes` launches. Kernels with NVSHMEM's code in them take long to compile."""
    found = []
    for setup, _ in by_setup(case_list):
        dtype = torch.float64 if setup.dispatch_format == "fp64" else torch.bfloat16
        fields = {**setup.fields, "ranks_per_node": node}
        found += kernels_of(fields, world_size, (*FUSED, *HALVES), input_dtype=dtype)
    return found


def run_split(ep: moelink.Communicator, case: Case, rank: int) -> Result:
    """``cases.run_case`` with each call in its two halves."""
    data = case.data(rank)
    x, ids, weights = (t.to(ep.device) for t in (data.x, data.topk_ids, data.topk_weights))
    recv = ep.dispatch_async(x, ids, weights).wait()
    y = case.expert_rows(rank, recv.tokens.shape[0]).to(ep.device)
    return Result.of(recv, ep.combine_async(y, recv).wait())


def run_nodes(rank: int, world_size: int, node: int, case_list: list[Case]) -> list[tuple[Result, Result, list[int]]]:
    """Every case in one launch a call, then in two; and the ranks whose blocks this one addresses."""
    prepare(rank)
    results = []
    for setup, group in by_setup(case_list):
        with moelink.init(**setup.fields, transport="symmetric", ranks_per_node=node, timeout=TIMEOUT) as ep:
            near = ep._session.transport.ranks[0].memory.pointers.nonzero().flatten().tolist()
            results += [(run_case(ep, case, rank), run_split(ep, case, rank), near) for case in group]
            ep.check()
    return results


def absent_rank(rank: int, world_size: int, node: int) -> dict[str, Any]:
    """``gpu_ranks.absent_rank``, whose limits are short, once NVSHMEM has started."""
    prepare(rank)
    moelink.init(**SHAPE, ranks_per_node=node, timeout=TIMEOUT).close()
    return gpu_ranks.absent_rank(rank, world_size, {"ranks_per_node": node})


def one_node_afterwards(rank: int, world_size: int, node: int) -> str:
    """What a communicator of one node says in a process that has had one between nodes."""
    prepare(rank)
    for _ in range(3):  # blocks of closed ones stay; new ones are others
        moelink.init(**SHAPE, ranks_per_node=node).close()
    try:
        moelink.init(**SHAPE).close()
    except moelink.UnsupportedError as error:
        return str(error)
    return "no error"
