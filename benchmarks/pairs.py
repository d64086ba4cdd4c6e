"""Dispatch, combine and both in turn over numbers of tokens, quickly: no peers, no gate, one table.

    torchrun --nproc-per-node 2 benchmarks/pairs.py --tokens 1 8 32 128 4096

Event time per call in microseconds over replays of a graph of 20 calls, median of the slowest rank. For looking at a
change to the kernels; what users get is measured by ``moelink bench``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moelink
import sweep
from moelink.tools.bench.timing import CudaClock

COPIES_OF_ROWS = 4
"""Expert outputs that combines take in turn, so that not all of them find theirs in the cache."""


def measure(args: Any, tokens: int, rank: int, clock: CudaClock) -> dict[str, float]:
    """Microseconds of a dispatch, a combine, and one after the other."""
    copies = 2 if tokens > 512 else sweep.SETTINGS.calls
    data = [sweep.inputs(rank, copy, tokens, args, clock.device) for copy in range(copies)]
    with moelink.init(
        num_experts=args.experts, topk=args.topk, hidden_size=args.hidden, max_tokens_per_rank=tokens,
        dispatch_format=args.format, transport="symmetric", capacity=11 * tokens + 512,
    ) as ep:  # fmt: skip
        recvs = [ep.dispatch(*each) for each in data]
        shape = (recvs[0].tokens.shape[0], args.hidden)
        ys = [torch.randn(shape, device=clock.device).bfloat16() for _ in range(min(copies, COPIES_OF_ROWS))]
        out = torch.empty(tokens, args.hidden, device=clock.device, dtype=torch.bfloat16)

        def dispatch(i: int) -> moelink.DispatchOutput:
            return ep.dispatch(*data[i % copies], out=recvs[i % copies])

        def combine(i: int) -> torch.Tensor:
            return ep.combine(ys[i % len(ys)], recvs[i % copies], out=out)

        def both(i: int) -> torch.Tensor:
            return ep.combine(ys[i % len(ys)], dispatch(i), out=out)

        calls: dict[str, Callable[[int], Any]] = {"dispatch": dispatch, "combine": combine, "both": both}
        found = {name: round(sweep.microseconds(call, clock), 1) for name, call in calls.items()}
        ep.check()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="fp8_block128")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 4096])
    parser.add_argument("--commit", help="commit to record, where there is no repository")
    parser.add_argument("--out", type=Path, help="write the result there, as JSON")
    for name, value in (("hidden", 7168), ("experts", 256), ("topk", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    clock = CudaClock(device, flush_bytes=sweep.SETTINGS.rotation_bytes)
    rows = []
    for tokens in args.tokens:
        rows.append({"format": args.format, "tokens": tokens, **measure(args, tokens, rank, clock)})
        if rank == 0:
            print(json.dumps(rows[-1]), flush=True)
    if rank == 0 and args.out:
        sweep.write(args, "pairs", "pairs.py", rows, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
