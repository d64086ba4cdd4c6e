"""What errors say of a network that fails, whom the failure detector blames, and what a faulty network proxy does."""

from __future__ import annotations

import math

import pytest
import torch

import moelink
from moelink.control import failure_detector
from moelink.control.error_record import ErrorRecord
from moelink.control.failure_detector import FailureDetector
from moelink.control.probe import GONE, INTERRUPTED, UNDELIVERED, Failure
from moelink.memory import NetworkProxy, create_all
from moelink.memory.protocol import CODE_TIMEOUT, CONTROL_WORDS, RECORD_WORDS
from moelink_testing.network import Cut, NetworkFaults
from tests.control import fault_schedules
from tests.control.fault_schedules import PretendedAddress, PretendedProbeServer, Silence
from tests.nodes.test_nodes import entry

WORLD, NODE = 4, 2


@pytest.mark.parametrize("got", [2, GONE, INTERRUPTED, UNDELIVERED])
def test_errors_name_the_peer_and_its_node(got: int) -> None:
    failure = Failure(3, "combine", 5, expected=5, got=got)
    error = failure.error(0, ranks_per_node=NODE)
    assert (error.peer, error.node) == (3, 1)
    assert "rank 3 of node 1" in str(error)
    assert Failure.of(error).got == got
    alone = failure.error(0)
    assert alone.node is None
    assert "rank 3" in str(alone)
    assert "node 1" not in str(alone)


def test_what_does_not_arrive_of_a_rank_that_is_in_the_call() -> None:
    error = Failure(2, "dispatch", 7, expected=7, got=UNDELIVERED).error(1, ranks_per_node=NODE)
    assert isinstance(error, moelink.UndeliveredError)
    assert (error.rank, error.phase, error.call, error.expected, error.got) == (1, "dispatch", 7, 7, None)
    assert str(error) == (
        "rank 1: what rank 2 of node 1 sent in dispatch (call 7) did not arrive over the network: expected its signal "
        "of call 7, got none although it has entered that call; check the network of its node and whether its kernels "
        "run (moelink doctor), then close and init again, or recover without rank 2"
    )


class Detector(FailureDetector):
    """Its peers report something while it waits for that."""

    waited, told = 0, None

    def _await_report(self) -> None:
        self.waited += 1
        self.probe_server.failure = self.told  # type: ignore[misc]


def detector(monkeypatch: pytest.MonkeyPatch, calls: list[int], *, me: int = 0, node: int | None = NODE) -> Detector:
    """That of rank ``me``; ``calls``: the call that each rank has reached, -1 for one that is stopped."""
    monkeypatch.setattr(failure_detector, "probe_all", fault_schedules.probe_all)
    stopped = Silence(calls.index(-1) if -1 in calls else None)
    servers = [PretendedProbeServer((call, "dispatch")) for call in calls]
    addresses = [PretendedAddress(rank, server, stopped) for rank, server in enumerate(servers)]
    return Detector(rank=me, probe_server=servers[me], addresses=addresses, ranks_per_node=node)  # type: ignore[arg-type]


def missing(peer: int, got: int = 4) -> Failure:
    return Failure(peer, "dispatch", 5, expected=5, got=got)


def test_a_rank_of_another_node_that_is_in_the_call_is_undelivered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detector(monkeypatch, [5, 5, 5, 5]).confirm(missing(2)) == missing(2, UNDELIVERED)
    assert detector(monkeypatch, [5, 5, 6, 5]).confirm(missing(2)) == missing(2, UNDELIVERED)


@pytest.mark.parametrize(
    "calls, suspect, node, expected",
    [
        ([5, 5, 5, 5], 1, NODE, missing(1)),
        ([5, 5, 5, 5], 2, None, missing(2)),
        ([5, 5, 4, 5], 2, NODE, missing(2)),
        ([5, 5, 5, 4], 2, NODE, missing(3)),
        ([5, 5, 5, 4], 2, None, missing(2)),
        ([5, 5, 3, 4], 3, NODE, missing(3)),
        ([5, 5, 5, -1], 2, NODE, missing(3, -1)),
    ],
    ids=[
        "own node",
        "one node",
        "a late rank",
        "another is late",
        "another is late on one node",
        "both are late",
        "another is stopped",
    ],
)
@pytest.mark.quick("each has another cause")
def test_what_else_a_signal_that_is_missing_may_mean(
    monkeypatch: pytest.MonkeyPatch, calls: list[int], suspect: int, node: int | None, expected: Failure
) -> None:
    assert detector(monkeypatch, calls, node=node).confirm(missing(suspect)) == expected


