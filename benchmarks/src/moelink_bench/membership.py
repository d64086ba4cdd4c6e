"""Measure how long calls pause when a rank is killed and masked, and when a new process takes its place.

In each round ranks call in a loop. The last one is killed between two calls, and the others find that out, mask it and
go on, with the same communicator; on CUDA devices they replay a graph that they captured before. Then a new process,
which waits already, is admitted. All sums are compared with those of the ranks that are present. A time is that of the
slowest rank, and the largest, the median and the smallest of the rounds are printed.

``find``: from the begin of the call that fails until it has raised, with the error that names the rank. On the
symmetric transport that is its timeout, 5 s on CUDA devices and else 30 s, as a dead rank is silent like a late one.
``mask`` and ``admit``: of these calls. ``first step``: of the first one after each. ``step``: the median of steps
before. All in ms.

    python -m moelink_bench.membership --transport symmetric
    python -m moelink_bench.membership --device cuda --transport symmetric --ranks 2
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import moelink
from moelink.testing import assert_bitwise_equal, run_ranks
from moelink_bench.script import Save, Script, add_numbers

STEPS = 10
"""Before the kill."""


@dataclass(frozen=True)
class Case:
    """A round: ``ranks`` processes, of which the last one is killed."""

    device: str
    transport: str
    ranks: int
    tokens: int
    hidden_size: int
    num_experts: int
    topk: int

    @property
    def timeout(self) -> float:
        """Seconds of a call. Interpreted kernels of several ranks take seconds on few cores."""
        return 5.0 if self.device == "cuda" else 30.0

    @property
    def settings(self) -> dict[str, Any]:
        """Keywords of init."""
        return {
            "num_experts": self.num_experts, "topk": self.topk, "hidden_size": self.hidden_size,
            "max_tokens_per_rank": self.tokens, "transport": self.transport, "timeout": self.timeout,
        }  # fmt: skip


class Steps:
    """Steps of one rank, eager or, with ``captured`` on the symmetric transport, of a graph."""

    def __init__(self, ep: moelink.Communicator, case: Case, *, captured: bool) -> None:
        self.ep, self.cuda = ep, ep.device.type == "cuda"
        generator = torch.Generator().manual_seed(ep.config.rank)
        self.x = torch.randint(1, 5, (case.tokens, case.hidden_size), generator=generator).bfloat16().to(ep.device)
        choice = torch.rand(case.tokens, case.num_experts, generator=generator).argsort(1)
        self.ids = choice[:, : case.topk].int().to(ep.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out = self._call()
        if captured and case.transport == "symmetric":
            ep.warmup()
            ep.check()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self._call()

    def _call(self) -> torch.Tensor:
        recv = self.ep.dispatch(self.x, self.ids)
        return self.ep.combine(recv.tokens, recv)

    def make(self) -> None:
        """Make a step, and wait for it."""
        if self.graph is None:
            self.out = self._call()
        else:
            self.graph.replay()
        if self.cuda:
            self.ep.check()

    def compare(self) -> None:
        """Compare the latest sums with the inputs, once for each expert that is there."""
        there = (~self.ep.absent_experts[self.ids.long()]).sum(1, keepdim=True)
        assert_bitwise_equal(self.out, self.x * there, f"sums of ranks {self.ep.present}")


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the milliseconds of the block to ``times``."""
    begin = time.perf_counter()
    yield
    times[name] = 1e3 * (time.perf_counter() - begin)


def until(condition: Callable[[], bool]) -> None:
    """Wait for ``condition``."""
    while not condition():
        time.sleep(0.002)


def rank_main(process: int, processes: int, case: Case, port: int) -> dict[str, float] | None:
    """One process of a round. Return its times, if it has seen all of it."""
    torch.set_num_threads(1)
    store: Any = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    victim, new = case.ranks - 1, process == case.ranks
    if case.device == "cuda":
        torch.cuda.set_device(victim if new else process)
    device = torch.device(case.device, torch.cuda.current_device()) if case.device == "cuda" else "cpu"
    if new:
        until(lambda: store.check(["masked"]))
        steps = Steps(moelink.join(store, victim, case.ranks, device=device, **case.settings), case, captured=False)
        steps.compare()
        steps.ep.close()
        return None
    backend = "cpu:gloo,cuda:nccl" if case.device == "cuda" else "gloo"
    group = PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=process, world_size=case.ranks)
    steps = Steps(moelink.init(device=device, **case.settings), case, captured=case.device == "cuda")
    times: dict[str, float] = {}
    before: list[float] = []
    for _ in range(STEPS):
        with timed(times, "step"):
            steps.make()
        before.append(times["step"])
    times["step"] = median(before)
    steps.compare()
    store.add("ready", 1)
    until(lambda: store.add("ready", 0) == case.ranks)
    if process == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with timed(times, "find"):
        while True:
            try:
                steps.make()
            except moelink.PeerTimeoutError as error:
                assert error.peer == victim, error  # noqa: PT017 - it is to be timed
                break
    times["mask"] = 1e3 * steps.ep.mask([victim]).seconds
    with timed(times, "first step masked"):
        steps.make()
    for _ in range(STEPS):
        steps.make()
    steps.compare()
    store.set("masked", "1")
    until(lambda: steps.ep.applicants(store) == (victim,))
    store.add("seen", 1)
    until(lambda: store.add("seen", 0) == case.ranks - 1)
    times["admit"] = 1e3 * steps.ep.admit([victim], store).seconds
    with timed(times, "first step admitted"):
        steps.make()
    steps.compare()
    steps.ep.close()
    return times


def run(args: argparse.Namespace, save: Save) -> int:
    """Run all rounds and save the result."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    rows = []
    for transport in args.transport:
        case = Case(args.device, transport, args.ranks, args.tokens, args.hidden_size, args.num_experts, args.topk)
        rounds: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            processes, mortal = case.ranks + 1, {case.ranks - 1}
            found = run_ranks(rank_main, processes, case, store.port, mortal=mortal, timeout=300.0)
            for name in found[0]:
                rounds.setdefault(name, []).append(max(times[name] for times in found[: case.ranks - 1]))
        ms = {name: {"min": min(v), "median": median(v), "max": max(v)} for name, v in rounds.items()}
        rows.append({**vars(case), "rounds": args.rounds, "graph": args.device == "cuda", "ms": ms})
        for name, value in ms.items():
            print(f"{transport:11}{name:20}{value['median']:9.1f} ms, {value['min']:.1f} to {value['max']:.1f}")
    save("membership", {"gate": "passed", "rows": rows})
    return 0


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--transport", choices=("collective", "symmetric"), nargs="+", default=["collective"])
    sizes = {"ranks": 3, "tokens": 4, "hidden_size": 64, "num_experts": 12, "topk": 2, "rounds": 5}
    add_numbers(parser, sizes)


main = Script("membership", __doc__, _options, run, out="membership_{device}.json").main

if __name__ == "__main__":
    raise SystemExit(main())
