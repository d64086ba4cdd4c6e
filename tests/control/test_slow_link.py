"""Two hosts of one rank each, made of network namespaces, with a link between them that becomes slow (tbf).

Skipped, with the reason, where namespaces or traffic shaping cannot be made (they need root and iproute2).
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

from tests.control.slow_link_rank import TIMEOUT
from tests.support.starving import Starved

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


@pytest.mark.timeout(90)
def test_a_slow_link_is_waited_for_and_one_that_is_too_slow_is_an_error_in_time(link: Link, starved: Starved) -> None:
    ranks = [start(link, rank) for rank in range(2)]
    try:
        assert [said["state"] for said in listen(ranks)] == ["ready", "ready"]
        link.shape("2mbit")
        go_on(ranks)
        for said in listen(ranks):
            assert said["state"] == "slow", said
            assert said["took"] < TIMEOUT
        link.shape("500kbit")
        go_on(ranks)
        for rank, said in enumerate(listen(ranks)):
            assert said["state"] == "late", said
            assert said["peer"] == 1 - rank
            assert (said["phase"], said["call"]) == ("dispatch", 5)
            assert said["took"] < TIMEOUT + 1 + starved()
        link.shape(None)
        go_on(ranks)
        assert [said["state"] for said in listen(ranks)] == ["recovered", "recovered"]
        go_on(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()  # which closes its pipes
