"""Ranks are masked while the network between nodes has puts under way, in processes and at a proxy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moelink.errors import UnsupportedError
from moelink.memory import NetworkProxy, create_all
from moelink.ops import changes
from moelink.testing import run_ranks
from moelink.transports.build import choose_transport, refuse_nvshmem
from moelink_testing.network import Cut, NetworkFaults
from tests.nodes import network_ranks
from tests.nodes.test_nodes import config, entry
from tests.support.patience import until

FAR = 1 << 20
"""Seconds that no put takes in a test."""


@pytest.mark.quick("milliseconds, and another fault each")
@pytest.mark.parametrize("taken", [True, False], ids=["under way", "in the ring"])
def test_no_put_of_before_arrives_after_a_change(taken: bool) -> None:
    """Tickets begin anew, so the first entries of before are overwritten. Nothing goes to a masked rank."""
    memories = create_all(["cpu"] * 3, 4096)
    base = int(memories[0].pointers[0])
    proxy = NetworkProxy(memories[0], max_puts=4, delay=FAR)
    for ticket in range(3):
        entry(proxy, ticket, base + 0x40, base + 0x800, 32, base + 8, 7, 1)
    if taken:
        assert not proxy.step()  # they are taken, and not due
    with proxy.without([2]):
        memories[1].local.zero_()  # in the place of another block
    proxy._delay = 0.0
    for ticket, peer in enumerate((2, 1)):
        entry(proxy, ticket, base + 0x80, base + 0x800, 32, base + 16, 9, peer)
    until(lambda: int(memories[1].local[16]) == 9)
    proxy.close()  # what is under way arrives now
    assert memories[1].local[8] == 0
    assert not memories[2].local.any()


def test_a_proxy_that_stopped_goes_on_after_a_change() -> None:
    memories = create_all(["cpu"] * 2, 4096)
    proxy = NetworkProxy(memories[0], max_puts=4)
    entry(proxy, 0, 0, 0, 8, 0, 1, 1)  # outside of the block
    proxy.start()
    until(lambda: proxy.failure is not None)
    with proxy.without([]):
        pass
    assert proxy.failure is None
    proxy.close()


CUT = {r: NetworkFaults(cuts=tuple(Cut(peer, after=30) for peer in ((2,) if r < 2 else (0, 1)))) for r in (0, 1, 2)}
LATE = {r: NetworkFaults(late=0.5, latest=1.0) for r in range(4)}


def test_a_late_put_of_a_member_misses_the_new_blocks() -> None:
    assert run_ranks(network_ranks.late_put_of_before, 3) == [0, 0, 0]


@pytest.mark.full(
    "waits for failed calls; the tests above and test_protocol_masked_nodes.py see what late puts would do"
)
@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("faults", [LATE, CUT], ids=["late", "cut"])
def test_a_rank_is_masked_over_a_network_that_fails(faults: dict[int, NetworkFaults], levels: bool) -> None:
    """Rank 2 of two nodes of two dies, or is cut off. Puts of before are late, or never arrive."""
    dies = faults is LATE
    told = run_ranks(
        network_ranks.masked_over_a_network, 4, faults, dies, levels, mortal={2} if dies else (), timeout=300
    )
    assert told == [4, 4, None if dies else 0, 4]


@pytest.mark.full("waits for failed calls; test_protocol_masked_nodes.py has the calls without a node")
@pytest.mark.parametrize("levels", [False, True])
def test_a_node_dies(levels: bool) -> None:
    told = run_ranks(network_ranks.node_dies, 4, levels, mortal={2, 3}, timeout=300)
    assert told == [(2, 3), (2, 3), None, None]


def test_what_cannot_be_between_nodes_is_refused_by_name() -> None:
    assert run_ranks(network_ranks.refused_between_nodes, 2) == [True] * 2


def test_nvshmem_masks_no_rank() -> None:
    sizes = config(2, ranks_per_node=1, transport="symmetric", on_failure="mask")
    with pytest.raises(UnsupportedError, match="on_failure='mask': expected a network that goes on .* got NVSHMEM"):
        choose_transport(sizes, [torch.device("cuda", 0)])
    assert choose_transport(sizes, [torch.device("cpu")]) == "symmetric"


def test_mask_and_admit_are_refused_over_nvshmem_before_anything_is_sent() -> None:
    sizes = config(2, ranks_per_node=1, transport="symmetric")
    session = SimpleNamespace(
        require_open=lambda what: None, configs=[sizes], devices=[torch.device("cuda", 0)], detector=object()
    )
    lanes: Any = SimpleNamespace(contexts=[SimpleNamespace(session=session)])
    with pytest.raises(UnsupportedError, match="mask: expected a network that goes on .* got NVSHMEM"):
        changes.mask(lanes, [1])
    with pytest.raises(UnsupportedError, match="admit: expected ranks of one node .* masked but not admitted"):
        changes.admit(lanes, [1], None)


def test_nvshmem_is_no_reason_where_nothing_travels() -> None:
    sizes = config(2, ranks_per_node=1, transport="symmetric", mode="allreduce")
    refuse_nvshmem("mask", sizes, torch.device("cuda", 0))
