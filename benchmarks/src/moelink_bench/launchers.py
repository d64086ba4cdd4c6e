"""Compare the launchers of ``moelink.contract`` with a communicator: the same kernels, the same choice of CTAs.

One pair of dispatch and combine with weights that travel and sums that return, by either side, on one device. With one
rank both use their fused launches, with more the device plays all ranks, first halves before second ones, in one
stream, and each rank grants its credits in a launch of its own, as it must where ranks share a device. What both return
is compared bit for bit first. On a CUDA device a figure is of replays of a graph of many pairs, the sides in turn, so
that the host's time, which differs, takes no part. On a CPU kernels are interpreted and figures are functional, not
performance.

    python -m moelink_bench.launchers --device cuda --ranks 1 8 --tokens 1 32 128 1024 4096
"""

from __future__ import annotations

import argparse
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

import moelink
from moelink.names import BuiltInFormat
from moelink.testing import assert_bitwise_equal
from moelink_bench.contenders import Contender
from moelink_bench.document import device_names
from moelink_bench.presets import SMOKE, Case, Settings
from moelink_bench.script import Save, Script, add_numbers, positive
from moelink_bench.timing import Action, Turns, capture, in_turns, make_clock, repeated, slowest_rank
from moelink_bench.workload import Batch, rank_batch

TARGET = 1.05
"""Most time of the launchers, in times of the communicator."""

SLACK = 1.5
"""Rows of an output, in rows of an even distribution."""


@dataclass(frozen=True)
class Given(Batch):
    """A rank's inputs, and ``y``, which stands for the experts' outputs: [capacity, hidden_size] bf16."""

    y: Tensor


class Side(Contender):
    """One way to make a pair on all ranks, of the same inputs every time.

    Attributes:
        outs: [tokens, hidden_size] of each rank, after a pair.
    """

    outs: list[Tensor]

    @abstractmethod
    def pair(self) -> None:
        """Dispatch and combine on all ranks."""

    def repeats(self, copy: int) -> dict[str, Action]:  # noqa: ARG002
        return {"pair": self.pair}


def capacity_of(case: Case) -> int:
    """Rows of a rank's output."""
    return int(SLACK * case.tokens * case.topk) + case.num_experts


def inputs(case: Case, ranks: int, device: torch.device) -> list[Given]:
    """The inputs of both sides."""
    found = []
    for rank in range(ranks):
        drawn = rank_batch(case, seed=7, rank=rank, copy=0, world_size=ranks, device=device)
        generator = torch.Generator(device).manual_seed(rank)
        y = torch.randn(capacity_of(case), case.hidden_size, device=device, generator=generator).to(torch.bfloat16)
        found.append(Given(drawn.x, drawn.topk_ids, drawn.topk_weights, y))
    return found


class LauncherSide(Side):
    """The launchers over memory and tensors of this class."""

    name = "launchers"

    def __init__(self, case: Case, given: Sequence[Given], device: torch.device, timeout: float) -> None:
        from moelink import contract
        from moelink.memory import create_all

        self._contract = contract
        params = contract.EPParams(
            dispatch_fmt_str=case.format, hidden_size=case.hidden_size, top_k=case.topk, n_experts=case.num_experts,
            max_token_per_rank=case.tokens, n_gpus_per_node=len(given), pre_reduce=True, lamport=True,
            n_sms=case.num_sms, timeout=timeout,
        )  # fmt: skip
        self._memories = create_all([device] * len(given), params.nbytes)
        self._eps = [contract.ep_init(params, memory) for memory in self._memories]
        rows = capacity_of(case)
        self._handlers = [contract.TokenHandler.allocate(ep, rows=rows, weighted=True) for ep in self._eps]
        self._routings = [contract.EPRouting.allocate(ep) for ep in self._eps]
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._tensors = [
            (
                torch.empty(ep.config.num_groups + 1, **integers),
                torch.empty(ep.config.num_groups, **integers),
                torch.empty(rows, 3, **integers),
            )
            for ep in self._eps
        ]
        self._given = given
        self.outs = [torch.empty_like(each.x) for each in given]

    def pair(self) -> None:
        columns: list[list[Any]] = [list(column) for column in zip(*self._tensors, strict=True)]
        given, eps = self._given, self._eps
        ids = [each.topk_ids for each in given]
        self._contract.distributed_ep_dispatch(
            eps, self._handlers, columns[0], columns[1], columns[2], [ep.atomic_counters[0] for ep in eps],
            [each.x for each in given], ids, [ep.pointers[0] for ep in eps], self._routings,
            router_weights=[each.topk_weights for each in given],
        )  # fmt: skip
        self._contract.distributed_ep_combine(
            eps, self.outs, [ep.atomic_counters[1] for ep in eps], [each.y for each in given], self._routings,
            [ep.pointers[1] for ep in eps], ids,
            row_weights=[handler.weights for handler in self._handlers if handler.weights is not None],
        )  # fmt: skip

    def check(self) -> str:
        for ep in self._eps:
            ep.check()
        return ""

    def close(self) -> None:
        for ep, memory in zip(self._eps, self._memories, strict=True):
            ep.close()
            memory.close()


