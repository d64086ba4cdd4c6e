"""Measure how much of a layer's communication could be hidden under the products of its experts.

A layer of fp8_block128 rows and fp8 experts, without its router, on two ranks or more:

* ``parts``: the layer one after the other, and dispatch, experts, combine and the pair alone.
* ``experts``: on fewer SMs, which is all that a layer can give its experts while others communicate.
* ``beside``: the experts on all SMs but k, and at the same time a pair of calls on k SMs, of other tokens. Microseconds
  until both are over: what a layer takes at best whose communication is hidden from its first row to its last.
* ``chunks``: the tokens in n parts of two lanes. Dispatch of the next part, and combine of the one before, on k SMs,
  while the experts of a part run on the others. The outputs are compared with those of the whole layer.
* ``shared``: a shared expert of the experts' size in bf16 after dispatch, and between ``dispatch_async`` and its
  ``wait``, as :class:`moelink.nn.MoE` calls it; the latter also with dispatch on k SMs.

``hidden for nothing`` is the longer of the experts on all SMs and the pair on all SMs: no order of the same kernels is
faster. All are replays of graphs, the median of the slowest rank.

    torchrun --nproc-per-node 2 -m moelink_bench.overlap --out overlap_2xh200.json
    torchrun --nproc-per-node 2 -m moelink_bench.overlap --case deepseek-v3 --what shared --tokens 1 128 4096
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

import moelink
from moelink.control.group import is_launched
from moelink.errors import ConfigError
from moelink.kernels.launch.replay import Replays
from moelink.kernels.launch.row_launch import row_launcher
from moelink.rows import common_kernel
from moelink_bench.document import device_names
from moelink_bench.layer.contenders import MoelinkLayer, Rows
from moelink_bench.layer.data import LayerInput, choose, make_inputs, make_weights
from moelink_bench.layer.plan import SHAPES, LayerCase, make_layer_plan
from moelink_bench.ranks import CALL_TIMEOUT, joined
from moelink_bench.script import Save, Script, add_numbers, positive
from moelink_bench.timing import Clock, attempt, capture, everyone, slowest_rank

FORMAT = "fp8_block128"
TOLERANCE = 2.0**-6
"""Most that the output of chunks may differ from that of the whole, by length: rows of an expert are the same in both,
but their tiles may be those of another product."""
Given = tuple[Tensor, Tensor, Tensor]
"""Tokens, ids and router weights of a dispatch."""


class Lane:
    """A stream beside the current one; on a CPU, where a call is over when it returns, nothing."""

    def __init__(self, device: torch.device, *, first: bool) -> None:
        """``first``: its kernels start before those of others that wait."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-int(first)) if device.type == "cuda" else None

    def __enter__(self) -> None:
        self._context: AbstractContextManager[Any] = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def follow(self, other: Lane | None = None) -> None:
        """Go on when all that ``other``, by default the current stream, has so far is over."""
        if self._stream is not None:
            self._stream.wait_stream(_stream_of(other, self._device))

    def join(self) -> None:
        """Let the current stream go on when this one is over."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _stream_of(lane: Lane | None, device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if lane is None else lane._stream


@contextmanager
def sms_of_products(sms: int | None) -> Iterator[None]:
    """Let kernels on rows use so many SMs in this context; None: all of them."""
    if sms is None:
        yield
        return
    with (
        patch.object(common_kernel, "sms_of", lambda device: sms),
        patch.object(row_launcher(), "replays", Replays()),
    ):
        yield


class Layer(NamedTuple):
    """A layer on this rank: its parts by :class:`MoelinkLayer`, and its input."""

    made: MoelinkLayer
    input: LayerInput

    def experts(self, recv: Any) -> Tensor:
        """Return the experts' outputs for a dispatch's."""
        at: Any = Rows(recv.tokens, recv.row_offsets, recv)
        for part in self.made.parts()[2:-1]:
            at = part.run(at)
        rows: Tensor = at.rows
        return rows


def in_chunks(
    layer: Layer, lanes: Sequence[Any], given: Given, chunks: int, fast: Lane, slow: Lane
) -> tuple[list[Tensor], Any]:
    """Compute the layer in parts, communication on ``fast`` and experts on ``slow``; return the outputs, and all that
    must live as long as them: memory of one stream is not given to another meanwhile."""
    size = len(given[0]) // chunks
    parts = [tuple(each[size * i : size * (i + 1)] for each in given) for i in range(chunks)]
    fast.follow()
    slow.follow()
    kept: list[Any] = []
    outs: list[Tensor] = []

    def dispatch(i: int) -> None:
        with fast:
            kept.append(lanes[i % len(lanes)].dispatch(*parts[i], max_tokens=size))

    dispatch(0)
    for i in range(chunks):
        recv = kept[-1]
        slow.follow(fast)
        with slow:
            y = layer.experts(recv)
        if i + 1 < chunks:
            dispatch(i + 1)
        fast.follow(slow)
        with fast:
            outs.append(lanes[i % len(lanes)].combine(y, recv))
        kept[-1:-1] = [y]
    fast.join()
    slow.join()
    return outs, kept


class Shared:
    """A shared expert in bf16, for tokens [T, H]."""

    def __init__(self, hidden: int, inner: int, device: torch.device) -> None:
        self.up = torch.randn(2 * inner, hidden, device=device).bfloat16() * hidden**-0.5
        self.down = torch.randn(hidden, inner, device=device).bfloat16() * inner**-0.5

    def __call__(self, x: Tensor) -> Tensor:
        """Return its output."""
        gate, up = (x @ self.up.T).chunk(2, dim=1)
        out: Tensor = (functional.silu(gate) * up) @ self.down.T
        return out


class Bench:
    """Measures one case on one rank.

    Attributes:
        found: the result so far; every figure is in microseconds.
    """

    def __init__(self, layer: Layer, case: LayerCase, clock: Clock, args: argparse.Namespace) -> None:
        self.layer, self.case, self.clock, self.args = layer, case, clock, args
        self.sms = (
            torch.cuda.get_device_properties(clock.device).multi_processor_count if clock.device.type == "cuda" else 8
        )
        routing = choose(layer.input)
        self.given: Given = layer.input.x, routing.topk_ids, routing.topk_weights
        self.fast, self.slow = Lane(clock.device, first=True), Lane(clock.device, first=False)
        self.found: dict[str, Any] = {"case": case.label, "sms": self.sms}

    def time(self, call: Callable[[], Any], *, sms: int | None = None) -> tuple[float, Any]:
        """Return the microseconds of a call, products on ``sms`` SMs, and what it returned. Collective."""
        with sms_of_products(sms):
            for _ in range(2):
                result = call()
            if self.clock.device.type == "cuda":
                torch.cuda.synchronize(self.clock.device)
                graph = capture([call], self.clock.device)
                call, result = graph.replay, graph.results[0]
            taken = self.clock.measure(call, samples=self.args.samples, warmup=2)
            return round(slowest_rank(everyone(taken)).median, 1), result

    def parts(self) -> None:
        """Measure the layer, and its parts, without limits."""
        layer, ep = self.layer, self.layer.made.ep

        def whole() -> Any:
            recv = ep.dispatch(*self.given, max_tokens=len(self.given[0]))
            return ep.combine(layer.experts(recv), recv), recv

        serial, (out, _) = self.time(whole)
        self.want = out.clone()
        recv = ep.dispatch(*self.given, max_tokens=len(self.given[0]))
        y = layer.experts(recv)
        self.recv = recv
        self.found["parts"] = {
            "serial": serial,
            "dispatch": self.time(lambda: ep.dispatch(*self.given, max_tokens=len(self.given[0])))[0],
            "experts": self.time(lambda: layer.experts(recv))[0],
            "combine": self.time(lambda: ep.combine(y, recv))[0],
            "pair": self.time(lambda: ep.combine(y, ep.dispatch(*self.given, max_tokens=len(self.given[0]))))[0],
        }
        parts = self.found["parts"]
        self.found["hidden for nothing"] = max(parts["experts"], parts["pair"])
        self.found["experts"] = {
            str(left): self.time(lambda: layer.experts(recv), sms=left)[0]
            for left in (self.sms - limit for limit in self.args.limits)
        }
        self.y = y

    def shared(self) -> None:
        """Measure a shared expert behind dispatch, and beside it."""
        shape, ep = self.case.shape, self.layer.made.ep
        expert = Shared(shape.hidden_size, shape.intermediate_size, self.clock.device)
        x, bound = self.given[0], len(self.given[0])

        def behind() -> Any:
            return ep.dispatch(*self.given, max_tokens=bound), expert(x)

        def beside(num_sms: int | None = None) -> Any:
            pending = ep.dispatch_async(*self.given, max_tokens=bound, num_sms=num_sms)
            between = expert(x)
            return pending.wait(), between

        self.found["shared"] = {"alone": self.time(lambda: expert(x))[0], "behind": self.time(behind)[0]}
        self.found["shared"]["beside"] = self.time(beside)[0]
        for limit in self.args.limits:
            self.found["shared"][f"beside, {limit} SMs"] = self.time(functools.partial(beside, self.within(limit)))[0]

    def within(self, limit: int) -> int | None:
        """Return an SM limit; None on a CPU, which has no SMs."""
        return limit if self.clock.device.type == "cuda" else None

    def limited(self, limit: int) -> None:
        """Measure what communication on ``limit`` SMs can hide. Collective."""
        shape, config = self.case.shape, self.layer.made.ep.config
        left = self.sms - limit
        with moelink.init(
            num_experts=shape.num_experts, topk=shape.topk, hidden_size=shape.hidden_size, lanes=2,
            max_tokens_per_rank=config.max_tokens_per_rank, dispatch_format=FORMAT, device=self.clock.device,
            timeout=CALL_TIMEOUT, num_sms=self.within(limit),
        ) as ep:  # fmt: skip
            lanes = [ep.lane(0), ep.lane(1)]

            def pair() -> Any:
                recv = lanes[0].dispatch(*self.given, max_tokens=len(self.given[0]))
                return lanes[0].combine(self.y, recv), recv

            def beside() -> Any:
                self.fast.follow()
                self.slow.follow()
                with self.fast:
                    communicated = pair()
                with self.slow:
                    computed = self.layer.experts(self.recv)
                self.fast.join()
                self.slow.join()
                return communicated, computed

            found = self.found.setdefault("limits", {}).setdefault(str(limit), {})
            found["pair"] = self.time(pair)[0]
            found["beside"] = self.time(beside, sms=left)[0]
            for chunks in self.args.chunks:
                run = functools.partial(in_chunks, self.layer, lanes, self.given, chunks, self.fast, self.slow)
                took, (outs, _) = self.time(run, sms=left)
                error = float((torch.cat(outs).float() - self.want.float()).norm() / self.want.float().norm())
                found[f"{chunks} chunks"] = took
                found[f"{chunks} chunks, difference"] = max(everyone(error))
            ep.check()


def measure_model(name: str, args: argparse.Namespace, rank: int, clock: Clock) -> Iterator[dict[str, Any]]:
    """Yield the figures of one model for each number of tokens. Collective."""
    world, device = torch.distributed.get_world_size(), clock.device
    plan = make_layer_plan(
        "layer", ranks=world, device=args.device, cases=(name,), tokens=args.tokens, samples=args.samples
    )
    shape, most = plan.cases[0].shape, max(args.tokens)
    weights = make_weights(shape, seed=0, rank=rank, world_size=world, device=device)
    made = MoelinkLayer(shape, weights, fmt=FORMAT, max_tokens=most, device=device, timeout=CALL_TIMEOUT)
    for case in plan.cases:
        inputs = make_inputs(case, plan.settings, rank=rank, device=device)
        bench = Bench(Layer(made, inputs[0]), case, clock, args)
        bench.parts()
        if "shared" in args.what:
            bench.shared()
        for limit in args.limits if "chunks" in args.what else ():
            _, why = attempt(functools.partial(bench.limited, limit))
            if why:
                bench.found.setdefault("limits", {}).setdefault(str(limit), {})["reason"] = why
        yield bench.found
    made.check()
    made.close()


def gate_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return "passed", or by how much outputs of chunks differ from those of the whole layer."""
    limits = [limit for row in rows for limit in row.get("limits", {}).values()]
    found = [value for limit in limits for key, value in limit.items() if key.endswith("difference")]
    worst = max(found, default=0.0)
    return "passed" if worst <= TOLERANCE else f"outputs of chunks differ by {worst:.3g}"


