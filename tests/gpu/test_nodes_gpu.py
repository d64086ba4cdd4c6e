"""Symmetric transport between nodes over NVSHMEM, a process per GPU. Run by hand on one machine: ``-m gpu``.

Nodes are forced by ``ranks_per_node``. NVSHMEM reaches the GPUs of one machine over NVLink, so this tests the kernels,
the puts and the signals as NVSHMEM carries them there; what a network card does needs two machines.
"""

import pytest
import torch

from moelink.errors import UnsupportedError
from moelink.memory.nodes.nvshmem import device_library
from moelink.testing import run_ranks
from tests.gpu import gpu_ranks, nodes_ranks_gpu
from tests.gpu.gpu_compile import kernels_of, kernels_of_all, warmup_kernels
from tests.support.cases import check_case

DEVICES = torch.cuda.device_count()
SPLITS = [(world, node) for world, node in ((2, 1), (4, 2), (8, 2), (8, 4)) if world <= DEVICES]


def what_is_missing():
    """Why these tests cannot run here, or an empty text."""
    if DEVICES < 2:
        return "needs two CUDA devices"
    try:
        from torch.distributed._symmetric_memory import is_nvshmem_available

        device_library()
    except (ImportError, UnsupportedError) as error:
        return f"needs NVSHMEM: {error}"
    return "" if is_nvshmem_available() else "needs NVSHMEM, which this torch has not"


MISSING = what_is_missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.timeout(900),
]
REAL = (0, 1, 4, 7)
"""Of ``gpu_ranks.REAL_SIZES``."""
each_split = pytest.mark.parametrize("world, node", SPLITS or [(2, 1)])


def real_kernels(world, node):
    return kernels_of_all((gpu_ranks.real_fields(index) | {"ranks_per_node": node} for index in REAL), world)


@pytest.mark.kernels(of=lambda world, node: nodes_ranks_gpu.kernels(world, node, nodes_ranks_gpu.all_cases()))
@each_split
def test_equals_oracle(world, node):
    """Bit for bit what the oracle says, so also what a communicator of one node gives."""
    cases = nodes_ranks_gpu.all_cases()
    results = run_ranks(nodes_ranks_gpu.run_nodes, world, node, cases, timeout=850)
    for index, case in enumerate(cases):
        for way in (0, 1):
            check_case(case, world, [result[index][way] for result in results])
    for rank, result in enumerate(results):
        assert all(near == list(range(rank // node * node, rank // node * node + node)) for _, _, near in result)


@pytest.mark.kernels(of=real_kernels)
@each_split
def test_equals_collective_at_real_sizes(world, node):
    for done in run_ranks(gpu_ranks.equals_collective, world, REAL, {"ranks_per_node": node}, timeout=850):
        assert len(done) == len(REAL)


@pytest.mark.kernels(of=lambda world, node: kernels_of(gpu_ranks.graph_fields(world) | {"ranks_per_node": node}, world))
@each_split
def test_graphs_replay_with_other_inputs_and_sizes(world, node):
    for rank, results in enumerate(run_ranks(gpu_ranks.graphs, world, {"ranks_per_node": node}, timeout=600)):
        assert all(results.values()), (rank, results)


@pytest.mark.kernels(of=lambda world, node: kernels_of(gpu_ranks.MANY | {"ranks_per_node": node}, world))
@each_split
def test_five_thousand_calls(world, node):
    for wrong, _ in run_ranks(gpu_ranks.many_calls, world, 5_000, {"ranks_per_node": node}, timeout=600):
        assert wrong == 0


@pytest.mark.kernels(of=lambda world, node: warmup_kernels(gpu_ranks.ABSENT | {"ranks_per_node": node}, world))
@each_split
def test_a_rank_that_never_calls_is_named_in_time(world, node):
    results = run_ranks(nodes_ranks_gpu.absent_rank, world, node, timeout=600)
    for rank, result in enumerate(results):
        if rank == 1:
            assert result["told"] == 1
            continue
        assert (result["error"], result["peer"], result["later"]) == ("PeerTimeoutError", 1, "rank 1")
        assert 2.9 < result["took"] < 4.0
        assert set(result["offsets"]) == {0}
        assert result["alive"]


def test_a_process_has_one_backend():
    for text in run_ranks(nodes_ranks_gpu.one_node_afterwards, 2, 1, timeout=300):
        assert "expected backend 'CUDA' for ranks of one node" in text
