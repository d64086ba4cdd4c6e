"""Compare the kernels of two source trees, role by role, on one device in one run.

    mkdir .old && git archive COMMIT | tar -x -C .old
    python src/moelink/tools/bench/roles.py --a .old --b . --commits COMMIT HEAD --out roles.json
    python src/moelink/tools/bench/roles.py --a .old --b . --quick

Each tree gets a process of its own. The driver asks both for the same case in turn (A B, B A, A B ...), so that drift
of the machine falls on both, and compares the medians of the rounds. Cases with a slower row are measured again.

What a case measures, with W ranks on one device:

* Roles: ``dispatch sender``, ``dispatch receiver``, ``combine sender``, ``combine home``. Each phase of the split form
  is one CUDA graph with the launches of all ranks on one stream, so a role runs alone and finds everything it waits
  for. A role's time is that of its graph divided by W. The receiver's graph includes the launch that lays out scales,
  where there is one; ``scale layout`` is that launch alone, between two events.
* ``fused pair``: dispatch and combine of one rank, replayed from a graph of many pairs.
* Host: processor time of an eager dispatch, combine and pair of one rank.
* Kernels: registers, spills and shared memory of everything that was loaded.

``bytes`` is the least that one rank's role reads and writes in device memory. Before any time is taken, both trees'
results are reduced to checksums; rows of cases whose checksums differ are errors. On a CPU (``--device cpu``, Triton's
interpreter, sizes of ``--tiny``) the same code runs with the host's clock; those times mean nothing.

Both trees are measured by this file, which therefore uses nothing of the package but its public names. It is started
by its path; each process finds the package that it measures by ``PYTHONPATH``. Compiled kernels stay in ``--cache``,
apart for each tree, so a second run on the same machine has all its time for measuring.
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
import select
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

ROLES = ("dispatch sender", "dispatch receiver", "combine sender", "combine home")
LAYOUT, FUSED = "scale layout", "fused pair"
SCRIPT = "src/moelink/tools/bench/roles.py"
HOST = ("host dispatch", "host combine", "host pair")
SLOWER = 1.02
"""A row is slower when B takes more than this times what A takes."""
BATCH = 12
"""Pairs that are queued behind one wait of the device, so that the host is never what is timed."""
SAMPLES, SAMPLE_SECONDS = 60, 0.25
"""Samples of a role in one round: so many, or as many as fit this time, and at least two batches."""
FUSED_PAIRS = 20
CLOCK = 2.0e9
"""Cycles of the device in a second, at most about that many: how long ``torch.cuda._sleep`` waits."""
HOST_BATCHES, HOST_CALLS, HOST_WARMUP = 200, 20, 50


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        kind: "roles", "fused" (one rank, ``tokens`` tokens) or "host" (one rank).
        ranks: world size, all on one device.
        tokens: tokens of each rank, which is also ``max_tokens_per_rank``.
        format: dispatch format.
        hidden, experts, topk: sizes of the layer.
    """

    kind: str
    ranks: int
    tokens: int
    format: str
    hidden: int = 7168
    experts: int = 256
    topk: int = 8

    def fields(self) -> dict[str, Any]:
        """Arguments of ``moelink.init``. A rank gets a little more than its share, as rows go to experts at random."""
        share = self.tokens * self.topk
        most = self.ranks * share
        padding = 3 * min(self.experts // self.ranks, most)  # groups of fp8_block128 have a multiple of four rows
        return {
            "num_experts": self.experts, "topk": self.topk, "hidden_size": self.hidden, "dispatch_format": self.format,
            "max_tokens_per_rank": self.tokens, "capacity": padding + min(most, share * 5 // 4 + 512),
            "transport": "symmetric", "timeout": 20.0,
        }  # fmt: skip


def cases_of(*, quick: bool = False, tiny: bool = False) -> list[Case]:
    """Everything that is measured."""
    if tiny:
        sizes: Any = {"hidden": 256, "experts": 8, "topk": 2}
        return [
            Case("host", 1, 2, "fp8_block128", **sizes),
            Case("fused", 1, 1, "fp8_block128", **sizes),
            Case("roles", 2, 2, "fp8_block128", **sizes),
        ]
    formats = ("fp8_block128",) if quick else ("fp8_block128", "bf16")
    tokens = (1, 128, 4096) if quick else (1, 32, 128, 512, 4096)
    return [
        Case("host", 1, 128, "fp8_block128", experts=64),
        *[Case("fused", 1, 1, fmt) for fmt in formats],
        *[Case("roles", w, t, fmt) for t in tokens for w in ((4,) if quick else (2, 4, 8)) for fmt in formats],
    ]


# ---------------------------------------------------------------------------------------------------------------------
# One tree: a process that answers one case after the other.


class Inputs:
    """Tensors of all ranks of a case, the same in both trees: made from the rank's number and the sizes alone."""

    def __init__(self, case: Case, device: Any) -> None:
        import torch

        self.x: list[torch.Tensor] = []
        self.ids: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []
        self.y: list[torch.Tensor] = []
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
                del values


class Pair:
    """A dispatch and a combine on all ranks, as the four phases of the split form in their order."""

    def __init__(self, ep: Any, inputs: Inputs) -> None:
        self.ep, self.inputs = ep, inputs
        self.recvs: list[Any] = []
        self.outs: list[Any] = []
        self._pending: Any = None

    def send_dispatch(self) -> None:
        """Launch every rank's dispatch sender."""
        self._pending = self.ep.dispatch_async(self.inputs.x, self.inputs.ids, self.inputs.weights)

    def receive_dispatch(self) -> None:
        """Launch every rank's dispatch receiver."""
        self.recvs = self._pending.wait()

    def send_combine(self) -> None:
        """Launch every rank's combine sender."""
        self._pending = self.ep.combine_async(self.inputs.y, self.recvs)

    def receive_combine(self) -> None:
        """Launch every rank's home role."""
        self.outs = self._pending.wait()

    @property
    def phases(self) -> tuple[Callable[[], None], ...]:
        """The phases, one for each of :data:`ROLES`."""
        return (self.send_dispatch, self.receive_dispatch, self.send_combine, self.receive_combine)

    def run(self) -> None:
        """All phases."""
        for phase in self.phases:
            phase()


def bytes_of(case: Case, pair: Pair) -> dict[str, int]:
    """Bytes that each role of one rank reads and writes in device memory, averaged over ranks, at the least.

    A message is a token's payload for one rank that has any of its experts, the token's own rank included.
    """
    local = case.experts // case.ranks
    messages = sum(
        int((ids // local == rank).any(1).sum()) for ids in pair.inputs.ids for rank in range(case.ranks)
    ) // case.ranks  # fmt: skip
    rows, tokens = case.tokens * case.topk, case.tokens
    recv, wide = pair.recvs[0], 2 * case.hidden
    scale = 0 if recv.scales is None else recv.scales[:, 0].nbytes
    row = recv.tokens[0].nbytes + scale
    return {
        ROLES[0]: tokens * wide + messages * row,
        ROLES[1]: messages * row + rows * row,
        ROLES[2]: rows * wide + messages * wide,
        ROLES[3]: messages * wide + tokens * wide,
        LAYOUT: 2 * rows * scale,
    }


def checksum(pair: Pair) -> str:
    """A digest of everything that the calls defined: rows, scales, where rows came from, combined tokens."""
    import torch

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
            found.append(reduced(recv.scales[:, :rows]))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


@contextlib.contextmanager
def noting_kernels(on_cuda: bool) -> Iterator[dict[str, dict[str, int]]]:
    """Registers, spills and shared memory of the kernels loaded inside, by name. Interpreted ones have none."""
    from triton.compiler import CompiledKernel

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
def on_one_stream(stream: Any) -> Iterator[None]:
    """Every stream that is made inside is ``stream``: ranks that have streams of their own would run side by side."""
    import torch

    with mock.patch.object(torch.cuda, "Stream", return_value=stream):
        yield


class Launches:
    """Launches of the phases under way, in their order: name of the kernel, and events around it if wanted."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.phase, self.timed = stream, 0, False
        self.noted: list[tuple[int, str, list[Any]]] = []

    def _event(self) -> list[Any]:
        import torch

        if not self.timed:
            return []
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return [event]

    def enter(self, metadata: Any) -> None:
        """Before a launch; a hook of Triton's."""
        found = metadata.get()
        if found["stream"] != self.stream.cuda_stream:
            raise RuntimeError(
                f"{found['name']}: expected all ranks' launches on stream {self.stream.cuda_stream}, got stream "
                f"{found['stream']}; make the ranks' streams where on_one_stream() replaces them"
            )
        self.noted.append((self.phase, found["name"], self._event()))

    def leave(self, _: Any) -> None:
        """After a launch; a hook of Triton's."""
        self.noted[-1][2].extend(self._event())

    def run(self, pair: Pair, *, timed: bool = False) -> None:
        """One pair, whose launches are noted."""
        from triton import knobs

        self.timed = timed
        knobs.runtime.launch_enter_hook.add(self.enter)
        knobs.runtime.launch_exit_hook.add(self.leave)
        try:
            for self.phase, phase in enumerate(pair.phases):
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
    import torch

    torch.cuda._sleep(int(min(seconds, 0.05) * CLOCK))  # type: ignore[no-untyped-call]


def capture(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """A graph of each function's launches on the current stream. They share memory, so replay them in order."""
    import torch

    torch.cuda.synchronize()
    pool, graphs = torch.cuda.graph_pool_handle(), []
    collects = gc.isenabled()
    gc.disable()  # nothing may be freed while a graph is captured
    try:
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
    finally:
        if collects:
            gc.enable()
    torch.cuda.synchronize()
    return graphs


def replay(graphs: Sequence[Any]) -> list[list[float]]:
    """Microseconds of each of ``graphs``, which are replayed one after the other, again and again."""
    import torch

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
    import torch

    import moelink

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        inputs = Inputs(case, device)
        with on_one_stream(stream):
            ep = moelink.init_devices([device] * case.ranks, **case.fields())
        pair, launches = Pair(ep, inputs), Launches(stream)
        pair.run()
        begin = time.perf_counter()
        launches.run(pair)
        eager = time.perf_counter() - begin
        ep.check()
        found: dict[str, Any] = {"bytes": bytes_of(case, pair)}
        if check:
            found["checksum"] = checksum(pair)
        times = {}
        second = launches.second_of(1)
        if second is not None:
            launches.noted.clear()
            for _ in range(4):
                hold_device(2 * eager)
                launches.run(pair, timed=True)
                torch.cuda.synchronize()
            laid_out = [a.elapsed_time(b) * 1e3 for at, name, (a, b) in launches.noted if (at, name) == (1, second)]
            times[LAYOUT] = statistics.median(laid_out)
        expected = [out.clone() for out in pair.outs]
        graphs = capture(pair.phases)
        for role, samples in zip(ROLES, replay(graphs), strict=True):
            times[role] = statistics.median(samples) / case.ranks
        ep.check()
        for rank, (got, want) in enumerate(zip(pair.outs, expected, strict=True)):
            if not torch.equal(got, want):
                raise RuntimeError(f"{case}: replays gave rank {rank} other tokens than eager calls")
        torch.cuda.synchronize()
        for graph in graphs:
            graph.reset()
        ep.close()
    return {**found, "times": times}


def roles_on_cpu(case: Case, check: bool) -> dict[str, Any]:
    """The same by the host's clock, kernels interpreted."""
    import torch

    import moelink

    times = {}
    with moelink.init_devices(["cpu"] * case.ranks, **case.fields()) as ep:
        pair = Pair(ep, Inputs(case, torch.device("cpu")))
        for role, phase in zip(ROLES, pair.phases, strict=True):
            begin = time.perf_counter()
            phase()
            times[role] = (time.perf_counter() - begin) * 1e6 / case.ranks
        ep.check()
        return {"bytes": bytes_of(case, pair), "times": times, **({"checksum": checksum(pair)} if check else {})}


@contextlib.contextmanager
def one_rank(case: Case, device: Any) -> Iterator[tuple[Any, Inputs]]:
    """A communicator of one rank, its kernels loaded, and its inputs."""
    import moelink

    inputs = Inputs(case, device)
    with moelink.init(**case.fields(), device=device) as ep:
        for _ in range(2 if device.type == "cuda" else 1):
            recv = ep.dispatch(inputs.x[0], inputs.ids[0], inputs.weights[0])
            ep.combine(inputs.y[0], recv)
        ep.check()
        yield ep, inputs


def fused(case: Case, device: Any) -> dict[str, Any]:
    """Time of a fused dispatch and combine of one rank."""
    import torch

    with one_rank(case, device) as (ep, inputs):

        def pair() -> None:
            ep.combine(inputs.y[0], ep.dispatch(inputs.x[0], inputs.ids[0], inputs.weights[0]))

        def pairs() -> None:
            for _ in range(FUSED_PAIRS):
                pair()

        if device.type == "cpu":
            begin = time.perf_counter()
            pair()
            return {"times": {FUSED: (time.perf_counter() - begin) * 1e6}}
        with torch.cuda.stream(torch.cuda.Stream(device)):
            pair()
            graphs = capture([pairs])
            (samples,) = replay(graphs)
            graphs[0].reset()
        ep.check()
        return {"times": {FUSED: statistics.median(samples) / FUSED_PAIRS}}


def host(case: Case, device: Any) -> dict[str, Any]:
    """Processor time of eager calls of one rank: the least of many short batches, as other work only adds to it."""
    import torch

    on_cuda = device.type == "cuda"
    batches, calls, warmup = (HOST_BATCHES, HOST_CALLS, HOST_WARMUP) if on_cuda else (1, 1, 0)

    def settle() -> None:
        if on_cuda:
            torch.cuda.synchronize()

    def least(call: Callable[[], Any]) -> float:
        for _ in range(warmup):
            call()
        taken = []
        for _ in range(batches):
            settle()
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
    """What the tree that is imported gives for ``case``: times in microseconds, by role; bytes; checksum; kernels."""
    import torch

    device = torch.device(device_name)
    on_cuda = device.type == "cuda"
    with noting_kernels(on_cuda) as kernels:
        if case.kind == "host":
            found = host(case, device)
        elif case.kind == "fused":
            found = fused(case, device)
        else:
            found = roles_on_cuda(case, device, check) if on_cuda else roles_on_cpu(case, check)
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()  # both trees' processes live on one device
    return {**found, "kernels": kernels}


def compile_case(case: Case, device_name: str) -> str:
    """Compile what ``case`` launches by making its calls with one token a rank. Returns an error, or nothing."""
    import torch

    import moelink

    device = torch.device(device_name)
    torch.set_num_threads(1)
    few = replace(case, tokens=1)
    fields = {**case.fields(), "capacity": few.fields()["capacity"]}
    try:
        inputs = Inputs(few, device)
        if case.kind == "roles":
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                with on_one_stream(stream):
                    ep = moelink.init_devices([device] * case.ranks, **fields)
                Pair(ep, inputs).run()
                ep.close()
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


def serve(device_name: str) -> None:
    """Answer each case on standard input, a line of JSON, by a line of JSON. What others print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import triton

    import moelink

    def answer(document: Any) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    on_cuda = device_name.startswith("cuda")
    answer({
        "package": str(Path(moelink.__file__).resolve().parent),
        "device": torch.cuda.get_device_name(device_name) if on_cuda else "CPU",
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
    })  # fmt: skip
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(measure(Case(**request["case"]), device_name, check=request["check"]))
        except Exception as error:  # noqa: BLE001 - the other cases are worth measuring
            answer({"error": f"{type(error).__name__}: {error}"})


# ---------------------------------------------------------------------------------------------------------------------
# The driver: two such processes in turn.


class Tree:
    """A process that measures one tree."""

    def __init__(self, root: Path, device: str, cache: Path) -> None:
        self.root = root.resolve()
        source = self.root / "src"
        if not (source / "moelink").is_dir():
            raise SystemExit(f"expected a tree with src/moelink, got {self.root}; make it with `git archive`")
        self.environment = {
            **os.environ, "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")])),
            "TRITON_CACHE_DIR": str(cache / hashlib.sha256(str(self.root).encode()).hexdigest()[:12]),
        }  # fmt: skip
        if device == "cpu":
            self.environment["TRITON_INTERPRET"] = "1"
        self.device = device
        self.process: subprocess.Popen[str] | None = None

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--device", self.device, *arguments],
            env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def compile(self, options: Sequence[str], workers: int) -> subprocess.Popen[str]:
        """Start to compile everything."""
        return self._start("--compile", str(workers), *options)

    def start(self, timeout: float) -> dict[str, Any]:
        """Start the process that measures. Returns what it says about itself."""
        self.process = self._start("--serve")
        hello = self._read(timeout)
        if Path(hello["package"]) != self.root / "src" / "moelink":
            raise SystemExit(f"expected moelink of {self.root}, got {hello['package']}; leave sys.path alone")
        return hello

    def ask(self, case: Case, *, check: bool, timeout: float) -> dict[str, Any]:
        """What the tree gives for ``case``."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"case": asdict(case), "check": check}) + "\n")
        self.process.stdin.flush()
        return self._read(timeout)

    def _read(self, timeout: float) -> dict[str, Any]:
        """The next answer: one line, and never more than one is on its way."""
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(timeout, 1.0))
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.process.kill()
            why = "ended" if ready else f"did not answer within {timeout:.0f} s"
            raise RuntimeError(f"{self.root}: the process that measures {why}; its last words are above")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Comparison:
    """Answers of both trees, by case."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = tuple(cases)
        self.times: dict[tuple[Case, str], tuple[list[float], list[float]]] = {}
        self.bytes: dict[tuple[Case, str], int] = {}
        self.checksums: dict[Case, list[str]] = {}
        self.kernels: tuple[dict[tuple[Case, str], Any], ...] = ({}, {})
        self.errors: list[str] = []

    def add(self, case: Case, side: int, answer: dict[str, Any]) -> None:
        """The answer of tree ``side`` (0: A, 1: B)."""
        if "error" in answer:
            self.errors.append(f"{'AB'[side]} {label(case)}: {answer['error']}")
            return
        for role, microseconds in answer["times"].items():
            self.times.setdefault((case, role), ([], []))[side].append(microseconds)
            self.bytes[case, role] = answer.get("bytes", {}).get(role, 0)
        if "checksum" in answer:
            sums = self.checksums.setdefault(case, ["", ""])
            sums[side] = answer["checksum"]
            if "" not in sums and sums[0] != sums[1]:
                self.errors.append(f"{label(case)}: A and B give other bits ({sums[0]}, {sums[1]})")
        self.kernels[side].update({(case, name): stats for name, stats in answer["kernels"].items()})

    def rows(self) -> list[dict[str, Any]]:
        """A row for each role of each case that both trees gave, the worst ratio first."""
        found = []
        for (case, role), (a, b) in self.times.items():
            if a and b:
                a_us, b_us = statistics.median(a), statistics.median(b)
                found.append({
                    "role": role, "W": case.ranks, "tokens": case.tokens, "format": case.format,
                    "a_us": round(a_us, 3), "b_us": round(b_us, 3), "ratio": round(b_us / a_us, 4),
                    "bytes": self.bytes[case, role], "a_rounds": [round(t, 3) for t in a],
                    "b_rounds": [round(t, 3) for t in b],
                })  # fmt: skip
        return sorted(found, key=lambda row: -row["ratio"])

    def slower_cases(self) -> list[Case]:
        """Cases with a row that is slower in B."""
        slow = {
            case for (case, _), (a, b) in self.times.items()
            if a and b and statistics.median(b) > SLOWER * statistics.median(a)
        }  # fmt: skip
        return [case for case in self.cases if case in slow]

    def compared_kernels(self) -> list[dict[str, Any]]:
        """Each kernel of each case; registers, spills and shared memory in both trees, None where a tree has none."""
        a, b = self.kernels
        return [
            {"name": name, "case": label(case), "a": a.get((case, name)), "b": b.get((case, name))}
            for case, name in dict.fromkeys([*a, *b])
        ]

    def document(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        rows = self.rows()
        return {
            "rows": [row for row in rows if row["role"] not in HOST],
            "host": [row for row in rows if row["role"] in HOST],
            "kernels": self.compared_kernels(),
            "checksums": {label(case): sums for case, sums in self.checksums.items()},
            "slower": sum(row["ratio"] > SLOWER for row in rows),
            "errors": self.errors,
        }


def label(case: Case) -> str:
    """A short name of a case."""
    return f"{case.kind} W={case.ranks} tokens={case.tokens} {case.format}"


def table(document: dict[str, Any], most: int = 24) -> str:
    """The worst rows, kernels that changed, errors, and the line that counts slower rows."""
    rows = sorted(document["rows"] + document["host"], key=lambda row: -row["ratio"])
    lines = [
        f"{'role':<18} {'W':>2} {'tokens':>6} {'format':<12} {'A us':>9} {'B us':>9} {'B / A':>7}  {'rounds of B / A'}"
    ]
    for row in rows[:most]:
        both = list(zip(row["a_rounds"], row["b_rounds"], strict=False))
        spread = f"{min(b / a for a, b in both):.3f} to {max(b / a for a, b in both):.3f}"
        lines.append(
            f"{row['role']:<18} {row['W']:>2} {row['tokens']:>6} {row['format']:<12} {row['a_us']:>9.2f} "
            f"{row['b_us']:>9.2f} {row['ratio']:>7.3f}  {spread}"
        )
    if len(rows) > most:
        lines.append(f"... {len(rows) - most} more, all with a smaller ratio")
    changed = [each for each in document["kernels"] if each["a"] != each["b"]]
    lines += [f"kernel {each['name']} ({each['case']}): A {each['a']}, B {each['b']}" for each in changed[:most]]
    lines += [f"error: {error}" for error in document["errors"]]
    middle = statistics.median(row["ratio"] for row in rows) if rows else float("nan")
    lines.append(
        f"{document['slower']} of {len(rows)} rows slower than 2 % (median B / A {middle:.4f}); "
        f"{len(changed)} of {len(document['kernels'])} kernels changed; {len(document['errors'])} errors"
    )
    return "\n".join(lines)


def compile_both(trees: Sequence[Tree], options: Sequence[str], limit: float) -> None:
    """Compile for both trees at once, with half of the processors each."""
    workers = max(1, min(24, len(os.sched_getaffinity(0)) // len(trees)))
    started = [tree.compile(options, workers) for tree in trees]
    end = time.monotonic() + limit
    for tree, process in zip(trees, started, strict=True):
        try:
            process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile
            process.wait()
            sys.stderr.write(f"{tree.root}: not all was compiled within {limit:.0f} s; measuring compiles the rest\n")


def compare(
    comparison: Comparison, trees: Sequence[Tree], rounds: int, deadline: float, save: Callable[[], None]
) -> None:
    """``rounds`` rounds of all cases, then as many of those that have a slower row; after ``deadline`` no case."""
    for again in (False, True):
        cases = comparison.slower_cases() if again else list(comparison.cases)
        for turn in range(rounds):
            for index, case in enumerate(cases):
                if time.monotonic() > deadline:
                    sys.stderr.write(
                        f"no time left in round {turn + 1} of {rounds}, {len(cases) - index} cases to go\n"
                    )
                    return
                for side in (0, 1) if (turn + index) % 2 == 0 else (1, 0):
                    answer = trees[side].ask(case, check=turn == 0 and not again, timeout=120.0)
                    comparison.add(case, side, answer)
            save()


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare the kernels of two trees, role by role, on one device.")
    parser.add_argument("--a", type=Path, default=Path(".old"), help="root of the first tree, which is the measure")
    parser.add_argument("--b", type=Path, default=Path("."), help="root of the second tree")
    parser.add_argument("--commits", nargs=2, metavar=("A", "B"), default=(None, None), help="to record")
    parser.add_argument("--quick", action="store_true", help="four ranks, 1, 128 and 4096 tokens, fp8_block128 only")
    parser.add_argument("--tiny", action="store_true", help="a few bytes, to try the program itself")
    parser.add_argument("--rounds", type=int, default=3, help="of each tree; cases with a slower row get as many more")
    parser.add_argument("--seconds", type=float, help="after this time no case is started; 330, or 165 with --quick")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu with Triton's interpreter")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "moelink-roles", help="of Triton")
    parser.add_argument("--out", type=Path, default=Path("roles.json"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = 165.0 if options.quick else 330.0
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, write the result, print the table. Returns 1 where a case failed or trees gave other bits."""
    start = time.monotonic()
    options = options_of(arguments)
    cases = cases_of(quick=options.quick, tiny=options.tiny)
    if options.serve:
        serve(options.device)
        return 0
    if options.compile is not None:
        compile_ahead(cases, options.device, options.compile)
        return 0
    trees = [Tree(root, options.device, options.cache) for root in (options.a, options.b)]
    comparison = Comparison(cases)
    header: dict[str, Any] = {
        "schema_version": 1, "benchmark": "roles", "date": date.today().isoformat(),
        "command": shlex.join(["python", SCRIPT, *(sys.argv[1:] if arguments is None else arguments)]),
        "commits": dict(zip("ab", options.commits, strict=True)), "unit": "microseconds; of one rank",
    }  # fmt: skip

    def save() -> None:
        header["seconds"] = round(time.monotonic() - start, 1)
        options.out.write_text(json.dumps({**header, **comparison.document()}, indent=1) + "\n")

    try:
        if options.device != "cpu":
            compile_both(trees, ["--quick"] if options.quick else [], options.seconds / 2)
            header["compile_seconds"] = round(time.monotonic() - start, 1)
            sys.stderr.write(f"compiled within {header['compile_seconds']} s\n")
        for tree in trees:
            header.update({name: said for name, said in tree.start(120.0).items() if name != "package"})
        compare(comparison, trees, options.rounds, start + options.seconds, save)
    except RuntimeError as error:
        comparison.errors.append(str(error))
    finally:
        for tree in trees:
            tree.stop()
        save()
    sys.stdout.write(table(comparison.document()) + "\n")
    return 1 if comparison.errors else 0


if __name__ == "__main__":
    sys.exit(main())
