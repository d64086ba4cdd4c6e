"""Host time of one eager dispatch and combine on the symmetric transport, and what of it goes into making tensors.

One rank. On a CUDA device (``--device cuda``) the kernels are launched; on a CPU, where they would be interpreted,
launches only gather their arguments, so that what is timed is Python, PyTorch's checks and allocations. Processor time
of this process, not elapsed time: the least of many short batches, as other work on the machine only ever adds to it.

* ``dispatch``, ``combine``: one call. ``pair``: one after the other.
* ``tensors``: the calls of ``torch.empty_strided`` that a pair makes, alone, with the same arguments.

    python benchmarks/host_time.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import date
from typing import Any
from unittest import mock

import torch

import provenance
from moelink.tools.bench.provenance import command_line

SIZES = {"num_experts": 64, "topk": 8, "hidden_size": 7168, "max_tokens_per_rank": 128}
FORMAT = "fp8_block128"
TOKENS, CAPACITY = 128, 1024
BATCHES, CALLS, WARMUP = 300, 20, 50


def least(call: Callable[[], Any], settle: Callable[[], None]) -> float:
    """Microseconds of processor time of one call."""
    for _ in range(WARMUP):
        call()
    best = float("inf")
    for _ in range(BATCHES):
        settle()
        start = time.process_time_ns()
        for _ in range(CALLS):
            call()
        best = min(best, (time.process_time_ns() - start) / CALLS / 1e3)
    return round(best, 1)


def measure(device: torch.device) -> dict[str, Any]:
    """Microseconds of each part, and how many tensors a pair makes."""
    import moelink

    ep = moelink.init(**SIZES, dispatch_format=FORMAT, capacity=CAPACITY, transport="symmetric", device=device)
    x = torch.randn(TOKENS, SIZES["hidden_size"], device=device).bfloat16()
    topk_weights, topk_ids = torch.rand(TOKENS, SIZES["num_experts"], device=device).topk(SIZES["topk"])
    topk_ids = topk_ids.int()
    y = torch.zeros(CAPACITY, SIZES["hidden_size"], device=device).bfloat16()
    recv = ep.dispatch(x, topk_ids, topk_weights)

    def pair() -> torch.Tensor:
        return ep.combine(y, ep.dispatch(x, topk_ids, topk_weights))

    empty = torch.empty_strided
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def noting(*args: Any, **options: Any) -> torch.Tensor:
        made.append((args, options))
        return empty(*args, **options)

    with mock.patch.object(torch, "empty_strided", noting):
        pair()

    def tensors() -> list[torch.Tensor]:
        return [empty(*args, **options) for args, options in made]

    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    calls = {
        "dispatch": lambda: ep.dispatch(x, topk_ids, topk_weights),
        "combine": lambda: ep.combine(y, recv),
        "pair": pair,
        "tensors": tensors,
    }
    with torch.no_grad():
        times = {name: least(call, settle) for name, call in calls.items()}
    ep.close()
    return {"microseconds": times, "tensors_of_a_pair": len(made)}


def main() -> None:
    """Measure, write the result, print it."""
    parser = argparse.ArgumentParser(description="Host time of an eager dispatch and combine.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", help="where the result goes instead of benchmarks/results/host_time_DEVICE.json")
    parser.add_argument("--commit", help="commit to record, where there is no repository")
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    launches = device.type == "cuda"
    if not launches:
        os.environ["TRITON_INTERPRET"] = "1"
    from moelink.transports.symmetric.rank import Rank

    def gather(_rank: Rank, _program: Any, tensors: Callable[[bool], Any], *_: Any) -> None:
        tensors(False)

    with mock.patch.object(Rank, "launch", Rank.launch if launches else gather):
        result = measure(device)
    document = {
        "schema_version": 1,
        "benchmark": "host_time",
        "command": command_line("python benchmarks/host_time.py", sys.argv[1:]),
        "date": date.today().isoformat(),
        **provenance.collect(),
        "device": args.device,
        "devices": [torch.cuda.get_device_name(device) if launches else "CPU"],
        "launches": launches,
        "case": {**SIZES, "dispatch_format": FORMAT, "num_tokens": TOKENS, "capacity": CAPACITY},
        **({"commit": args.commit, "dirty": None} if args.commit else {}),
        "unit": "microseconds of the host's processor time per call",
        "settings": {"batches": BATCHES, "calls": CALLS, "warmup": WARMUP},
        **result,
    }
    out = args.out or provenance.ROOT / provenance.RESULTS / f"host_time_{args.device}.json"
    with open(out, "w") as file:
        file.write(json.dumps(document, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
