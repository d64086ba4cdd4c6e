"""The symmetric transport between nodes as users meet it, ``ranks_per_node`` forced on one machine; and its parts."""

from __future__ import annotations

import functools
import itertools
import threading
import time

import pytest
import torch

import moelink
from moelink.errors import MoelinkError, UnsupportedError
from moelink.memory import NetworkProxy, SymmetricMemory, create_all
from moelink.memory.nodes import network
from moelink.memory.nodes.network import ProxyNetwork
from moelink.memory.protocol import RING_ENTRY_WORDS, RING_HEADER_WORDS
from moelink.memory.workspace import Workspace
from moelink.testing import rank_data, run_ranks
from moelink.transports.build import choose_transport
from tests.support.fault_ranks import refusals
from tests.support.patience import HANG, hurry, join, meet

CPU = torch.device("cpu")


def split_calls(rank: int, world_size: int) -> bool:
    """The split form, graphs of calls in which dispatches and combines do not alternate, other counts each time."""
    fields = dict(num_experts=6, topk=2, hidden_size=32, max_tokens_per_rank=5, ranks_per_node=1)
    with moelink.init(**fields, transport="symmetric", timeout=60.0) as ep:
        for call, tokens in enumerate((5, 0, 3)):
            d = rank_data(
                seed=call, rank=rank, num_tokens=(tokens + rank) % 6, hidden_size=32, num_experts=6, topk=2, holes=0.3
            )
            pending = ep.dispatch_async(d.x, d.topk_ids)
            recv = pending.wait()
            again = ep.dispatch(d.x, d.topk_ids, routing=recv)
            outs = [ep.combine_async(recv.tokens, recv).wait(), ep.combine(again.tokens, again)]
            expected = (d.x.float() * (d.topk_ids >= 0).sum(1, keepdim=True)).to(outs[0].dtype)
            assert all(torch.equal(out, expected) for out in outs)
        ep.check()
    return True


def test_split_calls_in_any_order() -> None:
    assert run_ranks(split_calls, 3, timeout=120) == [True] * 3


FIELDS = {
    "num_experts": 6, "topk": 3, "hidden_size": 32, "max_tokens_per_rank": 2, "transport": "symmetric",
    "ranks_per_node": 1,
}  # fmt: skip


def faults(rank: int, world_size: int, fields: dict[str, object]) -> tuple[int, float]:
    """Refusals of either phase, other options, and at last a rank that does not call; every rank is a node."""
    ep = join(**{**FIELDS, **fields})
    d = rank_data(seed=3, rank=rank, num_tokens=2, hidden_size=32, num_experts=6, topk=3)
    refusals(ep, rank, d, {}, {"reduce": False})
    meet()
    hurry(ep)
    if rank == 1:
        meet()
    start = time.monotonic()
    with pytest.raises(moelink.PeerTimeoutError) as told:
        ep.dispatch(d.x, d.topk_ids)
    took = time.monotonic() - start
    if rank == 0:
        meet()
    new = ep.recover([0, 1])
    assert new.config.ranks_per_node is None
    recv = new.dispatch(d.x, d.topk_ids)
    assert torch.equal(new.combine(recv.tokens, recv), d.x * 3)
    new.close()
    return told.value.peer, took


@pytest.mark.parametrize("fields", [{}, {"pre_reduce": False}], ids=["sums", "rows"])
def test_refusals_other_options_absent_ranks_and_recovery(fields: dict[str, object]) -> None:
    for peer, took in run_ranks(faults, 2, fields, timeout=120):
        assert peer == 1
        assert took < HANG


def entry(
    proxy: NetworkProxy, ticket: int, to: int, source: int, nbytes: int, word: int, value: int, peer: int
) -> None:
    at = RING_HEADER_WORDS + ticket * RING_ENTRY_WORDS
    proxy.ring[at : at + RING_ENTRY_WORDS] = torch.tensor([to, source, nbytes, word, value, peer, 0, ticket + 1])