class TransportSide(Side):
    """The ranks of a communicator's symmetric transport, launched in one stream as the launchers are."""

    name = "communicator"

    def __init__(self, case: Case, given: Sequence[Given], device: torch.device, timeout: float) -> None:
        from moelink.memory import create_all
        from moelink.memory.workspace import Workspace
        from moelink.transports.base import DispatchRequest
        from moelink.transports.symmetric import SymmetricTransport

        configs = [
            moelink.EPConfig(
                num_experts=case.num_experts, topk=case.topk, hidden_size=case.hidden_size,
                max_tokens_per_rank=case.tokens, dispatch_format=case.format, capacity=capacity_of(case),
                num_sms=case.num_sms, timeout=timeout, world_size=len(given), rank=rank,
            )
            for rank in range(len(given))
        ]  # fmt: skip
        memories = create_all([device] * len(given), Workspace(configs[0]).nbytes)
        self._transport = SymmetricTransport(configs, memories, "launchers")
        self._given = given
        self._requests = [
            DispatchRequest(x=each.x, topk_ids=each.topk_ids, topk_weights=each.topk_weights) for each in given
        ]
        self.outs = [torch.empty_like(each.x) for each in given]
        self._kept: list[Any] = []

    def pair(self) -> None:
        from moelink.transports.base import CombineRequest
        from moelink.transports.symmetric.combine import Combine
        from moelink.transports.symmetric.dispatch import Dispatch

        ranks = self._transport.ranks
        dispatches = [Dispatch(rank, each, "launchers") for rank, each in zip(ranks, self._requests, strict=True)]
        _both(dispatches)
        combines = [
            Combine(rank, CombineRequest(y=each.y, recv=done.result(), out=out))
            for rank, each, done, out in zip(ranks, self._given, dispatches, self.outs, strict=True)
        ]
        _both(combines, 0)
        self._kept = [*dispatches, *combines]  # their tensors live until the next pair

    def check(self) -> str:
        if self.outs[0].is_cuda:
            torch.cuda.synchronize(self.outs[0].device)
        self._transport.check()
        return ""

    def close(self) -> None:
        self._transport.close()


def _both(calls: Sequence[Any], *slot: int) -> None:
    """Launch a call of one rank at once; of several ranks first halves, then second ones."""
    if len(calls) == 1:
        calls[0].send_and_receive(*slot)
        return
    for call in calls:
        call.send(*slot)
    for call in calls:
        call.receive(*slot)


def measure(case: Case, ranks: int, device: torch.device, settings: Settings, timeout: float) -> dict[str, Any]:
    """Return one row: the figures of both sides, and their quotient.

    Raises:
        AssertionError: the sides return different bits.
    """
    given = inputs(case, ranks, device)
    sides: list[Side] = [kind(case, given, device, timeout) for kind in (TransportSide, LauncherSide)]
    for side in sides:
        for _ in range(2):
            side.pair()
        side.check()
    for mine, other in zip(*(side.outs for side in sides), strict=True):
        assert_bitwise_equal(mine, other, f"the result of {case.label} on {ranks} ranks")
    clock = make_clock(device, flush_bytes=settings.rotation_bytes)
    calls, on_gpu = settings.calls, device.type == "cuda"
    actions = {
        side.name: capture([side.pair] * calls, device).replay if on_gpu else repeated(side.pair, calls)
        for side in sides
    }
    samples = in_turns(actions, clock, Turns(turns=settings.samples, dropped=settings.warmup))
    for side in sides:
        side.check()
        side.close()
    figures = {name: slowest_rank([[time / settings.calls for time in times]]) for name, times in samples.items()}
    return {
        "ranks": ranks, "form": "fused" if ranks == 1 else "split", "case": asdict(case),
        "us": {name: asdict(figure) for name, figure in figures.items()},
        "quotient": round(figures["launchers"].median / figures["communicator"].median, 3),
    }  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 8], help="ranks that one device plays")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 32, 128, 1024, 4096])
    parser.add_argument(
        "--formats", nargs="+", choices=get_args(BuiltInFormat), default=["bf16", "fp8_block128", "nvfp4"]
    )
    add_numbers(parser, {"hidden_size": 7168, "experts": 64, "topk": 8})
    parser.add_argument("--samples", type=positive, help="samples of a figure")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds after which a wait of a kernel ends")


def run(args: argparse.Namespace, save: Save) -> int:
    """Measure, and save the result after every row."""
    launches = args.device == "cuda"
    if not launches:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    device = torch.device("cuda", 0) if launches else torch.device("cpu")
    settings = Settings() if launches else SMOKE
    if args.samples is not None:
        settings = replace(settings, samples=args.samples)
    rows: list[dict[str, Any]] = []
    fields = {
        "device": args.device, "devices": device_names(args.device), "launches": launches,
        "unit": "microseconds per pair of dispatch and combine on all ranks that the device plays",
        "settings": asdict(settings),
        "gate": {"passed": True, "compared": "both sides' results, bit for bit"},
        "target": TARGET, "rows": rows,
    }  # fmt: skip
    cases = [(ranks, name, tokens) for ranks in args.ranks for name in args.formats for tokens in args.tokens]
    with torch.no_grad():
        for ranks, name, tokens in cases:
            case = Case(
                tokens=tokens, hidden_size=args.hidden_size, num_experts=args.experts, topk=args.topk, format=name
            )
            rows.append(measure(case, ranks, device, settings, args.timeout))
            us = {side: figure["median"] for side, figure in rows[-1]["us"].items()}
            print(
                f"{ranks} ranks, {case.label}: launchers {us['launchers']:.1f} us, "
                f"communicator {us['communicator']:.1f} us, quotient {rows[-1]['quotient']}",
                flush=True,
            )
            met = all(row["quotient"] <= TARGET for row in rows)
            save("launchers", {**fields, "complete": len(rows) == len(cases), "met": met})
    return 0


main = Script("launchers", __doc__, options, run, out="launchers_{device}.json").main

if __name__ == "__main__":
    raise SystemExit(main())
