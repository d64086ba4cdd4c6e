"""Measure how long a layer takes until its first output is there, with an empty cache of kernels and with a full one.

Each line is processes of their own, one a rank: they open a communicator, make a layer, and call it twice; with
``--training`` the calls record gradients, and their backwards follow. Seconds are those of the slowest rank, with the
device idle at the end of each step.

* ``first call``: an empty cache, no warmup: kernels are compiled one after the other as they are launched.
* ``warmup``: an empty cache, and ``layer.warmup()`` before the first call.
* ``again``: the same with the cache that the line before has filled.

    python -m moelink_bench.startup --ranks 2 --format fp8_block128
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import moelink
from moelink.nn import MoE
from moelink.nn.expert_backends import ExpertsBackend
from moelink.testing import run_ranks
from moelink_bench.document import device_names, markdown
from moelink_bench.layer.plan import SHAPES
from moelink_bench.ranks import CALL_TIMEOUT
from moelink_bench.script import Save, Script, positive

BENCHMARK = "startup"
LINES = ("first call", "warmup", "again")
STEPS = ("init", "layer", "warmup", "first", "second")
TARGET = 20.0
"""Seconds of ``warmup`` and ``first`` with an empty cache, at most."""


@contextmanager
def cache_at(folder: Path) -> Iterator[None]:
    """Let processes that start inside keep kernels in ``folder``."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = before


def first_calls(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each step, and the kernels of the warmup. The program of ``world_size`` processes."""
    shape, training, on_cuda = SHAPES[options["case"]], options["training"], options["device"] == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    seconds: dict[str, float] = {}
    kernels: tuple[str, ...] = ()
    latest = time.monotonic()

    def end(step: str) -> None:
        nonlocal latest
        if on_cuda:
            torch.cuda.synchronize(device)
        now = time.monotonic()
        seconds[step], latest = now - latest, now

    with moelink.init(
        num_experts=shape.num_experts, topk=shape.topk, hidden_size=shape.hidden_size, device=device,
        max_tokens_per_rank=options["tokens"], dispatch_format=options["format"], timeout=CALL_TIMEOUT * 5,
    ) as ep:  # fmt: skip
        end("init")
        backend: ExpertsBackend = "dequantize" if training else "auto"
        layer = MoE(ep, intermediate_size=shape.intermediate_size, router=shape.router, experts_backend=backend)
        end("layer")
        if options["line"] != "first call":
            kernels = layer.warmup(training=training).kernels
        end("warmup")
        x = torch.randn(options["tokens"], shape.hidden_size, device=device).bfloat16().requires_grad_(training)
        for step in ("first", "second"):
            with torch.set_grad_enabled(training):
                out = layer(x)
            if training:
                out.backward(torch.ones_like(out))
            end(step)
        ep.check()
    return {"seconds": seconds, "kernels": list(kernels)}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=positive, default=1)
    parser.add_argument("--case", choices=tuple(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--format", default="fp8_block128")
    parser.add_argument("--tokens", type=positive, default=128, help="max_tokens_per_rank, and tokens of the calls")
    parser.add_argument("--training", action="store_true", help="calls with gradients and their backward")
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))


def run(args: argparse.Namespace, save: Save) -> int:
    """Measure, print a table and save the result."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for line in args.lines:
            given = {**vars(args), "line": line}
            given.pop("out")
            with cache_at(Path(place) / ("empty" if line == "first call" else "shared")):
                found = run_ranks(first_calls, args.ranks, given, timeout=600)
            slowest = {step: round(max(each["seconds"][step] for each in found), 2) for step in STEPS}
            rows.append({"line": line, "seconds": slowest, "kernels": found[0]["kernels"]})
            print(f"{line}: {slowest}, {len(found[0]['kernels'])} kernels", flush=True)
    lines = [
        [row["line"], *(f"{row['seconds'][step]:.1f}" for step in STEPS), str(len(row["kernels"]))] for row in rows
    ]
    print(markdown(["cache", *(f"{step}, s" for step in STEPS), "kernels"], lines))
    settings = {name: getattr(args, name) for name in ("case", "format", "tokens", "training")}
    save(BENCHMARK, {
        "device": args.device, "devices": device_names(args.device) * args.ranks, "ranks": args.ranks,
        "settings": settings,
        "unit": "seconds of the slowest rank", "target": TARGET, "rows": rows,
    })  # fmt: skip
    return 0


main = Script("startup", __doc__, options, run, out="startup_{ranks}x{device}.json").main

if __name__ == "__main__":
    raise SystemExit(main())