def test_who_knows_less_waits_for_what_peers_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is in an earlier call, because it waits for what rank 2 has sent; or this rank is itself the suspect."""
    for calls, suspect in (([5, 4, 5, 5], 1), ([5, 5, 5, 5], 0)):
        mine = detector(monkeypatch, calls)
        mine.told = missing(2, UNDELIVERED)  # type: ignore[assignment]
        assert mine.confirm(missing(suspect)) == missing(2, UNDELIVERED)
        assert mine.waited == 1


def test_a_report_that_the_kernels_do_not_know_of(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = detector(monkeypatch, [5, 5, 5, 5])
    record = torch.zeros(RECORD_WORDS, dtype=torch.int64)
    control = torch.zeros(CONTROL_WORDS, dtype=torch.int64)
    errors = ErrorRecord(record, control, rank=0, me=0, world_size=WORLD, detector=mine, ranks_per_node=NODE)
    assert errors.reported is None
    assert errors.error() is None
    mine.probe_server.failure = missing(3, UNDELIVERED)  # type: ignore[misc]
    assert isinstance(errors.reported, moelink.UndeliveredError)
    record[:7] = torch.tensor([CODE_TIMEOUT, 0, 2, 0, 5, 5, 4])
    assert errors.error() is errors.reported
    assert errors.reported.node == 1


# -- the network proxy ------------------------------------------------------------------------------------------------


class SteppedProxy(NetworkProxy):
    """Its time is a number."""

    now = 0.0

    def _now(self) -> float:
        return self.now


def puts(faults: NetworkFaults, count: int = 40, seed: int = 0) -> tuple[SteppedProxy, list[torch.Tensor]]:
    """A proxy of rank 0 that has ``count`` puts of 24 ones to each of ranks 1 and 2, with signals; and their blocks."""
    memories = create_all(["cpu"] * 3, 8192)
    base = int(memories[0].pointers[0])
    memories[0].local[4096:] = 1
    proxy = SteppedProxy(memories[0], max_puts=2 * count, seed=seed, delay=0.0, faults=faults.links(seed))
    for put in range(2 * count):
        entry(proxy, put, base + 1024 + 24 * (put // 2), base + 4096, 24, base + 8 * (put // 2), 1, 1 + put % 2)
    return proxy, [memory.local for memory in memories]


def arrived(block: torch.Tensor, count: int = 40) -> list[tuple[int, int]]:
    """(signal, bytes of data) of each put."""
    signals, data = block[: 8 * count].view(torch.int64), block[1024 : 1024 + 24 * count].view(count, 24)
    return list(zip(signals.tolist(), data.sum(1, dtype=torch.int64).tolist(), strict=True))


def carry(proxy: NetworkProxy) -> int:
    steps = 0
    while proxy.step():
        steps += 1
    return steps


def test_lost_puts_have_no_signal_and_perhaps_some_data() -> None:
    proxy, blocks = puts(NetworkFaults(lose=0.5, peers=frozenset({2})))
    carry(proxy)
    assert arrived(blocks[1]) == [(1, 24)] * 40
    came = arrived(blocks[2])
    assert all(data == 24 for signal, data in came if signal)
    without = [data for signal, data in came if not signal]
    assert len(without) == len(proxy.lost) >= 10
    assert set(proxy.lost) == {2}
    assert {0, 24} < set(without), "lost at the first piece, at the signal, and in between"
    assert proxy.idle
    proxy.close()


def test_pieces_that_come_again_come_before_the_signal() -> None:
    proxy, blocks = puts(NetworkFaults(repeat=0.5))
    steps = 0
    while proxy.step():
        steps += 1
        for block in blocks[1:]:
            assert all(data == 24 for signal, data in arrived(block) if signal)
            for number, (signal, _) in enumerate(arrived(block)):
                if signal:  # whatever comes after it would write ones again
                    block[1024 + 24 * number : 1048 + 24 * number] = 1
    quiet, _ = puts(NetworkFaults())
    assert steps > carry(quiet) + 40
    for each in (proxy, quiet):
        each.close()


def test_a_piece_never_comes_after_its_signal() -> None:
    proxy, blocks = puts(NetworkFaults(repeat=0.5))
    done: set[int] = set()
    while proxy.step():
        for number, (signal, data) in enumerate(arrived(blocks[1])):
            if number in done:
                assert data == 0, "a piece has come again"
            elif signal:
                done.add(number)
                blocks[1][1024 + 24 * number : 1048 + 24 * number] = 0
    assert len(done) == 40
    proxy.close()


def test_late_puts_come_when_they_are_due() -> None:
    proxy, blocks = puts(NetworkFaults(late=0.5, latest=10.0))
    carry(proxy)
    first = sum(signal for signal, _ in arrived(blocks[1]))
    assert 8 < first < 32
    assert not proxy.idle
    proxy.now = 10.0
    carry(proxy)
    assert arrived(blocks[1]) == [(1, 24)] * 40
    proxy.close()


def test_a_link_is_cut_and_mended() -> None:
    proxy, blocks = puts(NetworkFaults(cuts=(Cut(2, after=0, lasts=5.0), Cut(1, after=50))))
    carry(proxy)
    assert arrived(blocks[1]) == [(1, 24)] * 40, "so many puts have not gone there"
    assert arrived(blocks[2]) == [(0, 0)] * 40
    assert not proxy.idle
    proxy.now = 5.0
    carry(proxy)
    assert arrived(blocks[2]) == [(1, 24)] * 40
    assert proxy.lost == []
    proxy.close()


def test_a_link_that_is_cut_for_good_keeps_nobody() -> None:
    proxy, blocks = puts(NetworkFaults(cuts=(Cut(2, after=39, lasts=math.inf),)))
    carry(proxy)
    assert proxy.idle
    assert len(proxy.stuck) == 40
    proxy.close()
    assert proxy.lost == [2] * 40
    assert arrived(blocks[1]) == [(1, 24)] * 40
    assert arrived(blocks[2]) == [(0, 0)] * 40


def test_what_goes_wrong_is_the_same_for_the_same_seed() -> None:
    def lost(seed: int) -> list[int]:
        proxy, _ = puts(NetworkFaults(lose=0.3, late=0.3, latest=1.0, repeat=0.3), seed=seed)
        carry(proxy)
        proxy.close()
        return proxy.lost

    assert lost(1) == lost(1)
    assert lost(1) != lost(2)