def test_the_docstrings_put() -> None:
    memories = create_all([CPU] * 4, 4096)
    base = int(memories[0].pointers[0])
    memories[0].local[0x800:0x820] = torch.arange(32, dtype=torch.uint8)
    proxy = NetworkProxy(memories[0], max_puts=4, delay=0.0)
    entry(proxy, 0, base + 0x40, base + 0x800, 32, base + 8, 7, 3)
    there = memories[3].local
    while there[8] != 7:
        assert proxy.step()
    assert torch.equal(there[0x40:0x60], torch.arange(32, dtype=torch.uint8))
    assert int(there.count_nonzero()) == 31 + 1
    proxy.close()


def test_puts_overtake_one_another_and_signals_never_their_data() -> None:
    orders = set()
    for seed in range(10):
        memories = create_all([CPU] * 2, 4096)
        base = int(memories[0].pointers[0])
        memories[0].local[2048:] = 1
        proxy = NetworkProxy(memories[0], max_puts=8, seed=seed, delay=0.0)
        for put in range(4):
            entry(proxy, put, base + 256 * put + 256, base + 2048, 200, base + 8 * put, 1, 1)
        arrived: list[int] = []
        there = memories[1].local
        while proxy.step():
            for put in range(4):
                if there[8 * put] == 1 and put not in arrived:
                    assert int(there[256 * put + 256 :][:200].sum()) == 200
                    arrived.append(put)
        assert sorted(arrived) == [0, 1, 2, 3]
        orders.add(tuple(arrived))
        proxy.close()
    assert len(orders) > 5


@pytest.mark.parametrize(
    "put",
    [(-8, 0, 8, 0, 1, 1), (4096, 0, 8, 0, 1, 1), (0, 4090, 8, 0, 1, 1), (0, 0, 0, 0, 1, 1), (0, 0, 8, 4096, 1, 1),
     (0, 0, 8, 0, 1, 2)],
    ids=["to before", "to behind", "source", "bytes", "signal", "peer"],
)  # fmt: skip
def test_a_put_outside_the_blocks_is_refused(put: tuple[int, ...]) -> None:
    memories = create_all([CPU] * 2, 4096)
    base = int(memories[0].pointers[0])
    proxy = NetworkProxy(memories[0], max_puts=4)
    to, source, nbytes, word, value, peer = put
    entry(proxy, 0, base + to, base + source, nbytes, base + word, value, peer)
    with pytest.raises(ValueError, match="expected a put "):
        proxy.step()


def small_network(delay: float, monkeypatch: pytest.MonkeyPatch) -> tuple[ProxyNetwork, list[SymmetricMemory]]:
    workspace = Workspace(config(2, ranks_per_node=1, max_tokens_per_rank=2, hidden_size=32))
    memories = create_all([CPU] * 2, workspace.nbytes)
    monkeypatch.setattr(network, "NetworkProxy", functools.partial(NetworkProxy, delay=delay))
    return ProxyNetwork(memories[0], workspace, 0), memories


def test_what_a_rank_put_arrives_though_it_never_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, memories = small_network(600.0, monkeypatch)
    base, there = int(memories[0].pointers[0]), memories[1].local
    for put in range(3):
        entry(mine.proxy, put, base + 64, base + 128, 8, base + 8 * put, 1, 1)
    threads = threading.active_count()
    del mine  # and so it is when the interpreter ends: ``weakref.finalize``
    assert [int(there[8 * put]) for put in range(3)] == [1, 1, 1]
    assert threading.active_count() == threads - 1


