"""Measure host time of eager calls: of dispatch and combine (``calls``), and of the operator layer (``operators``).

``calls``: one rank on the symmetric transport. On a CUDA device (``--device cuda``) the kernels are launched; on a CPU,
where they would be interpreted, launches only gather their arguments, so that what is timed is Python, PyTorch's checks
and allocations. Time is processor time of this process, and the least of many short batches, as other work on the
machine only ever adds to it.

* ``dispatch``, ``combine``: one call. ``pair``: one after the other.
* ``bound dispatch``, ``bound combine``, ``bound pair``: the same of calls that ``ep.bind`` made.
* ``tensors``: the calls of ``torch.empty_strided`` that a pair makes, alone, with the same arguments.

``operators``: one rank on a CPU, so nothing travels: what is timed is Python, PyTorch's dispatcher and a few small
tensors. A *pair* is one dispatch and one combine of the same tokens. The ways to make it take turns in each round, and
their results are compared bit for bit first. All but the third run under ``torch.no_grad``.

* ``direct``: ``ep.dispatch`` and ``ep.combine`` as inference calls them
* ``operator``: through ``torch.ops.moelink``, nothing requiring grad
* ``operator, gradients``: the same when the tokens and the router weights require grad (forward only)
* ``choice``: deciding between them, which every call does

    python -m moelink.tools.bench.host calls --device cuda
    python -m moelink.tools.bench.host operators
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import moelink
from moelink.testing import assert_bitwise_equal
from moelink.tools.bench.document import head, results_folder, script_parser, write

SIZES: dict[str, Any] = {"num_experts": 64, "topk": 8, "hidden_size": 7168, "max_tokens_per_rank": 128}
FORMAT = "fp8_block128"
TOKENS, CAPACITY = 128, 1024
BATCHES, CALLS, WARMUP = 300, 20, 50

OPERATOR_CASE: dict[str, Any] = {"num_experts": 64, "topk": 8, "hidden_size": 2048, "max_tokens_per_rank": 16}
OPERATOR_TOKENS = (1, 16)
ROUNDS, WARMUP_ROUNDS = 400, 20


def least(call: Callable[[], Any], settle: Callable[[], None]) -> float:
    """Return the microseconds of processor time of one call."""
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


def measure_calls(device: torch.device) -> dict[str, Any]:
    """Return the microseconds of each part, and how many tensors a pair makes."""
    ep = moelink.init(**SIZES, dispatch_format=FORMAT, capacity=CAPACITY, transport="symmetric", device=device)
    x = torch.randn(TOKENS, SIZES["hidden_size"], device=device).bfloat16()
    topk_weights, topk_ids = torch.rand(TOKENS, SIZES["num_experts"], device=device).topk(SIZES["topk"])
    topk_ids = topk_ids.int()
    y = torch.zeros(CAPACITY, SIZES["hidden_size"], device=device).bfloat16()
    recv = ep.dispatch(x, topk_ids, topk_weights)

    def pair() -> Tensor:
        return ep.combine(y, ep.dispatch(x, topk_ids, topk_weights))

    empty = torch.empty_strided
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def noting(*args: Any, **options: Any) -> Tensor:
        made.append((args, options))
        return empty(*args, **options)

    with mock.patch.object(torch, "empty_strided", noting):
        pair()

    def tensors() -> list[Tensor]:
        return [empty(*args, **options) for args, options in made]

    bound_dispatch = ep.bind(x, topk_ids, topk_weights)
    bound_dispatch()
    bound_combine = bound_dispatch.combine(y)

    def bound_pair() -> Tensor:
        bound_dispatch()
        return bound_combine()

    settle: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: ep.dispatch(x, topk_ids, topk_weights),
        "combine": lambda: ep.combine(y, recv),
        "pair": pair,
        "tensors": tensors,
        "bound dispatch": bound_dispatch,
        "bound combine": bound_combine,
        "bound pair": bound_pair,
    }
    with torch.no_grad():
        times = {name: least(call, settle) for name, call in calls.items()}
    ep.close()
    return {"microseconds": times, "tensors_of_a_pair": len(made)}


def calls_document(kind: str, commit: str | None) -> dict[str, Any]:
    """Measure on a device of this kind ("cpu", "cuda") and return the document."""
    launches = kind == "cuda"
    device = torch.device("cuda", 0) if launches else torch.device("cpu")
    if not launches:
        os.environ["TRITON_INTERPRET"] = "1"
    from moelink.kernels.launch.launcher import Launcher, addresses_of

    def gather(_launcher: Launcher, _kernel: Any, records: Callable[[bool], Any], *_: Any) -> None:
        for record in records(False):
            addresses_of(record)

    with mock.patch.object(Launcher, "launch", Launcher.launch if launches else gather):
        result = measure_calls(device)
    print(json.dumps(result, indent=2))
    return {
        **head("host_time", script="host", commit=commit),
        "device": kind,
        "devices": [torch.cuda.get_device_name(device) if launches else "CPU"],
        "launches": launches,
        "case": {**SIZES, "dispatch_format": FORMAT, "num_tokens": TOKENS, "capacity": CAPACITY},
        "unit": "microseconds of the host's processor time per call",
        "settings": {"batches": BATCHES, "calls": CALLS, "warmup": WARMUP},
        **result,
    }


def ways(ep: moelink.Communicator, x: Tensor, ids: Tensor, weights: Tensor, y: Tensor) -> dict[str, Callable[[], Any]]:
    """Return each way to make the pair; ``y`` [rows, hidden_size] is what the experts return."""
    from moelink import ops
    from moelink.transports.base import CombineRequest, DispatchRequest

    context = ep._context
    learning = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def direct() -> Tensor:
        return ep.combine(y, ep.dispatch(x, ids, weights))

    def operator() -> Tensor:
        recv = ops.dispatch(context, DispatchRequest(x, ids, weights))
        return ops.combine(context, CombineRequest(y, recv))

    def gradients() -> Tensor:
        return ep.combine(y, ep.dispatch(learning[0], ids, learning[1]))

    first = DispatchRequest(x, ids, weights)
    second = CombineRequest(y, ep.dispatch(x, ids, weights))

    def choice() -> bool:
        return ops.needs_operator(first) or ops.needs_operator(second)

    return {"direct": direct, "operator": operator, "operator, gradients": gradients, "choice": choice}


def measure_operators(ep: moelink.Communicator, num_tokens: int) -> dict[str, dict[str, float]]:
    """Return microseconds per pair by way: median, 20th and 80th percentile of the rounds."""
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, OPERATOR_CASE["hidden_size"]).bfloat16()
    weights, ids = torch.rand(num_tokens, OPERATOR_CASE["num_experts"]).softmax(-1).topk(OPERATOR_CASE["topk"])
    y = torch.randn(ep.config.row_capacity, OPERATOR_CASE["hidden_size"]).bfloat16()
    calls = ways(ep, x, ids, weights, y)
    want = calls["direct"]()
    for name in ("operator", "operator, gradients"):
        assert_bitwise_equal(calls[name](), want, name)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(WARMUP_ROUNDS + ROUNDS):
        for name, call in calls.items():
            with torch.set_grad_enabled("gradients" in name):
                start = time.perf_counter_ns()
                call()
                stop = time.perf_counter_ns()
            if round_ >= WARMUP_ROUNDS:
                times[name].append((stop - start) / 1e3)
    return {name: spread(values) for name, values in times.items()}


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, 20th and 80th percentile."""
    cuts = statistics.quantiles(values, n=5)
    return {"median": statistics.median(values), "p20": cuts[0], "p80": cuts[3]}


