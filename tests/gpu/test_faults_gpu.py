"""Ranks that die or stop while their kernels run, a process and a device each. Run by hand: ``-m gpu``."""

import pytest
import torch
import torch.distributed as dist

from moelink.testing import run_ranks
from tests.gpu import fault_ranks_gpu
from tests.gpu.fault_ranks_gpu import TIMEOUT, WITH_FLAGS, WITHOUT_FLAGS

WORLD = min(4, torch.cuda.device_count())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WORLD < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]

FALLS = [
    ("killed", "dispatch", 0, WITHOUT_FLAGS),
    ("killed", "combine", 1, WITH_FLAGS),
    ("killed", "combine", 1, WITHOUT_FLAGS),
    ("killed", "running", WORLD - 1, WITH_FLAGS),
    ("stopped", "dispatch", 1, WITHOUT_FLAGS),
]


@pytest.mark.kernels(of=lambda most: fault_ranks_gpu.kernels(WORLD, most))
@pytest.mark.parametrize("how, place, victim, most", FALLS, ids=lambda value: str(value))
def test_the_others_name_it_in_time_and_go_on_without_it(how: str, place: str, victim: int, most: int) -> None:
    mortal = {victim} if how == "killed" else set()
    results = run_ranks(fault_ranks_gpu.falls, WORLD, victim, how, place, most, mortal=mortal, timeout=250)
    for rank, result in enumerate(results):
        if rank == victim:
            assert result is None or result["told"].peer == victim
            continue
        told = result["told"]
        assert (told.rank, told.peer) == (rank, victim)
        assert told.kind == ("PeerLostError" if how == "killed" else "PeerTimeoutError")
        assert told.phase in ("dispatch", "combine")
        assert told.took < TIMEOUT + 1
        assert result["recovered"] < 60, "kernels of the new number of ranks may have to be compiled afterwards"


@pytest.mark.kernels(of=lambda world, most: fault_ranks_gpu.kernels(world, most))
@pytest.mark.parametrize("world, most, place", [
    (2, WITHOUT_FLAGS, "dispatch"), (2, WITH_FLAGS, "running"), (WORLD, WITHOUT_FLAGS, "running"),
])  # fmt: skip
def test_a_rank_leaves_and_returns_while_graphs_go_on(world: int, most: int, place: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run_ranks(
        fault_ranks_gpu.leaves_and_returns, world + 1, most, place, store.port, mortal={world - 1}, timeout=250
    )
    assert results.pop() is results.pop() is None
    for result in results:
        assert (result["told"].kind, result["told"].peer) == ("PeerLostError", world - 1)
        assert all(0 < seconds < 30 for seconds in result["seconds"].values()), result
        # Torch's block, which was there before, and a new one.
        assert result["grown"] <= result["block"] + 2**23, "memory of earlier memberships is kept"
