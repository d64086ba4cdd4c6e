"""The collective transport between two hosts of two ranks, started by the commands that docs/multi-node.md gives."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moelink.tools.demo import DemoConfig, LayerConfig, run_demo
from tests.control.two_hosts import NoNamespacesError, run_on, two_hosts
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "multi-node.md").read_text()
SIZES = ["--format", "bf16", "--format", "fp8_block128", "--experts", "6", "--topk", "2", "--hidden", "128"]
TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom"
TOKENS = 16


def documented(node: int, address: str) -> list[str]:
    """The demo's command for one node, as the page has it, with this test's address and its two ranks a node."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    (line,) = [
        line
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
        if "-m moelink demo" in line and f"--node-rank {node}" in line
    ]
    words = shlex.split(line.replace("10.0.0.1", address))
    assert words[0] == "torchrun"
    words[words.index("--nproc-per-node") + 1] = "2"
    return [sys.executable, "-m", "torch.distributed.run", *words[1:]]


@pytest.mark.full(
    "test_demo.py runs the demo on one host, test_dispatch_combine.py the transport: a cable changes neither"
)
def test_the_demo_over_two_hosts_gives_what_it_gives_on_one(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    extra = [*SIZES, "--tokens", str(TOKENS), "--text", str(text), "--json"]
    try:
        with two_hosts() as hosts:
            commands = [[*documented(node, hosts[0].address), *extra] for node in range(2)]
            first, second = run_on(hosts, commands, timeout=250, folder=tmp_path)
            received = [host.received_bytes() for host in hosts]
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces here: {error}")
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert second.stdout == "", "only rank 0 reports"
    document = json.loads(first.stdout)
    assert document["passed"]
    layer = LayerConfig(num_experts=6, topk=2, hidden_size=128)
    here = run_demo(
        DemoConfig(ranks=4, tokens_per_rank=TOKENS, formats=("bf16", "fp8_block128"), device="cpu", layer=layer), TEXT
    )
    assert here is not None
    for there, expected in zip(document["formats"], here.formats, strict=True):
        assert there["transport"] == "collective"
        for name in ("dispatch_bytes", "combine_bytes", "rounding_error", "relative_error"):
            assert there[name] == getattr(expected, name), name
    # Of the remote messages of a rank two thirds go to the other host, give or take; all of these crossed the cable.
    moved = sum(entry["dispatch_bytes"] + entry["combine_bytes"] for entry in document["formats"])
    assert sum(received) > moved / 2
    assert min(received) > 0


def test_a_host_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    """What keeps the test above from leaving processes behind when the transport hangs."""
    # Each of up to 500 processes starts the next one, then sleeps: some are being started while others are killed.
    sleeper = (
        "import subprocess, sys, time\n"
        "left = int(sys.argv[1])\n"
        "if left: subprocess.Popen([*sys.orig_argv[:-1], str(left - 1)])\n"
        "time.sleep(600)"
    )
    try:
        with two_hosts() as hosts:
            with pytest.raises(subprocess.TimeoutExpired):
                run_on(hosts, [[sys.executable, "-c", sleeper, "500"]] * 2, timeout=0.7, folder=tmp_path)
            assert [host.processes() for host in hosts] == [[], []]
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces here: {error}")
