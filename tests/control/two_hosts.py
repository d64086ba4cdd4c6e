"""Two hosts on one machine: network namespaces joined by a virtual cable, for tests of what crosses hosts."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "moe0"


class NoNamespacesError(Exception):
    """This machine does not let this user make network namespaces; the text says what failed."""


@dataclass(frozen=True)
class Host:
    """One namespace, and its address on the cable."""

    name: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """``arguments``, run inside."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def received_bytes(self) -> int:
        """Bytes that came over the cable so far, packet headers included."""
        path = f"/sys/class/net/{INTERFACE}/statistics/rx_bytes"
        return int(subprocess.run(self.command("cat", path), capture_output=True, text=True, check=True).stdout)

    def processes(self) -> list[int]:
        """Ids of the processes inside, those that a launcher started in sessions of their own too."""
        inside = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in inside.stdout.split()]

    def kill_everything(self) -> None:
        """Kill every process inside, and return when none is left.

        Once is not enough: a process may start another between being seen and being killed, and one that was killed
        is there until the kernel has taken it down.

        Raises:
            TimeoutError: some are left after a minute.
        """
        deadline = time.monotonic() + 60
        while inside := self.processes():
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {inside} of host {self.name} outlive SIGKILL")
            for pid in inside:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespacesError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that see each other and nothing else. Their processes must have ended when the block does.

    Raises:
        NoNamespacesError: they cannot be made here.
    """
    if shutil.which("ip") is None:
        raise NoNamespacesError("there is no `ip` command (package iproute2)")
    tag = secrets.token_hex(3)
    hosts = (Host(f"moelink-{tag}-a", "10.213.77.1"), Host(f"moelink-{tag}-b", "10.213.77.2"))
    made = []
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            made.append(host)
        first, second = hosts
        _ip("-n", first.name, "link", "add", INTERFACE, "type", "veth", "peer", INTERFACE, "netns", second.name)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", host.name, "link", "set", INTERFACE, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


@dataclass(frozen=True)
class Finished:
    """How one host's command ended."""

    returncode: int
    stdout: str
    stderr: str


def run_on(hosts: Sequence[Host], commands: Sequence[Sequence[str]], *, timeout: float, folder: Path) -> list[Finished]:
    """Run one command per host at the same time; kill all of them, and what they started, after ``timeout`` seconds.

    Raises:
        subprocess.TimeoutExpired: one had not ended.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes = []
    # Files, because a pipe that nobody reads while the other host is waited for would fill up and stop its process.
    paths = [[folder / f"{host.name}.{kind}" for kind in ("out", "err")] for host in hosts]
    try:
        for host, command, (out, err) in zip(hosts, commands, paths, strict=True):
            with out.open("w") as stdout, err.open("w") as stderr:
                processes.append(
                    subprocess.Popen(host.command(*command), stdout=stdout, stderr=stderr, env=environment)
                )
        deadline = time.monotonic() + timeout
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    finally:
        with ExitStack() as stack:  # all of it, whatever goes wrong before
            for process in processes:
                stack.callback(process.wait)
            for host in hosts:
                stack.callback(host.kill_everything)
    return [Finished(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, paths, strict=True)]
