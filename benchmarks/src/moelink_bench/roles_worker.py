"""Measure one tree for :mod:`moelink_bench.roles`: a process that answers one case after the other.

It is started by its path and measures the package that ``PYTHONPATH`` leads to, which may be older than this file.
So it uses nothing of the package but public names that both have, except in :func:`on_one_stream`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel

import moelink

ROLES = ("dispatch sender", "dispatch receiver", "combine sender", "combine home")
LAYOUT, FUSED = "scale layout", "fused pair"
HOST = ("host dispatch", "host combine", "host pair")
BATCH = 12
"""Pairs that are queued behind one wait of the device, so that the host is never what is timed."""
SAMPLES, SAMPLE_SECONDS = 60, 0.25
"""Samples of a role in one round: so many, or as many as fit this time, and at least two batches."""
FUSED_PAIRS, CLOCK = 20, 2.0e9  # CLOCK: cycles of the device in a second, about, which torch.cuda._sleep counts
HOST_BATCHES, HOST_CALLS, HOST_WARMUP = 200, 20, 50


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        kind: "roles", "bits" (the checksum alone), "fused" (one rank, ``tokens`` tokens) or "host" (one rank).
        ranks: world size, all on one device.
        tokens: tokens of each rank, which is also ``max_tokens_per_rank``.
        format: dispatch format.
        hidden, experts, topk: sizes of the layer.
        layout, transport: of received rows ("expert" or "rank"), and what moves them: only "symmetric" has roles.
        num_sms: SM limit, or None for all SMs.
    """

    kind: str
    ranks: int
    tokens: int
    format: str
    hidden: int = 7168
    experts: int = 256
    topk: int = 8
    layout: str = "expert"
    transport: str = "symmetric"
    num_sms: int | None = None

    def fields(self) -> dict[str, Any]:
        """Arguments of ``moelink.init``. A rank gets a little more than its share, as rows go to experts at random."""
        share = self.tokens * self.topk
        most = self.ranks * share
        padding = 3 * min(self.experts // self.ranks, most)  # groups of fp8_block128 have a multiple of four rows
        rows = padding + min(most, share * 5 // 4 + 512) if self.layout == "expert" else self.ranks * self.tokens
        return {
            "num_experts": self.experts, "topk": self.topk, "hidden_size": self.hidden, "dispatch_format": self.format,
            "max_tokens_per_rank": self.tokens, "capacity": rows, "transport": self.transport, "timeout": 20.0,
            **({} if self.layout == "expert" else {"layout": self.layout}),
            **({} if self.num_sms is None else {"num_sms": self.num_sms}),
        }  # fmt: skip


class Inputs:
    """Tensors of all ranks of a case, the same in both trees: made from the rank's number and the sizes alone."""

    def __init__(self, case: Case, device: Any) -> None:
        self.x, self.y = list[torch.Tensor](), list[torch.Tensor]()
        self.ids, self.weights = list[torch.Tensor](), list[torch.Tensor]()
        rows = case.fields()["capacity"]
        for rank in range(case.ranks):
            host = torch.Generator().manual_seed(1000 + rank)
            scores = torch.rand(case.tokens, case.experts, generator=host)
            weights, ids = scores.topk(case.topk)
            self.ids.append(ids.int().to(device))
            self.weights.append((weights / weights.sum(1, keepdim=True)).to(device))
            local = torch.Generator(device).manual_seed(2000 + rank)
            for into, size in ((self.x, case.tokens), (self.y, rows)):
                values = torch.randn(size, case.hidden, generator=local, device=device, dtype=torch.float32)
                into.append(values.bfloat16())


class Pair:
    """A dispatch and a combine on all ranks, as the four phases of the split form in their order."""

    def __init__(self, ep: Any, inputs: Inputs) -> None:
        self.ep, self.inputs = ep, inputs
        self.recvs: list[Any] = []
        self.outs: list[Any] = []
        self._pending: Any = None

    def phase(self, number: int) -> None:
        """Launch the role ``ROLES[number]`` of every rank."""
        if number == 0:
            self._pending = self.ep.dispatch_async(self.inputs.x, self.inputs.ids, self.inputs.weights)
        elif number == 1:
            self.recvs = self._pending.wait()
        elif number == 2:
            self._pending = self.ep.combine_async(self.inputs.y, self.recvs)
        else:
            self.outs = self._pending.wait()

    def phases(self) -> list[Callable[[], None]]:
        """The phases, one for each of :data:`ROLES`."""
        return [functools.partial(self.phase, number) for number in range(len(ROLES))]

    def run(self) -> None:
        """All phases."""
        for phase in self.phases():
            phase()


def counts_of(case: Case, pair: Pair) -> dict[str, int]:
    """Messages and rows of one rank, averaged over ranks, and the bytes of a row: what ``bytes_of`` needs."""
    local, by_rank = case.experts // case.ranks, case.layout == "rank"
    owners = [ids // local for ids in pair.inputs.ids]
    own = [mine == rank for rank, mine in enumerate(owners)]
    messages = sum(int((mine == rank).any(1).sum()) for mine in owners for rank in range(case.ranks)) // case.ranks
    own_messages = sum(int(mine.any(1).sum()) for mine in own) // case.ranks
    recv = pair.recvs[0]
    scale = 0 if recv.scales is None else recv.scales[(0,) if by_rank else (slice(None), 0)].nbytes
    return {
        "messages": messages, "own_messages": own_messages, "rows": messages if by_rank else case.tokens * case.topk,
        "own_rows": own_messages if by_rank else sum(int(mine.sum()) for mine in own) // case.ranks,
        "row": recv.tokens[0].nbytes + scale, "scale": scale,
    }  # fmt: skip


def checksum(pair: Pair) -> str:
    """A digest of everything that the calls defined: rows, scales, where rows came from, combined tokens."""

    def reduced(tensor: Any) -> list[int]:
        """Two sums of a tensor's bytes, the second weighted by position, which 64 bits keep exactly modulo 2**64."""
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        total, weighted = 0, 0
        for begin in range(0, len(flat), 1 << 26):
            part = flat[begin : begin + (1 << 26)].long()
            total += int(part.sum())
            weighted += int((part * (torch.arange(len(part), device=part.device) % 65521 + begin % 65519 + 1)).sum())
        return [len(flat), total, weighted]

    found = []
    for recv, out in zip(pair.recvs, pair.outs, strict=True):
        rows = int(recv.row_offsets[-1])
        found += [reduced(t[:rows]) for t in (recv.tokens, recv.src_info, recv.weights) if t is not None]
        found += [reduced(recv.row_offsets), reduced(out)]
        if recv.scales is not None:
            found.append(reduced((recv.scales if recv.topk_ids is None else recv.scales.T)[:, :rows]))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


@contextlib.contextmanager
def noting_kernels(on_cuda: bool) -> Iterator[dict[str, dict[str, int]]]:
    """Registers, spills and shared memory of the kernels loaded inside, by name. Interpreted ones have none."""
    seen: dict[str, dict[str, int]] = {}
    if not on_cuda:
        yield seen
        return
    load = CompiledKernel._init_handles

    def noting(kernel: Any) -> None:
        load(kernel)
        regs, spills = int(kernel.n_regs), int(kernel.n_spills)
        seen[kernel.name] = {"regs": regs, "spills": spills, "shared": int(kernel.metadata.shared)}

    with mock.patch.object(CompiledKernel, "_init_handles", noting):
        yield seen


@contextlib.contextmanager
def on_one_stream(device: Any, ranks: int, fields: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """A stream, and a communicator of ``ranks`` ranks on ``device`` that launch on it. It is the current stream.

    With streams of their own ranks would run side by side. Nor does a launch of its own grant credit for each of them,
    as there is none where each has a GPU: dispatch and combine alternate here, so the next senders grant it in time.
    """
    from moelink.transports.symmetric.rank import Rank

    stream, grants_nothing = torch.cuda.Stream(device), mock.patch.object(Rank, "grant_credits", return_value=None)
    the_same = mock.patch.object(torch.cuda, "Stream", return_value=stream)
    with torch.cuda.stream(stream), the_same, grants_nothing, moelink.init_devices([device] * ranks, **fields) as ep:
        yield stream, ep


class Launches:
    """Launches of the phases under way, in their order: name of the kernel, and events around it."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.phase = stream, 0
        self.noted: list[tuple[int, str, list[Any]]] = []

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def enter(self, metadata: Any) -> None:
        """Before a launch; a hook of Triton's."""
        found = metadata.get()
        if found["stream"] != self.stream.cuda_stream:
            raise RuntimeError(
                f"{found['name']}: expected all ranks' launches on stream {self.stream.cuda_stream}, got stream "
                f"{found['stream']}; make the ranks' streams where on_one_stream() replaces them"
            )
        self.noted.append((self.phase, found["name"], [self._event()]))

    def leave(self, _: Any) -> None:
        """After a launch; a hook of Triton's."""
        self.noted[-1][2].append(self._event())

    def run(self, pair: Pair) -> None:
        """One pair, whose launches are noted."""
        knobs.runtime.launch_enter_hook.add(self.enter)
        knobs.runtime.launch_exit_hook.add(self.leave)
        try:
            for self.phase, phase in enumerate(pair.phases()):
                phase()
        finally:
            knobs.runtime.launch_enter_hook.remove(self.enter)
            knobs.runtime.launch_exit_hook.remove(self.leave)

    def second_of(self, phase: int) -> str | None:
        """Name of the kernel that follows the first one in ``phase``, if any does."""
        names = list(dict.fromkeys(name for at, name, _ in self.noted if at == phase))
        return names[1] if len(names) > 1 else None


def hold_device(seconds: float) -> None:
    """Keep the current stream busy for about that long, while the host queues what is to be timed."""
    torch.cuda._sleep(int(min(seconds, 0.05) * CLOCK))  # type: ignore[no-untyped-call]


def capture(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """A graph of each function's launches on the current stream. They share memory, so replay them in order."""
    torch.cuda.synchronize()
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for function in functions:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            function()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error is the one that says what is wrong
                graph.capture_end()
            raise
        graph.capture_end()
        graphs.append(graph)
    torch.cuda.synchronize()
    return graphs


def replay(graphs: Sequence[Any]) -> list[list[float]]:
    """Microseconds of each of ``graphs``, which are replayed one after the other, again and again."""

    def batch(ahead: float) -> tuple[float, list[list[Any]]]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)] for _ in range(BATCH)]
        hold_device(ahead)
        begin = time.perf_counter()
        for row in events:
            row[0].record()
            for graph, event in zip(graphs, row[1:], strict=True):
                graph.replay()
                event.record()
        queued = time.perf_counter() - begin
        torch.cuda.synchronize()
        return queued, events

    for _ in range(2):  # the first upload of a graph takes longer
        queued, events = batch(0.0)
    took = events[0][0].elapsed_time(events[-1][-1]) / 1e3
    batches = max(2, min(-(-SAMPLES // (BATCH - 1)), int(SAMPLE_SECONDS / took)))
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(batches):
        _, events = batch(1.5 * queued + 50e-6)
        for row in events[1:]:  # the first one follows the wait
            for into, one, two in zip(samples, row[:-1], row[1:], strict=True):
                into.append(one.elapsed_time(two) * 1e3)
    return samples


def roles_on_cuda(case: Case, device: Any, check: bool) -> dict[str, Any]:
    """Times of the roles of ``case`` by CUDA graphs."""
    with on_one_stream(device, case.ranks, case.fields()) as (stream, ep):
        inputs = Inputs(case, device)
        pair, launches = Pair(ep, inputs), Launches(stream)
        pair.run()
        begin = time.perf_counter()
        launches.run(pair)
        eager = time.perf_counter() - begin
        ep.check()
        found: dict[str, Any] = {"counts": counts_of(case, pair), **({"checksum": checksum(pair)} if check else {})}
        times = {}
        second = launches.second_of(1)
        if second is not None:
            launches.noted.clear()
            for _ in range(4):
                hold_device(2 * eager)
                launches.run(pair)
                torch.cuda.synchronize()
            laid_out = [a.elapsed_time(b) * 1e3 for at, name, (a, b) in launches.noted if (at, name) == (1, second)]
            times[LAYOUT] = statistics.median(laid_out)
        expected = [out.clone() for out in pair.outs]
        graphs = capture(pair.phases())
        for role, samples in zip(ROLES, replay(graphs), strict=True):
            times[role] = statistics.median(samples) / case.ranks
        ep.check()
        for rank, (got, want) in enumerate(zip(pair.outs, expected, strict=True)):
            if not torch.equal(got, want):
                raise RuntimeError(f"{case}: replays gave rank {rank} other tokens than eager calls")
        for graph in graphs:
            graph.reset()
    return {**found, "times": times}


def roles_by_host(case: Case, device: Any, check: bool = True) -> dict[str, Any]:
    """The same by the host's clock: for interpreted kernels, and where only the checksum is wanted."""
    times = {}
    with moelink.init_devices([device] * case.ranks, **case.fields()) as ep:
        pair = Pair(ep, Inputs(case, device))
        for role, phase in zip(ROLES, pair.phases(), strict=True):
            begin = time.perf_counter()
            phase()
            times[role] = (time.perf_counter() - begin) * 1e6 / case.ranks
        ep.check()
        return {"counts": counts_of(case, pair), "times": times, **({"checksum": checksum(pair)} if check else {})}


@contextlib.contextmanager
def one_rank(case: Case, device: Any) -> Iterator[tuple[Any, Inputs]]:
    """A communicator of one rank, its kernels loaded, and its inputs."""
    inputs = Inputs(case, device)
    with moelink.init(**case.fields(), device=device) as ep:
        for _ in range(2 if device.type == "cuda" else 1):
            recv = ep.dispatch(inputs.x[0], inputs.ids[0], inputs.weights[0])
            ep.combine(inputs.y[0], recv)
        ep.check()
        yield ep, inputs


def fused(case: Case, device: Any) -> dict[str, Any]:
    """Time of a fused dispatch and combine of one rank."""
    with one_rank(case, device) as (ep, inputs):

        def pairs(count: int = FUSED_PAIRS) -> None:
            for _ in range(count):
                ep.combine(inputs.y[0], ep.dispatch(inputs.x[0], inputs.ids[0], inputs.weights[0]))

        if device.type == "cpu":
            begin = time.perf_counter()
            pairs(1)
            return {"times": {FUSED: (time.perf_counter() - begin) * 1e6}}
        with torch.cuda.stream(torch.cuda.Stream(device)):
            pairs()
            (graph,) = graphs = capture([pairs])
            (samples,) = replay(graphs)
            graph.reset()
        ep.check()
        return {"times": {FUSED: statistics.median(samples) / FUSED_PAIRS}}


def host(case: Case, device: Any) -> dict[str, Any]:
    """Processor time of eager calls of one rank: the least of many short batches, as other work only adds to it."""
    on_cuda = device.type == "cuda"
    batches, calls, warmup = (HOST_BATCHES, HOST_CALLS, HOST_WARMUP) if on_cuda else (1, 1, 0)

    def least(call: Callable[[], Any]) -> float:
        for _ in range(warmup):
            call()
        taken = []
        for _ in range(batches):
            if on_cuda:
                torch.cuda.synchronize()
            start = time.process_time_ns()
            for _ in range(calls):
                call()
            taken.append((time.process_time_ns() - start) / calls / 1e3)
        return min(taken)

    with one_rank(case, device) as (ep, inputs), torch.no_grad():
        x, ids, weights, y = inputs.x[0], inputs.ids[0], inputs.weights[0], inputs.y[0]
        recv = ep.dispatch(x, ids, weights)
        measured = (
            lambda: ep.dispatch(x, ids, weights),
            lambda: ep.combine(y, recv),
            lambda: ep.combine(y, ep.dispatch(x, ids, weights)),
        )
        return {"times": {name: least(call) for name, call in zip(HOST, measured, strict=True)}}


def measure(case: Case, device_name: str, *, check: bool) -> dict[str, Any]:
    """What the tree that is imported gives for ``case``: times in microseconds, by role; counts; checksum; kernels."""
    device = torch.device(device_name)
    on_cuda = device.type == "cuda"
    with noting_kernels(on_cuda) as kernels:
        alone = {"host": host, "fused": fused, "bits": roles_by_host}.get(case.kind)
        found = alone(case, device) if alone else (roles_on_cuda if on_cuda else roles_by_host)(case, device, check)
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()  # both trees' processes live on one device
    return {**found, "kernels": kernels}


def compile_case(case: Case, device_name: str) -> str:
    """Compile what ``case`` launches by making its calls with one token a rank. Returns an error, or nothing."""
    device = torch.device(device_name)
    torch.set_num_threads(1)
    few = replace(case, tokens=1)
    fields = {**case.fields(), "capacity": few.fields()["capacity"]}
    try:
        inputs = Inputs(few, device)
        if case.kind == "roles":
            with on_one_stream(device, case.ranks, fields) as (_, ep):
                Pair(ep, inputs).run()
        else:
            with moelink.init(**fields, device=device) as one:
                one.combine(inputs.y[0], one.dispatch(inputs.x[0], inputs.ids[0], inputs.weights[0]))
    except Exception as error:  # noqa: BLE001 - measuring compiles what is missing, and says what is wrong
        return f"{case}: {type(error).__name__}: {error}"
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return ""


def compile_ahead(cases: Sequence[Case], device_name: str, workers: int) -> None:
    """Compile all cases into Triton's cache by ``workers`` processes, those of the most tokens first."""
    context = multiprocessing.get_context("spawn")
    tasks = sorted(cases, key=lambda case: -case.tokens)
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context) as pool:
        for error in pool.map(functools.partial(compile_case, device_name=device_name), tasks):
            if error:
                sys.stderr.write(f"not compiled ahead: {error}\n")


def serve(device_name: str, measured: Callable[..., dict[str, Any]]) -> None:
    """Answer each case on standard input, a line of JSON, by a line of JSON. What others print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()  # nothing may be freed while a graph is captured; measure() collects

    def answer(document: Any) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    answer({
        "package": str(Path(moelink.__file__).resolve().parent),
        "device": "CPU" if device_name == "cpu" else torch.cuda.get_device_name(device_name),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
    })  # fmt: skip
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(measured(Case(**request["case"]), device_name, check=request["check"]))
        except Exception as error:  # noqa: BLE001 - the other cases are worth measuring
            answer({"error": f"{type(error).__name__}: {error}"})
            gc.collect()


def main() -> None:
    """Answer cases, or compile them."""
    parser = argparse.ArgumentParser(description="Measure one tree; started by moelink_bench.roles.")
    parser.add_argument("--device", required=True, help="cuda:N or cpu")
    parser.add_argument("--compile", type=int, metavar="PROCESSES", help="compile all of them first")
    options = parser.parse_args()
    if options.compile is None:
        serve(options.device, measure)
    else:
        compile_ahead([Case(**json.loads(line)) for line in sys.stdin], options.device, options.compile)


if __name__ == "__main__":
    main()
