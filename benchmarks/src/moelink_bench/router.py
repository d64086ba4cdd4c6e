"""Time a router's choice of experts: one kernel against a chain of torch operators, and the router as a whole.

The columns of a row, by the number of tokens:

* ``chain``, ``kernel``: from logits to ids and weights, by torch's operators and by moelink's kernel.
* ``chain_router``: from bf16 tokens, by a product of numbers converted to fp32 in each call, then the chain.
* ``product``, ``router``: the logits of ``moelink.nn.Router`` from bf16 tokens, and all of it.

A figure is the median time of replays of a CUDA graph, divided by its calls, on one device. Ids and weights of the
kernel are first compared with those of its twin, bit for bit; ``same_ids`` is the part of tokens for which the chain
chooses the same experts, as it breaks ties in another way.

    python -m moelink_bench.router --tokens 1 8 128 1024 4096 --out router.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moelink.nn import Router, route
from moelink.rows.wide_product import wide_product
from moelink_bench.document import device_names
from moelink_bench.experts import microseconds
from moelink_bench.layer.plan import SHAPES, Shape
from moelink_bench.script import Save, Script, positive

_DEEPSEEK_V3 = SHAPES["deepseek-v3"]
MODELS: Mapping[str, Shape] = MappingProxyType({
    "qwen3": SHAPES["qwen3-30b-a3b"],
    "deepseek-v3": replace(_DEEPSEEK_V3, router=replace(_DEEPSEEK_V3.router, correction_bias=True)),
    "mixtral": SHAPES["mixtral-8x7b"],
})  # fmt: skip
"""By name, the layer whose router is timed."""


def chain(logits: Tensor, bias: Tensor | None, model: Shape) -> tuple[Tensor, Tensor]:
    """Ids and weights by one torch operator after the other, as moelink chose them before it had a kernel."""
    config = model.router
    scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
    compared = scores if bias is None else scores + bias
    if config.num_groups > 1:
        grouped = compared.unflatten(1, (config.num_groups, -1))
        values = grouped.topk(2, dim=-1).values.sum(-1) if config.group_score == "top2" else grouped.amax(-1)
        best = values.topk(config.topk_groups, dim=-1).indices
        barred = torch.ones_like(values, dtype=torch.bool).scatter(1, best, False)
        compared = grouped.masked_fill(barred[:, :, None], float("-inf")).flatten(1)
    ids = compared.topk(model.topk, dim=-1).indices
    weights = scores.gather(1, ids)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * config.scaling_factor


def chain_router(x: Tensor, router: Router, model: Shape) -> tuple[Tensor, Tensor]:
    """The chain, with its logits."""
    return chain(functional.linear(x.float(), router.weight.float()), router.correction_bias, model)


def make_router(model: Shape, device: torch.device) -> Router:
    """Draw a router in bf16, and its bias."""
    router = Router(
        model.hidden_size, model.num_experts, topk=model.topk, config=model.router, dtype=torch.bfloat16
    ).to(device)
    if router.correction_bias is not None:
        router.correction_bias.normal_(std=0.1)
    return router


def measure_tokens(
    tokens: int, model: Shape, router: Router, device: torch.device, samples: int
) -> dict[str, float | bool]:
    """The figures of one number of tokens."""
    x = torch.randn(tokens, model.hidden_size, device=device).to(torch.bfloat16)
    logits, bias, config = router(x).logits, router.correction_bias, model.router
    got, (plain, _) = route(logits, config, topk=model.topk, correction_bias=bias), chain(logits, bias, model)
    on_host = None if bias is None else bias.cpu()
    expected = route(logits.cpu(), config, topk=model.topk, correction_bias=on_host)  # by the twin
    pairs = (got.topk_ids, expected.topk_ids), (got.topk_weights, expected.topk_weights)
    equal = all(torch.equal(there.cpu(), here) for there, here in pairs)
    same = (got.topk_ids.sort(-1).values == plain.sort(-1).values).all(-1)
    ways: dict[str, Callable[[], object]] = {
        "chain": lambda: chain(logits, bias, model),
        "kernel": lambda: route(logits, config, topk=model.topk, correction_bias=bias),
        "chain_router": lambda: chain_router(x, router, model),
        "product": lambda: wide_product(x, router.weight),
        "router": lambda: router(x),
    }
    figures = {f"{way}_us": round(microseconds(call, device, samples), 2) for way, call in ways.items()}
    return {**figures, "same_ids": round(float(same.float().mean()), 4), "bits_of_twin": equal}


def rows_of(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure all models with all numbers of tokens."""
    for name in args.models:
        torch.manual_seed(0)
        router = make_router(MODELS[name], device)
        for tokens in args.tokens:
            found = measure_tokens(tokens, MODELS[name], router, device, args.samples)
            yield {"model": name, "tokens": tokens, **found}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--tokens", nargs="+", type=positive, default=[1, 8, 128, 1024, 4096])
    parser.add_argument("--samples", type=positive, default=21)


def run(args: argparse.Namespace, save: Save) -> int:
    """Measure, print a line a row, and save the result. Returns 1 where kernel and twin differ."""
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    begin, rows = time.monotonic(), []
    with torch.no_grad():
        for row in rows_of(args, device):
            print(json.dumps(row), flush=True)
            rows.append(row)
    right = all(row["bits_of_twin"] for row in rows)
    save("router", {
        "device": device.type, "devices": device_names(device.type),
        "unit": "microseconds a call, median of replays of a CUDA graph",
        "seconds": round(time.monotonic() - begin, 1), "gate": "passed" if right else "failed", "rows": rows,
    })  # fmt: skip
    return int(not right)


main = Script("router", __doc__, options, run, out="router_{device}.json").main

if __name__ == "__main__":
    raise SystemExit(main())