def operators_document(commit: str | None) -> dict[str, Any]:
    """Measure, print a table, return the document."""
    torch.set_num_threads(1)
    with moelink.init(**OPERATOR_CASE) as ep:
        rows = [{"tokens": tokens, "us": measure_operators(ep, tokens)} for tokens in OPERATOR_TOKENS]
    for row in rows:
        us: dict[str, Any] = row["us"]  # type: ignore[assignment]
        base = us["direct"]["median"]
        for name, figure in us.items():
            extra = "" if name in ("direct", "choice") else f"  (+{figure['median'] - base:.0f})"
            print(
                f"{row['tokens']:3} tokens  {name:20} {figure['median']:8.1f} "
                f"({figure['p20']:.1f} - {figure['p80']:.1f}){extra}"
            )
    return {
        **head("ops_overhead", script="host", commit=commit),
        "case": {**OPERATOR_CASE, "ranks": 1, "dispatch_format": "bf16", "transport": "collective", "rounds": ROUNDS},
        "unit": "microseconds on the host per pair of dispatch and combine",
        "gate": "passed",
        "rows": rows,
    }


def main() -> None:
    """Measure and write the result; ``render`` brings that of the operators into docs/pytorch.md."""
    parser = script_parser(__doc__, out="benchmarks/results/host_time_DEVICE.json or ops_overhead.json")
    parser.add_argument("what", choices=("calls", "operators"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of calls")
    args = parser.parse_args()
    if args.what == "calls":
        document, name = calls_document(args.device, args.commit), f"host_time_{args.device}.json"
    else:
        document, name = operators_document(args.commit), "ops_overhead.json"
    write(document, args.out or results_folder() / name)


if __name__ == "__main__":
    main()
