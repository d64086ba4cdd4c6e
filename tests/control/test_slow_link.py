"""A link that is slow is waited for, one that is too slow is an error in time: in virtual time, and (full tier) between
two hosts of one rank each, made of network namespaces, with a link that traffic shaping (tbf) makes slow.

The latter is skipped, with the reason, where namespaces or traffic shaping cannot be made: they need root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import moelink
from tests.control.slow_link_rank import FIELDS, HURRIED, TIMEOUT
from tests.control.slow_links import Ranks

SLICE = 0.06
"""Seconds after a deadline, or a report of a peer, in which a rank notices: a slice of a wait."""
SIZES = {name: value for name, value in FIELDS.items() if name != "timeout"}


def test_a_slow_link_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes over the rate: with 2 Mbit/s four tokens take a part of a second, exact all the same."""
    ranks = Ranks(monkeypatch, 2, HURRIED, SIZES)
    ranks.clock.at(0.5, lambda: setattr(ranks.network, "rate", 2e6 / 8))
    ranks.run([[(0.0, 128), (1.0, 4)]] * 2)
    for ended in ranks.ended:
        fast, _, slow, back = ended
        assert [call.error for call in ended] == [None] * 4
        assert fast.took < 0.02
        assert 0.05 < slow.took < 0.5
        assert 0.05 < back.took < 0.5


def test_a_link_that_is_too_slow_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 500 kbit/s 128 tokens need more than six seconds: both ranks raise after the timeout, and not later. Each
    waits for the other, so both name whom the first of them names."""
    for timeout in (HURRIED, 5.0):
        ranks = Ranks(monkeypatch, 2, timeout, SIZES)
        ranks.clock.at(0.5, lambda: setattr(ranks.network, "rate", 5e5 / 8))  # noqa: B023 - run here
        ranks.run([[(0.0, 128), (1.0, 128)]] * 2)
        for rank, ended in enumerate(ranks.ended):
            error = ended[-1].error
            assert type(error) is moelink.PeerTimeoutError
            assert (error.rank, error.phase, error.call) == (rank, "dispatch", 3)
            assert timeout <= ended[-1].took < timeout + SLICE
        assert len({ended[-1].error.peer for ended in ranks.ended}) == 1  # type: ignore[union-attr]


def test_what_is_too_slow_for_one_timeout_is_not_for_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2, 60.0, SIZES)
    ranks.clock.at(0.5, lambda: setattr(ranks.network, "rate", 5e5 / 8))
    ranks.run([[(1.0, 128)]] * 2)
    for dispatched, combined in ranks.ended:
        assert (dispatched.error, combined.error) == (None, None)
        assert 6 < dispatched.took < 30


@pytest.mark.quick("a rank is told to be late or to be stopped in ways of their own")
@pytest.mark.parametrize("stops", [False, True], ids=["late", "stopped"])
def test_who_waits_for_a_rank_raises_after_the_timeout_or_at_once_when_told(
    stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes when all is over. Rank 0 waits for the timeout; rank 2, which called later, hears of it then."""
    ranks = Ranks(monkeypatch, 3, HURRIED, SIZES)
    if stops:
        ranks.clock.at(0.5, lambda: ranks.stop(1))
        ranks.clock.at(9.5, lambda: ranks.stop(None))
    ranks.run([[(0.0, 4), (1.0, 4)], [(0.0, 4), (10.0, 4)], [(0.0, 4), (2.0, 4)]])
    first, late, last = (ended[-1] for ended in ranks.ended)
    for rank, ended in enumerate((first, late, last)):
        assert type(ended.error) is moelink.PeerTimeoutError
        assert (ended.error.rank, ended.error.peer, ended.error.phase, ended.error.call) == (rank, 1, "dispatch", 3)
        assert ended.error.got == (None if stops else 2)
    assert HURRIED <= first.took < HURRIED + SLICE
    assert HURRIED - 1.0 <= last.took < HURRIED - 1.0 + 2 * SLICE
    assert late.took == 0.0, "it had been told before it called"


# -- two hosts --------------------------------------------------------------------------------------------------------

PORT = "29533"


def sh(*command: str) -> None:
    """Run a command, or skip the test with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no slow link on this machine: {' '.join(command)}: {done.stderr.strip()}")


class Link:
    """Two namespaces, 10.99.x.1 and .2, and the wire between them."""

    def __init__(self) -> None:
        tag = f"{os.getpid() % 0xFFFF:x}"
        self.names = [f"moelink-{tag}{end}" for end in "ab"]
        self.devices = [f"ml{tag}{end}" for end in "ab"]
        self.addresses = [f"10.99.{os.getpid() % 250}.{end}" for end in (1, 2)]

    def make(self) -> None:
        for name in self.names:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", self.devices[0], "type", "veth", "peer", "name", self.devices[1])
        for name, device, address in zip(self.names, self.devices, self.addresses, strict=True):
            sh("ip", "link", "set", device, "netns", name)
            sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                sh("ip", "-n", name, "link", "set", each, "up")

    def shape(self, rate: str | None) -> None:
        """Both directions at ``rate``, or as fast as they go."""
        for name, device in zip(self.names, self.devices, strict=True):
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
            if rate is not None:
                shape = ("tbf", "rate", rate, "burst", "16kb", "latency", "300ms")
                sh("tc", "-n", name, "qdisc", "add", "dev", device, "root", *shape)

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def link() -> Iterator[Link]:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"no slow link on this machine: there is no {tool}")
    made = Link()
    try:
        made.make()
        made.shape("100mbit")
        yield made
    finally:
        made.remove()


def start(link: Link, rank: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": link.addresses[0],
        "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": link.devices[rank], "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    return subprocess.Popen(
        ["ip", "netns", "exec", link.names[rank], sys.executable, "-m", "tests.control.slow_link_rank", str(rank)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def listen(ranks: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    said = []
    for rank in ranks:
        line = rank.stdout.readline()
        assert line, rank.stderr.read()[-3000:]
        said.append(json.loads(line))
    return said


def go_on(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        with suppress(BrokenPipeError):
            rank.stdin.write("\n")
            rank.stdin.flush()


@pytest.mark.full("test_a_slow_link_is_waited_for and its neighbours see the same in virtual time, without root")
@pytest.mark.timeout(300)
def test_a_link_between_hosts_that_is_slow_and_one_that_is_too_slow(link: Link) -> None:
    ranks = [start(link, rank) for rank in range(2)]
    try:
        assert [said["state"] for said in listen(ranks)] == ["ready", "ready"]
        link.shape("2mbit")
        go_on(ranks)
        for said in listen(ranks):
            assert said["state"] == "slow", said
            assert said["took"] < TIMEOUT, said
        link.shape("500kbit")
        go_on(ranks)
        for said in listen(ranks):
            assert said["state"] == "late", said
            assert said["peer"] in (-1, 0, 1), "both are in the call: nobody is named, or one that had not come yet"
            assert (said["phase"], said["call"]) == ("dispatch", 5)
            assert said["took"] < TIMEOUT, said
        link.shape(None)
        go_on(ranks)
        assert [said["state"] for said in listen(ranks)] == ["recovered", "recovered"]
        go_on(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()  # which closes its pipes
