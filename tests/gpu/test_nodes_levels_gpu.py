"""Two levels between nodes over NVSHMEM, a process per GPU: four GPUs of one machine or more, run by hand.

``pytest -m gpu tests/gpu/test_nodes_levels_gpu.py``. Nodes are forced by ``ranks_per_node``, as in ``test_nodes_gpu``.
``-s`` shows what calls take with one level and with two; over NVLink between all GPUs one level has nothing to save.
"""

import pytest

from moelink.testing import run_ranks
from tests.gpu import gpu_ranks, levels_ranks_gpu
from tests.gpu.gpu_compile import kernels_of
from tests.gpu.test_nodes_gpu import DEVICES, MISSING
from tests.nodes import levels_ranks
from tests.support.cases import check_case

SPLITS = [(world, node) for world, node in ((4, 2), (8, 2), (8, 4), (6, 3), (6, 2)) if world <= DEVICES]
WHY = MISSING or ("" if SPLITS else "needs four CUDA devices")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(WHY), reason=WHY),
    pytest.mark.timeout(900),
]
each_split = pytest.mark.parametrize("world, node", SPLITS or [(4, 2)])


@pytest.mark.kernels(of=lambda world, node: levels_ranks_gpu.kernels(world, node))
@each_split
def test_equals_oracle(world, node):
    cases = levels_ranks.cases_of(node)
    results = run_ranks(levels_ranks_gpu.run_levels, world, node, timeout=850)
    for index, case in enumerate(cases):
        case = levels_ranks.in_two_levels(case)
        for way in (0, 1):
            found = [result[index][way] for result in results]
            if None not in found:
                check_case(case, world, found)


@pytest.mark.kernels(of=lambda world, node: levels_ranks_gpu.real_kernels(world, node))
@each_split
def test_equals_one_level_at_real_sizes(world, node):
    for done in run_ranks(levels_ranks_gpu.equals_one_level, world, node, timeout=850)[:1]:
        print("", *done, sep="\n")
        assert len(done) == len(levels_ranks_gpu.REAL)


@pytest.mark.kernels(
    of=lambda world, node: kernels_of(gpu_ranks.graph_fields(world) | levels_ranks_gpu.levels(node), world)
)
@each_split
def test_graphs_replay_with_other_inputs_and_sizes(world, node):
    for rank, results in enumerate(run_ranks(gpu_ranks.graphs, world, levels_ranks_gpu.levels(node), timeout=600)):
        assert all(results.values()), (rank, results)


@pytest.mark.kernels(of=lambda world, node: kernels_of(gpu_ranks.MANY | levels_ranks_gpu.levels(node), world))
@each_split
def test_five_thousand_calls(world, node):
    for wrong, _ in run_ranks(gpu_ranks.many_calls, world, 5_000, levels_ranks_gpu.levels(node), timeout=600):
        assert wrong == 0