def run(args: argparse.Namespace, save: Save) -> int:
    """Measure every case; the first rank saves the result after each. The status is 1 if an output was wrong."""
    if not is_launched():
        raise ConfigError("overlap", "a launcher with two ranks or more, as torchrun --nproc-per-node 2", "none")
    rows: list[dict[str, Any]] = []
    flush = make_layer_plan("layer", ranks=2, device=args.device).flush_bytes
    with joined(0, args.device, flush_bytes=flush) as clock:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for found in itertools.chain.from_iterable(measure_model(name, args, rank, clock) for name in args.case):
            rows.append(found)
            if rank == 0:
                print(json.dumps(found), flush=True)
                save("overlap", {
                    "device": args.device, "devices": device_names(args.device) * ranks, "ranks": ranks,
                    "unit": "microseconds", "samples": args.samples, "gate": gate_of(rows), "rows": rows,
                })  # fmt: skip
    return int(gate_of(rows) != "passed")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--case", nargs="+", choices=tuple(SHAPES), default=["qwen3-30b-a3b", "deepseek-v3"])
    parser.add_argument("--limits", nargs="+", type=positive, default=[24, 48], help="SMs of communication")
    parser.add_argument("--chunks", nargs="+", type=positive, default=[2, 4])
    parser.add_argument("--tokens", nargs="+", type=positive, default=[4096], help="of a rank")
    parser.add_argument("--what", nargs="+", choices=("shared", "chunks"), default=["shared", "chunks"])
    add_numbers(parser, {"samples": 9})


main = Script("overlap", __doc__, _options, run).main

if __name__ == "__main__":
    raise SystemExit(main())