def failing_proxy(rank: int, world_size: int) -> tuple[str, float]:
    """Rank 0's network proxy meets a put that it cannot carry, in the middle of a call that waits for ever."""
    ep = join(**FIELDS)
    d = rank_data(seed=3, rank=rank, num_tokens=2, hidden_size=32, num_experts=6, topk=3)
    recv = ep.dispatch(d.x, d.topk_ids)
    meet()
    hurry(ep, 3.0)
    if rank == 0:
        mine = ep._session.transport.ranks[0].network.proxy  # type: ignore[attr-defined]
        ticket = int(mine.ring[0])
        mine.ring[0] += 1
        entry(mine, ticket, 0, 0, 8, 0, 1, 1)

    def two_calls() -> None:
        for _ in range(2):  # the first one may end before the network proxy gets there
            ep.combine(recv.tokens, recv)

    start = time.monotonic()
    with pytest.raises(MoelinkError) as told:
        two_calls()
    took = time.monotonic() - start
    if rank == 0:
        with pytest.raises(MoelinkError, match="rank 0 stopped"):
            ep.check()
        with pytest.raises(MoelinkError, match="rank 0 stopped"):
            ep.close()
    ep.close()
    return str(told.value), took


def test_a_network_proxy_that_fails_is_an_error_of_its_rank() -> None:
    (mine, _), (other, took) = run_ranks(failing_proxy, 2, timeout=60)
    assert mine.startswith("the network proxy of rank 0 stopped: expected a put of bytes in a block of ")
    assert "rank 0 of node 0 did not arrive" in other
    assert took < HANG


def guarded_calls(rank: int, world_size: int) -> bool:
    with moelink.init(**FIELDS, timeout=60.0) as ep:
        d = rank_data(seed=3, rank=rank, num_tokens=2, hidden_size=32, num_experts=6, topk=3)
        recv = ep.dispatch(d.x, d.topk_ids)
        assert torch.equal(ep.combine(recv.tokens, recv), d.x * 3)
        assert torch.equal(ep.combine(recv.tokens, recv, reduce=False).sum(1), d.x * 3)
    return True


def test_the_debug_mode_knows_what_carries_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELINK_DEBUG", "1")
    assert run_ranks(guarded_calls, 2, timeout=60) == [True] * 2


def config(world_size: int = 8, **fields: object) -> moelink.EPConfig:
    base = dict(num_experts=256, topk=8, hidden_size=7168, max_tokens_per_rank=128, world_size=world_size)
    return moelink.EPConfig(**{**base, **fields})


def test_send_buffers_are_there_across_nodes_only() -> None:
    one, across = (Workspace(config(ranks_per_node=ranks)) for ranks in (8, 2))
    assert one.nbytes == Workspace(config()).nbytes
    assert not [region.name for region in one.regions if "staged" in region.name]
    staged = sum(region.nbytes for region in across.regions if region.name.startswith("staged"))
    rows = 6 * 128 * (across.message_bytes + across.row_bytes)
    assert rows <= staged < 1.01 * rows + 2**16
    assert across.nbytes < 1.05 * one.nbytes + staged
    capped = Workspace(config(ranks_per_node=2, pre_reduce=False, capacity=300))
    assert capped.regions["staged_rows"].shape == (300, capped.row_bytes)


def test_there_is_room_for_every_put() -> None:
    for pre_reduce, ranks in itertools.product((True, False), (1, 2, 4)):
        workspace = Workspace(config(ranks_per_node=ranks, pre_reduce=pre_reduce, capacity=500))
        far, tokens = 8 - ranks, 128
        dispatch = far * tokens + 2 * far
        combine = far + far * tokens + (0 if pre_reduce else 500)
        assert workspace.max_puts >= dispatch + combine + 2 * far + far


def test_which_transport() -> None:
    cuda = torch.device("cuda", 0)
    assert choose_transport(config(ranks_per_node=4), [cuda]) == "collective"
    assert choose_transport(config(ranks_per_node=4, transport="symmetric"), [cuda], machines=2) == "symmetric"
    assert choose_transport(config(ranks_per_node=4, transport="symmetric"), [CPU]) == "symmetric"
    for fields, devices, machines, told in (
        ({}, [cuda], 2, "expected ranks_per_node"),
        ({"ranks_per_node": 4}, [CPU], 2, "expected all 8 ranks on one machine for CPUs"),
        ({"ranks_per_node": 4}, [torch.device("cuda", i) for i in range(8)], 1, "8 devices are in one node"),
    ):
        with pytest.raises(UnsupportedError, match=told):
            choose_transport(config(transport="symmetric", **fields), devices, machines=machines)
