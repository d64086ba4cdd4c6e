"""Launch settings of the symmetric kernels, measured: programs of each role, warps, registers.

    torchrun --nproc-per-node 4 benchmarks/sweep.py --tokens 512 4096 --format bf16 -- 80,316,8,80 132,264,8,80

Event time per call in microseconds over replays of a graph of 20 calls, median of the slowest rank, for each setting
and number of tokens; ``--out`` writes a document with the head of all results here. ``--spec BATCH=2 LATER=0`` replaces
fields of what the phase's kernel is compiled for (``kernels.spec``, ``kernels.combine_spec``). ``moelink bench``
measures what users get; this looks for it. Communicators for all numbers of tokens are of ``--most`` tokens: one
compiled kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import moelink
from moelink.kernels.launch.combine_constants import combine_spec
from moelink.kernels.launch.constants import dispatch_spec
from moelink.kernels.launch.grid import Launch
from moelink.tools.bench import Settings, provenance
from moelink.tools.bench.stats import slowest_rank
from moelink.tools.bench.timing import CudaClock, capture
from moelink.tools.bench.together import everyone
from moelink.transports.symmetric import combine as combining
from moelink.transports.symmetric import dispatch as dispatching

SETTINGS = Settings(samples=10)
METHOD = (
    f"events around replays of a CUDA graph of {SETTINGS.calls} calls, median over {SETTINGS.samples} of the slowest "
    "rank, us per call"
)


@dataclass(frozen=True)
class Setting:
    """A launch, and how much of a row a program of dispatch moves at a time (``dispatch_spec``'s ``max_block``)."""

    launch: Launch
    block: int


def setting(text: str) -> Setting:
    """``senders,receivers,warps,registers`` and, if it is not 4096, ``,block``; 0 registers for no limit."""
    send, receive, warps, registers, *block = map(int, text.split(","))
    return Setting(Launch(send, receive, num_warps=warps, maxnreg=registers or None), *block or [4096])


def field(text: str) -> tuple[str, int]:
    """``NAME=number``; 0 and 1 also stand for False and True."""
    name, value = text.split("=")
    return name, int(value)


def replaced(spec: Callable[..., Any], fields: dict[str, int], **more: Any) -> Callable[..., Any]:
    """``spec``, given ``more``, with ``fields`` of its result replaced."""

    def make(*args: Any, **kind: Any) -> Any:
        return dataclasses.replace(spec(*args, **more, **kind), **fields)

    return make


@contextmanager
def in_force(chosen: Setting, phase: str, fields: dict[str, int]) -> Iterator[None]:
    """Communicators that are made here have these settings."""
    block = {"max_block": chosen.block}
    dispatch_fields, combine_fields = (fields, {}) if phase == "dispatch" else ({}, fields)
    with (
        mock.patch.object(dispatching, "dispatch_launch", return_value=chosen.launch),
        mock.patch.object(combining, "combine_launch", return_value=chosen.launch),
        mock.patch.object(dispatching, "dispatch_spec", replaced(dispatch_spec, dispatch_fields, **block)),
        mock.patch.object(combining, "combine_spec", replaced(combine_spec, combine_fields)),
    ):
        yield


def microseconds(call: Callable[[int], Any], clock: CudaClock) -> float:
    """Time of one of the calls in a graph, of the slowest rank; the median of several replays."""
    call(0)
    captured = capture([functools.partial(call, i) for i in range(SETTINGS.calls)], clock.device)
    samples = clock.measure(captured.replay, samples=SETTINGS.samples, warmup=SETTINGS.warmup)
    return slowest_rank(everyone(samples)).median / SETTINGS.calls


def inputs(rank: int, copy: int, tokens: int, args: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device=device).manual_seed(1000 * rank + copy)
    x = torch.randn(tokens, args.hidden, device=device, generator=generator).bfloat16()
    ids = torch.rand(tokens, args.experts, device=device, generator=generator).topk(args.topk).indices.int()
    return x, ids, torch.rand(tokens, args.topk, device=device, generator=generator)


def measure(args: Any, tokens: int, data: list[tuple[torch.Tensor, ...]], clock: CudaClock) -> float:
    """Microseconds of a call of ``tokens`` tokens."""
    with moelink.init(
        num_experts=args.experts, topk=args.topk, hidden_size=args.hidden, max_tokens_per_rank=args.most,
        dispatch_format=args.format, transport="symmetric", capacity=11 * tokens + 512,
    ) as ep:  # fmt: skip
        recvs = [ep.dispatch(*data[i]) for i in range(2)]
        y = torch.randn(recvs[0].tokens.shape[0], args.hidden, device=clock.device).bfloat16()
        out = torch.empty(tokens, args.hidden, device=clock.device, dtype=torch.bfloat16)

        def dispatch(i: int) -> moelink.DispatchOutput:
            return ep.dispatch(*data[i % len(data)], out=recvs[i % 2])

        def combine(i: int) -> torch.Tensor:
            return ep.combine(y, recvs[i % 2], out=out)

        took = microseconds(dispatch if args.phase == "dispatch" else combine, clock)
        ep.check()
        return took


def write(
    args: Any, benchmark: str, script: str, rows: list[dict[str, Any]], device: torch.device, **more: Any
) -> None:
    """Write ``rows`` to ``args.out`` behind the head of all results."""
    head = {
        "schema_version": 1, "benchmark": benchmark,
        "command": provenance.command_line(f"torchrun benchmarks/{script}", sys.argv[1:]),
        **provenance.collect(args.commit), "devices": [torch.cuda.get_device_name(device)] * dist.get_world_size(),
        "ranks": dist.get_world_size(), "method": METHOD, **more, "hidden_size": args.hidden,
        "num_experts": args.experts, "topk": args.topk,
    }  # fmt: skip
    args.out.write_text(json.dumps({**head, "rows": rows}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", type=setting, help="senders,receivers,warps,registers[,block]")
    parser.add_argument("--phase", choices=("dispatch", "combine"), default="dispatch")
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--spec", type=field, nargs="+", default=[], help="fields of the phase's spec: NAME=number")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--most", type=int, help="max_tokens_per_rank; default: the largest of --tokens")
    parser.add_argument("--commit", help="commit to record, where there is no repository")
    parser.add_argument("--out", type=Path, help="write the result there, as JSON")
    for name, value in (("hidden", 7168), ("experts", 256), ("topk", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    args.most = args.most or max(args.tokens)
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    clock = CudaClock(device, flush_bytes=SETTINGS.rotation_bytes)
    rows = []
    for tokens in args.tokens:
        data = [inputs(rank, copy, tokens, args, device) for copy in range(2 if tokens > 512 else SETTINGS.calls)]
        for chosen in args.settings:
            with in_force(chosen, args.phase, dict(args.spec)):
                took = measure(args, tokens, data, clock)
            rows.append({
                "phase": args.phase, "format": args.format, "tokens": tokens, "us": took, **vars(chosen.launch),
                "block": chosen.block, **dict(args.spec),
            })  # fmt: skip
            if rank == 0:
                print(json.dumps(rows[-1]), flush=True)
    if rank == 0 and args.out:
        write(args, "launch settings", "sweep.py", rows, device, most_tokens=args.most)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
