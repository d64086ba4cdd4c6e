"""Time launch settings of the symmetric kernels, or pairs of dispatch and combine: no peers, no gate, one table.

With settings, one phase is timed with each of them: CTAs of each role, warps, registers.

    torchrun --nproc-per-node 4 -m moelink_bench.sweep --tokens 512 4096 --format bf16 -- 80,316,8,80 132,264,8,80

``--spec TOKENS_PER_BATCH=2 SCALES_LATER=0`` replaces fields of what the phase's kernel is compiled for. Communicators
for all numbers of tokens are of ``--most`` tokens: one compiled kernel.

Without settings, dispatch, combine and both in turn are timed as they are:

    torchrun --nproc-per-node 2 -m moelink_bench.sweep --tokens 1 8 32 128 4096 --format fp8_block128

Times are event time per call in microseconds over replays of a graph of 20 calls, median of the slowest rank. Use this
to look at a change to the kernels; ``moelink bench`` measures what users get.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args
from unittest import mock

import torch
import torch.distributed as dist

import moelink
from moelink.control.group import is_launched
from moelink.errors import ArgumentError, UnsupportedError
from moelink.kernels.launch.constants import combine_spec, dispatch_spec
from moelink.kernels.launch.grid import Launch
from moelink.names import BuiltInFormat
from moelink.transports.symmetric import combine as combining
from moelink.transports.symmetric import plans as dispatching
from moelink_bench.contenders import open_communicator
from moelink_bench.document import device_names
from moelink_bench.measure import PHASES
from moelink_bench.presets import Case, Settings
from moelink_bench.ranks import CALL_TIMEOUT, joined
from moelink_bench.script import Save, Script, add_numbers, positive
from moelink_bench.timing import Clock, capture, everyone, slowest_rank
from moelink_bench.workload import Batch, rank_batch

SETTINGS = Settings(samples=10)
METHOD = (
    f"events around replays of a CUDA graph of {SETTINGS.calls} calls, median over {SETTINGS.samples} of the slowest "
    "rank, us per call"
)
Rows = Iterator[dict[str, Any]]
COPIES_OF_ROWS = 4
"""Expert outputs that combines of a pair take in turn, so that not all of them find theirs in the cache."""


@dataclass(frozen=True)
class Setting:
    """A launch, and how much of a row a CTA of dispatch moves at a time (``dispatch_spec``'s ``max_block``)."""

    launch: Launch
    block: int


def setting(text: str) -> Setting:
    """Parse ``senders,receivers,warps,registers`` and, if it is not 4096, ``,block``; 0 registers for no limit."""
    send, receive, warps, registers, *block = map(int, text.split(","))
    return Setting(Launch(send, receive, num_warps=warps, maxnreg=registers or None), *block or [4096])


def field(text: str) -> tuple[str, int]:
    """Parse ``NAME=number``; 0 and 1 also stand for False and True."""
    name, value = text.split("=")
    return name, int(value)


def replaced(spec: Callable[..., Any], fields: dict[str, int], **more: Any) -> Callable[..., Any]:
    """Return ``spec``, given ``more``, with ``fields`` of its result replaced."""

    def make(*args: Any, **kind: Any) -> Any:
        return dataclasses.replace(spec(*args, **more, **kind), **fields)

    return make


@contextmanager
def in_force(chosen: Setting, phase: str, fields: dict[str, int]) -> Iterator[None]:
    """Give these settings to communicators that are made in the block."""
    block = {"max_block": chosen.block}
    dispatch_fields, combine_fields = (fields, {}) if phase == "dispatch" else ({}, fields)
    with (
        mock.patch.object(dispatching, "dispatch_launch", return_value=chosen.launch),
        mock.patch.object(combining, "combine_launch", return_value=chosen.launch),
        mock.patch.object(dispatching, "dispatch_spec", replaced(dispatch_spec, dispatch_fields, **block)),
        mock.patch.object(combining, "combine_spec", replaced(combine_spec, combine_fields)),
    ):
        yield


def microseconds(call: Callable[[int], Any], clock: Clock) -> float:
    """Return the time of one of the calls in a graph, of the slowest rank: the median of several replays."""
    call(0)
    captured = capture([functools.partial(call, i) for i in range(SETTINGS.calls)], clock.device)
    samples = clock.measure(captured.replay, samples=SETTINGS.samples, warmup=SETTINGS.warmup)
    return slowest_rank(everyone(samples)).median / SETTINGS.calls


def measure(case: Case, phases: Sequence[str], data: Sequence[Batch], clock: Clock, *, rows: int) -> dict[str, float]:
    """Return the microseconds of each of ``phases`` ("dispatch", "combine", "both") of a communicator for ``case``.

    Dispatches take ``data`` in turn, and combines ``rows`` expert outputs. Outputs rotate as ``data`` does, or over two
    where one phase is timed.
    """
    capacity = 11 * len(data[0].x) + 512
    with open_communicator(
        case, transport="symmetric", capacity=capacity, device=clock.device, timeout=CALL_TIMEOUT
    ) as ep:

        def sent(batch: Batch, out: moelink.DispatchOutput | None = None) -> moelink.DispatchOutput:
            return ep.dispatch(batch.x, batch.topk_ids, batch.topk_weights, out=out)

        recvs = [sent(batch) for batch in (data[:2] if len(phases) == 1 else data)]
        shape = (len(recvs[0].tokens), case.hidden_size)
        ys = [torch.randn(shape, device=clock.device, dtype=torch.bfloat16) for _ in range(rows)]
        out = torch.empty_like(data[0].x)

        def dispatch(i: int) -> moelink.DispatchOutput:
            return sent(data[i % len(data)], recvs[i % len(recvs)])

        def combine(i: int) -> torch.Tensor:
            return ep.combine(ys[i % rows], recvs[i % len(recvs)], out=out)

        def both(i: int) -> torch.Tensor:
            return ep.combine(ys[i % rows], dispatch(i), out=out)

        calls: dict[str, Callable[[int], Any]] = {"dispatch": dispatch, "combine": combine, "both": both}
        found = {phase: microseconds(calls[phase], clock) for phase in phases}
        ep.check()
        return found


def rows_of_settings(args: argparse.Namespace, case: Case, data: Sequence[Batch], clock: Clock) -> Rows:
    """Time one phase with each setting."""
    for chosen in args.settings:
        with in_force(chosen, args.phase, dict(args.spec)):
            most = dataclasses.replace(case, tokens=args.most)
            took = measure(most, (args.phase,), data, clock, rows=1)[args.phase]
        yield {
            "phase": args.phase, "format": args.format, "tokens": case.tokens, "us": took, **vars(chosen.launch),
            "block": chosen.block, **dict(args.spec),
        }  # fmt: skip


def rows_of_pairs(args: argparse.Namespace, case: Case, data: Sequence[Batch], clock: Clock) -> Rows:
    """Time dispatch, combine and both in turn."""
    found = measure(case, PHASES, data, clock, rows=min(len(data), COPIES_OF_ROWS))
    yield {"format": args.format, "tokens": case.tokens, **{phase: round(took, 1) for phase, took in found.items()}}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("settings", nargs="*", type=setting, help="senders,receivers,warps,registers[,block]")
    parser.add_argument("--phase", choices=("dispatch", "combine"), default="dispatch", help="of settings")
    parser.add_argument("--format", choices=get_args(BuiltInFormat), default="bf16")
    parser.add_argument("--spec", type=field, nargs="+", default=[], help="fields of the phase's spec: NAME=number")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[4096])
    parser.add_argument("--most", type=positive, help="max_tokens_per_rank of settings; default: the most --tokens")
    add_numbers(parser, {"hidden": 7168, "experts": 256, "topk": 8})


