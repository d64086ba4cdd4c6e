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
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

from moelink.kernels.launch.constants import combine_spec, dispatch_spec
from moelink.kernels.launch.grid import Launch
from moelink.transports.symmetric import combine as combining
from moelink.transports.symmetric import plans as dispatching
from moelink_bench.contenders import MoelinkContender
from moelink_bench.document import device_names
from moelink_bench.measure import PHASES
from moelink_bench.presets import Case, Settings
from moelink_bench.ranks import CALL_TIMEOUT, joined
from moelink_bench.script import Save, Script, add_numbers
from moelink_bench.timing import Clock, capture, everyone, slowest_rank
from moelink_bench.workload import Workload, make_workload

SETTINGS = Settings(samples=10)
METHOD = (
    f"events around replays of a CUDA graph of {SETTINGS.calls} calls, median over {SETTINGS.samples} of the slowest "
    "rank, us per call"
)


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


def measure(
    workload: Workload, phases: Sequence[str], clock: Clock, *, most_tokens: int | None = None
) -> dict[str, float]:
    """Return the microseconds of a call of each of ``phases`` ("dispatch", "combine", "both"), of the slowest rank.

    ``most_tokens``: what the communicator is for, None for the workload's.
    """
    contender = MoelinkContender(
        workload, transport="symmetric", device=clock.device, timeout=CALL_TIMEOUT, most_tokens=most_tokens
    )
    repeats, found = [contender.repeats(copy) for copy in range(workload.copies)], {}
    for phase in phases:
        calls = [repeats[index % workload.copies][phase] for index in range(SETTINGS.calls)]
        for call in calls:
            call()
        captured = capture(calls, clock.device)
        samples = clock.measure(captured.replay, samples=SETTINGS.samples, warmup=SETTINGS.warmup)
        found[phase] = slowest_rank(everyone(samples)).median / SETTINGS.calls
    contender.check()
    contender.close()
    return found


def rows_of_settings(args: argparse.Namespace, workload: Workload, clock: Clock) -> Iterator[dict[str, Any]]:
    """Time one phase with each setting."""
    for chosen in args.settings:
        with in_force(chosen, args.phase, dict(args.spec)):
            took = measure(workload, (args.phase,), clock, most_tokens=args.most)[args.phase]
        yield {
            "phase": args.phase, "format": args.format, "tokens": workload.case.tokens, "us": took,
            **vars(chosen.launch), "block": chosen.block, **dict(args.spec),
        }  # fmt: skip


def rows_of_pairs(args: argparse.Namespace, workload: Workload, clock: Clock) -> Iterator[dict[str, Any]]:
    """Time dispatch, combine and both in turn."""
    found = measure(workload, PHASES, clock)
    rounded = {phase: round(took, 1) for phase, took in found.items()}
    yield {"format": args.format, "tokens": workload.case.tokens, **rounded}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("settings", nargs="*", type=setting, help="senders,receivers,warps,registers[,block]")
    parser.add_argument("--phase", choices=("dispatch", "combine"), default="dispatch", help="of settings")
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--spec", type=field, nargs="+", default=[], help="fields of the phase's spec: NAME=number")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--most", type=int, help="max_tokens_per_rank of settings; default: the largest of --tokens")
    add_numbers(parser, {"hidden": 7168, "experts": 256, "topk": 8})


def run(args: argparse.Namespace, save: Save) -> int:
    """Print a line a row on rank 0, and save the document."""
    args.most = args.most or max(args.tokens)
    with joined(int(os.environ["RANK"]), "cuda", flush_bytes=SETTINGS.rotation_bytes) as clock:
        make_rows = rows_of_settings if args.settings else rows_of_pairs
        rows, rank, ranks = [], dist.get_rank(), dist.get_world_size()
        for tokens in args.tokens:
            case = Case(
                tokens=tokens, hidden_size=args.hidden, num_experts=args.experts, topk=args.topk, format=args.format
            )
            workload = make_workload(case, SETTINGS, rank=rank, world_size=ranks, device=clock.device)
            for row in make_rows(args, workload, clock):
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
