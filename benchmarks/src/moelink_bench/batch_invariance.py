"""Compare ``moelink.nn.MoE`` with and without ``batch_invariant``, on CPU ranks over gloo.

Both layers have the same weights and take the same tokens, in the same run, in turns, without gradients. Nothing is
timed before the layer with the setting has passed the gate: its results are those of the tokens one by one, bit for
bit, and near those of the other layer. A time is the median over iterations of the slowest rank.

The figures are those of a small machine without a GPU, and say nothing about GPUs. Bytes are counted by the transport,
and do not depend on the machine.

    python -m moelink_bench.batch_invariance
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from functools import partial
from math import comb
from typing import Any

import torch
from torch import Tensor

import moelink
from moelink.nn import MoE
from moelink.testing import run_ranks
from moelink_bench.script import Save, Script, add_numbers
from moelink_bench.timing import Turns, WallClock, first_fault, in_turns, slowest_rank

BYTES_FORMULA = (
    "rows home that cross ranks, for each token: without the setting one for each other rank with an expert of it, "
    "(R - 1) (1 - C(E - E / R, K) / C(E, K)) on average with uniform routing; with it one for each expert on another "
    "rank, K (R - 1) / R. The bytes counted are all that rank 0 sends in combine, 16 bytes a row for its place included"
)
TOKENS, DTYPES = (1, 16, 128), {"fp32": torch.float32, "bf16": torch.bfloat16}
SETTINGS = {"off": False, "on": True}


@dataclass(frozen=True)
class Case:
    """Sizes of the layer."""

    ranks: int = 4
    hidden_size: int = 512
    intermediate_size: int = 256
    num_experts: int = 32
    topk: int = 8
    iterations: int = 15


def rows_home(ranks: int, num_experts: int, topk: int) -> tuple[float, float]:
    """Return rows home of a token that cross ranks, without the setting and with it, by the formula.

    >>> [round(rows, 2) for rows in rows_home(8, 256, 8)]
    [4.63, 7.0]
    """
    owned = num_experts // ranks
    absent = comb(num_experts - owned, topk) / comb(num_experts, topk)
    return (ranks - 1) * (1 - absent), topk * (ranks - 1) / ranks


def measure_rank(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """Pass the gate and time both layers for each dtype and number of tokens, on one rank."""
    found: dict[str, Any] = {"fault": "", "rows": []}
    for name, dtype in DTYPES.items():
        layers, communicators = {}, {}
        for setting, fixed in SETTINGS.items():
            communicators[setting] = moelink.init(
                num_experts=case.num_experts, topk=case.topk, hidden_size=case.hidden_size,
                max_tokens_per_rank=max(TOKENS), dispatch_format=name, combine_dtype=dtype, batch_invariant=fixed,
                transport="collective",
            )  # fmt: skip
            layers[setting] = MoE(communicators[setting], intermediate_size=case.intermediate_size)
        for tokens in TOKENS:
            x = torch.randn(tokens, case.hidden_size, generator=torch.Generator().manual_seed(rank)).to(dtype)
            fault = first_fault(gate(layers, x))
            if fault:
                return {**found, "fault": f"{name}, {tokens} tokens: {fault}"}
            before = {setting: ep.traffic().combine for setting, ep in communicators.items()}
            actions = {setting: partial(layer, x) for setting, layer in layers.items()}
            times = in_turns(actions, WallClock(), Turns(turns=case.iterations, dropped=2))
            calls = case.iterations + 2
            sent = {s: (ep.traffic().combine - before[s]) // calls for s, ep in communicators.items()}
            found["rows"].append({"dtype": name, "tokens": tokens, "us": times, "bytes_home": sent})
        for ep in communicators.values():
            ep.close()
    return found


def gate(layers: dict[str, MoE], x: Tensor) -> str:
    """Return the fault of the results, or ""."""
    whole, other = layers["on"](x), layers["off"](x)
    alone = torch.cat([layers["on"](one) for one in x[:4].split(1)])
    if not torch.equal(alone, whole[:4]):
        return "tokens by themselves have other bits than in the batch"
    off = (whole.float() - other.float()).abs().max().item()
    return (
        "" if off <= 0.05 * max(1.0, other.float().abs().max().item()) else f"the outputs of the layers differ by {off}"
    )


def rank_main(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """Entry point of a rank."""
    torch.set_num_threads(1)
    with torch.no_grad():
        return measure_rank(rank, world_size, case)


def run(args: argparse.Namespace, save: Save) -> int:
    """Run all cases and save the result."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    case = Case(**{name: getattr(args, name) for name in asdict(Case())})
    ranks: list[dict[str, Any]] = run_ranks(rank_main, case.ranks, case, timeout=900.0)
    if ranks[0]["fault"]:
        print(f"correctness gate failed; nothing was timed\n{ranks[0]['fault']}")
        return 1
    rows = []
    for parts in zip(*(rank["rows"] for rank in ranks), strict=True):
        us = {s: asdict(slowest_rank([part["us"][s] for part in parts])) for s in SETTINGS}
        first = {key: parts[0][key] for key in ("dtype", "tokens", "bytes_home")}
        ratio, (off, on) = us["on"]["median"] / us["off"]["median"], (us[s]["median"] / 1e3 for s in SETTINGS)
        rows.append({**first, "us": us, "time_ratio": ratio})
        text = f"{first['dtype']:5}{first['tokens']:5} tokens: {off:8.2f} -> {on:8.2f} ms, {ratio:.2f}"
        print(f"{text}; bytes home {first['bytes_home']}")
    formula = {f"{r} ranks": dict(zip(SETTINGS, rows_home(r, 256, 8), strict=True)) for r in (2, 4, 8, 16, 32, 64)}
    save("batch_invariance", {
        "case": {**asdict(case), "transport": "gloo"}, "gate": "passed", "bytes_formula": BYTES_FORMULA,
        "rows_home_top8_of_256": formula, "rows": rows,
    })  # fmt: skip
    return 0


main = Script(
    "batch_invariance", __doc__, lambda parser: add_numbers(parser, asdict(Case())), run,
    out="batch_invariance_cpu.json",
).main  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main())
