"""What the operator layer costs a call on the host, and so why what is neither differentiated nor traced bypasses it.

One rank on a CPU, so nothing travels: what is timed is Python, PyTorch's dispatcher and a few small tensors. A *pair*
is one dispatch and one combine of the same tokens. Ways to make the same pair, in turns within each round:

* ``direct``: ``ep.dispatch`` and ``ep.combine`` as inference calls them
* ``operator``: through ``torch.ops.moelink``, nothing requiring grad
* ``operator, gradients``: the same when the tokens and the router weights require grad (forward only)

and ``choice``: deciding between them, which every call does. All but the third run under ``torch.no_grad``. The results
of all ways are compared, bit for bit, first.

    python benchmarks/ops_overhead.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from torch import Tensor

import moelink
import provenance
from moelink import ops
from moelink.testing import assert_bitwise_equal
from moelink.transports.base import CombineRequest, DispatchRequest

CASE = {"num_experts": 64, "topk": 8, "hidden_size": 2048, "max_tokens_per_rank": 16}
TOKENS = (1, 16)
ROUNDS, WARMUP = 400, 20

RESULT = provenance.ROOT / provenance.RESULTS / "ops_overhead.json"
GUIDE = provenance.ROOT / "docs" / "pytorch.md"
BEGIN, END = "<!-- overhead: begin -->", "<!-- overhead: end -->"


def ways(ep: moelink.Communicator, x: Tensor, ids: Tensor, weights: Tensor, y: Tensor) -> dict[str, Callable[[], Any]]:
    """Each way to make the pair; ``y`` [rows, hidden] is what the experts return."""
    endpoint = ep._endpoint
    learning = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def direct() -> Tensor:
        return ep.combine(y, ep.dispatch(x, ids, weights))

    def operator() -> Tensor:
        recv = ops.dispatch(endpoint, DispatchRequest(x, ids, weights))
        return ops.combine(endpoint, CombineRequest(y, recv))

    def gradients() -> Tensor:
        return ep.combine(y, ep.dispatch(learning[0], ids, learning[1]))

    first = DispatchRequest(x, ids, weights)
    second = CombineRequest(y, ep.dispatch(x, ids, weights))

    def choice() -> bool:
        return ops.needs_operator(first) or ops.needs_operator(second)

    return {"direct": direct, "operator": operator, "operator, gradients": gradients, "choice": choice}


def measure(ep: moelink.Communicator, num_tokens: int) -> dict[str, dict[str, float]]:
    """Microseconds a pair by way: median, 20th and 80th percentile of the rounds."""
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, CASE["hidden_size"]).bfloat16()
    weights, ids = torch.rand(num_tokens, CASE["num_experts"]).softmax(-1).topk(CASE["topk"])
    y = torch.randn(ep.config.row_capacity, CASE["hidden_size"]).bfloat16()
    calls = ways(ep, x, ids, weights, y)
    want = calls["direct"]()
    for name in ("operator", "operator, gradients"):
        assert_bitwise_equal(calls[name](), want, name)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(WARMUP + ROUNDS):
        for name, call in calls.items():
            with torch.set_grad_enabled("gradients" in name):
                start = time.perf_counter_ns()
                call()
                stop = time.perf_counter_ns()
            if round_ >= WARMUP:
                times[name].append((stop - start) / 1e3)
    return {name: spread(values) for name, values in times.items()}


def spread(values: list[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    cuts = statistics.quantiles(values, n=5)
    return {"median": statistics.median(values), "p20": cuts[0], "p80": cuts[3]}


def render(document: dict[str, Any]) -> str:
    """The paragraph between the markers of docs/pytorch.md."""
    row, host, versions = document["rows"][0], document["host"], document["versions"]
    us = {name: times["median"] for name, times in row["us"].items()}
    text = (
        f"A pair of dispatch and combine of {row['tokens']} token takes {us['operator'] - us['direct']:.0f} µs longer "
        f"through the operators, and deciding which way to go takes {us['choice']:.1f} µs "
        f"({us['direct'] / 1e3:.1f} ms in all on one rank of the collective transport; {host['processor']}, "
        f"torch {versions['torch']}, {document['date']})."
    )
    return textwrap.fill(text, 120)


def updated(text: str, document: dict[str, Any]) -> str:
    """``text`` with the paragraph replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{render(document)}\n{END}{rest.split(END)[1]}"


def run() -> dict[str, Any]:
    """Measure, print a table, return the document."""
    torch.set_num_threads(1)
    with moelink.init(**CASE) as ep:
        rows = [{"tokens": tokens, "us": measure(ep, tokens)} for tokens in TOKENS]
    for row in rows:
        base = row["us"]["direct"]["median"]
        for name, us in row["us"].items():
            extra = "" if name in ("direct", "choice") else f"  (+{us['median'] - base:.0f})"
            print(f"{row['tokens']:3} tokens  {name:20} {us['median']:8.1f} ({us['p20']:.1f} - {us['p80']:.1f}){extra}")
    return {
        "schema_version": 1,
        "benchmark": "ops_overhead",
        "date": date.today().isoformat(),
        **provenance.collect(),
        "command": "python benchmarks/ops_overhead.py",
        "case": {**CASE, "ranks": 1, "dispatch_format": "bf16", "transport": "collective", "rounds": ROUNDS},
        "unit": "microseconds on the host per pair of dispatch and combine",
        "gate": "passed",
        "rows": rows,
    }


def main() -> int:
    """Measure and write the result file and its paragraph, or say whether the paragraph is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="measure nothing; exit with 1 when docs/pytorch.md is stale"
    )
    if parser.parse_args().check:
        text = GUIDE.read_text()
        if updated(text, json.loads(RESULT.read_text())) == text:
            return 0
        print("docs/pytorch.md is stale; run: python benchmarks/ops_overhead.py", file=sys.stderr)
        return 1
    document = run()
    RESULT.write_text(json.dumps(document, indent=2) + "\n")
    GUIDE.write_text(updated(GUIDE.read_text(), document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