def run(args: argparse.Namespace, save: Save) -> int:
    """Print a line a row on rank 0, and save the document."""
    if not is_launched():
        raise ArgumentError(
            "sweep", "a rank of torchrun (torchrun --nproc-per-node N -m moelink_bench.sweep)", "a process of its own"
        )
    if not torch.cuda.is_available():
        raise UnsupportedError("device: expected a CUDA device for each rank, got none; run this on a GPU machine")
    args.most = args.most or max(args.tokens)
    with joined(int(os.environ["RANK"]), "cuda", flush_bytes=SETTINGS.rotation_bytes) as clock:
        make_rows = rows_of_settings if args.settings else rows_of_pairs
        rows, rank, ranks = [], dist.get_rank(), dist.get_world_size()
        for tokens in args.tokens:
            case = Case(
                tokens=tokens, hidden_size=args.hidden, num_experts=args.experts, topk=args.topk, format=args.format
            )
            data = [
                rank_batch(case, seed=0, rank=rank, copy=copy, world_size=ranks, device=clock.device)
                for copy in range(2 if tokens > 512 else SETTINGS.calls)
            ]
            for row in make_rows(args, case, data, clock):
                rows.append(row)
                if rank == 0:
                    print(json.dumps(row), flush=True)
    if rank == 0:
        save("launch settings" if args.settings else "pairs", {
            "devices": device_names("cuda") * ranks, "ranks": ranks, "method": METHOD,
            **({"most_tokens": args.most} if args.settings else {}), "hidden_size": args.hidden,
            "num_experts": args.experts, "topk": args.topk, "rows": rows,
        })  # fmt: skip
    return 0


main = Script("sweep", __doc__, options, run).main

if __name__ == "__main__":
    raise SystemExit(main())
