"""Launch settings of the symmetric kernels, measured: programs of each role, warps, registers.

    torchrun --nproc-per-node 4 benchmarks/sweep.py --tokens 4096 --format bf16 80,316,8,80 132,264,8,80

One line of JSON per setting and phase: event time per call in microseconds over replays of a graph of 20 calls, median
of the slowest rank, as ``docs/performance.md`` quotes it. ``moelink bench`` measures what users get; this looks for it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import moelink
from moelink.kernels.cut import Launch
from moelink.transports.symmetric import combining, dispatching

CALLS, SAMPLES = 20, 10


def setting(text: str) -> Launch:
    """``senders,receivers,warps,registers``; 0 registers for no limit."""
    send, receive, warps, registers = map(int, text.split(","))
    return Launch(send, receive, num_warps=warps, maxnreg=registers or None)


def microseconds(call: Callable[[int], None], device: torch.device) -> float:
    """Time of one of CALLS calls in a graph, of the slowest rank; the median of SAMPLES replays."""
    call(0)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    times, together = [], torch.zeros(1, device=device)
    for _ in range(SAMPLES + 1):
        dist.all_reduce(together)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    slowest = torch.tensor(times[1:], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.median())


def inputs(rank: int, copy: int, args: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device=device).manual_seed(1000 * rank + copy)
    x = torch.randn(args.tokens, args.hidden, device=device, generator=generator).bfloat16()
    ids = torch.rand(args.tokens, args.experts, device=device, generator=generator).topk(args.topk).indices.int()
    return x, ids, torch.rand(args.tokens, args.topk, device=device, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", type=setting, help="senders,receivers,warps,registers")
    parser.add_argument("--phase", choices=("dispatch", "combine"), default="dispatch")
    parser.add_argument("--format", default="bf16")
    for name, value in (("tokens", 4096), ("hidden", 7168), ("experts", 256), ("topk", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    data = [inputs(rank, copy, args, device) for copy in range(2 if args.tokens > 512 else CALLS)]
    for launch in args.settings:
        dispatching.dispatch_launch = lambda *a, launch=launch, **k: launch  # type: ignore[misc,assignment]
        combining.combine_launch = lambda *a, launch=launch: launch  # type: ignore[misc,assignment]
        with moelink.init(
            num_experts=args.experts, topk=args.topk, hidden_size=args.hidden, max_tokens_per_rank=args.tokens,
            dispatch_format=args.format, transport="symmetric", capacity=11 * args.tokens + 512,
        ) as ep:  # fmt: skip
            recvs = [ep.dispatch(*data[i]) for i in range(2)]
            y = torch.randn(recvs[0].tokens.shape[0], args.hidden, device=device).bfloat16()
            out = torch.empty(args.tokens, args.hidden, device=device, dtype=torch.bfloat16)

            def dispatch(i: int, ep: Any = ep, recvs: Any = recvs) -> None:
                ep.dispatch(*data[i % len(data)], out=recvs[i % 2])

            def combine(i: int, ep: Any = ep, recvs: Any = recvs, y: Any = y, out: Any = out) -> None:
                ep.combine(y, recvs[i % 2], out=out)

            took = microseconds(dispatch if args.phase == "dispatch" else combine, device)
        if rank == 0:
            line = {"phase": args.phase, "format": args.format, "tokens": args.tokens, "us": round(took, 1)}
            print(json.dumps({**line, **vars(launch)}), flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
