"""Measure host time of eager calls: of dispatch and combine (``calls``), of a layer (``layer``), and what the operator
layer (``operators``) and metrics (``metrics``) add to it.

``calls``: one rank on the symmetric transport, on a CUDA device, or on a CPU that plays one
(:mod:`moelink_bench.played`): there the host does what it does in a call on a GPU, but launches and looks at the
stream do nothing, and tensors are small, as those of some megabytes cost a CPU a call of its kernel. Time is processor
time of this process, and the least of many short batches, as other work on the machine only ever adds to it.

* ``dispatch``, ``combine``: one call. ``pair``: one after the other.
* ``pair, looked at``: the same, and the fields of the output that a grouped matmul takes.
* ``bound dispatch``, ``bound combine``, ``bound pair``: the same of calls that ``ep.bind`` made.
* ``tensors``: what a pair asks of PyTorch's allocator, alone. ``launches``: the two launches of a pair, alone, with
  parameters that are in place. Both together are the floor: what no change of moelink's Python can save.
* ``own``: ``pair`` less the floor.

``layer``: an eager call of ``moelink.nn.MoE`` on such a device, and its parts: the router, the experts, and the pair of
dispatch and combine. With experts in fp8 (``triton``), and in bf16 (``dequantize``), of these also while gradients are
recorded: forward alone, and with the backward (``step``). A device that is played has experts in fp8 alone, because
torch would compute products of bf16.

``operators``: one rank, on a CPU over the collective transport, on a CUDA device over the symmetric one. Nothing
travels: what is timed is Python, PyTorch's dispatcher and, on a CPU, a few small tensors. A *pair* is one dispatch and
one combine of the same tokens. The ways to make it take turns in each round, and their results are compared bit for bit
first. All but the third run under ``torch.no_grad``.

* ``direct``: ``ep.dispatch`` and ``ep.combine`` as inference calls them
* ``operator``: through ``torch.ops.moelink``, nothing requiring grad
* ``operator, gradients``: the same when the tokens and the router weights require grad (forward only)
* ``choice``: deciding between them, which every call does

``metrics``: pairs as of ``calls`` in blocks, in turns: while the endpoint of :mod:`moelink.metrics` is not scraped
(``off``), and while another process scrapes it once a block (``on``). ``more_a_call`` is the mean of the differences of
neighbours, per call, with its confidence interval. And how long a scrape takes, for which a call may wait, as both need
the interpreter's lock.

    python -m moelink_bench.host calls --device cuda
    python -m moelink_bench.host layer --device cuda
    python -m moelink_bench.host operators --device cuda
    python -m moelink_bench.host metrics --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from subprocess import PIPE
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

import moelink
from moelink import metrics
from moelink.testing import assert_bitwise_equal
from moelink_bench.document import device_names, results_folder
from moelink_bench.script import Save, Script
from moelink_bench.timing import Clock, ProcessorClock, Turns, in_turns, repeated

SIZES: dict[str, Any] = {"num_experts": 64, "topk": 8, "hidden_size": 7168, "max_tokens_per_rank": 128}
FORMAT = "fp8_block128"
TOKENS, CAPACITY = 128, 1024
SMALL = {"hidden_size": 256, "capacity": 64}
"""In place of these on a CPU."""
BATCHES, CALLS, WARMUP = 300, 20, 50
TARGETS = {"pair": 40.0, "bound dispatch": 15.0, "bound combine": 15.0}
"""Microseconds of host time at most, on a machine with H200s."""

OPERATOR_CASE: dict[str, Any] = {"num_experts": 64, "topk": 8, "hidden_size": 2048, "max_tokens_per_rank": 16}
OPERATOR_TOKENS = (1, 16)
BUDGET = {"operator": 250.0, "operator, gradients": 400.0}
"""Microseconds of host time that a pair through the operators may take more than the direct one."""
ROUNDS, WARMUP_ROUNDS = 400, 20
BLOCKS, BLOCK = 200, 5000
"""Blocks of pairs with metrics, as many without, and pairs of one."""
LAYER_TOKENS, LAYER_INNER = 4, 256
ROUTER: dict[str, Any] = {
    "scoring": "sigmoid", "num_groups": 8, "topk_groups": 4, "group_score": "top2", "scaling_factor": 2.5,
}  # fmt: skip
LAYER_TARGETS = {"layer": 150.0, "layer, gradients": 400.0}
"""Microseconds of host time at most, on a machine with H200s."""
HOST_BENCHMARK, OPERATORS_BENCHMARK, METRICS_BENCHMARK = "host_time", "ops_overhead", "metrics_overhead"
LAYER_BENCHMARK = "layer_host_time"


def least(call: Callable[[], Any], clock: Clock) -> float:
    """Return the microseconds of processor time of one call: of many short batches the least."""
    batches = clock.measure(repeated(call, CALLS), samples=BATCHES, warmup=-(-WARMUP // CALLS))
    return round(min(batches) / CALLS, 1)


def measure_calls(ep: moelink.Communicator) -> dict[str, Any]:
    """Return the microseconds of each part, and how many tensors a pair makes. On a device, or on one that is
    played."""
    device, config = ep.device, ep.config
    x = torch.randn(TOKENS, config.hidden_size, device=device).bfloat16()
    topk_weights, topk_ids = torch.rand(TOKENS, config.num_experts, device=device).topk(config.topk)
    topk_ids = topk_ids.int()
    y = torch.zeros(config.row_capacity, config.hidden_size, device=device).bfloat16()

    def pair() -> Tensor:
        return ep.combine(y, ep.dispatch(x, topk_ids, topk_weights))

    def looked_at() -> Tensor:
        recv = ep.dispatch(x, topk_ids, topk_weights)
        _ = recv.tokens, recv.scales, recv.row_offsets
        return ep.combine(y, recv)

    pair()
    lane: Any = ep._fast_path
    sends, returns = lane._prepared.values()
    recv = ep.dispatch(x, topk_ids, topk_weights)
    out = ep.combine(y, recv)  # both stay, as the launches below write into them
    made = (sends._plan.make_arena, *[make for _, make in sends._plan.make_large], returns._make_out)
    stream = lane._rank.launcher.current_stream()
    (send, senders), (home, receivers) = ((kind.direct.copy(), kind.count) for kind in (sends, returns))

    def launches() -> None:
        send.launch(senders, stream)
        home.launch(receivers, stream)

    bound_dispatch = ep.bind(x, topk_ids, topk_weights)
    bound_dispatch()
    bound_combine = bound_dispatch.combine(y)

    def bound_pair() -> Tensor:
        bound_dispatch()
        return bound_combine()

    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: ep.dispatch(x, topk_ids, topk_weights),
        "combine": lambda: ep.combine(y, recv),
        "pair": pair,
        "pair, looked at": looked_at,
        "tensors": lambda: [make() for make in made],
        "launches": launches,
        "bound dispatch": bound_dispatch,
        "bound combine": bound_combine,
        "bound pair": bound_pair,
    }
    with torch.no_grad():
        times = {name: least(call, ProcessorClock(device)) for name, call in calls.items()}
    del out
    times["own"] = round(times["pair"] - times["tensors"] - times["launches"], 1)
    return {"microseconds": times, "tensors_of_a_pair": len(made)}


def measure_layer(ep: moelink.Communicator) -> dict[str, Any]:
    """Return the microseconds of a call of a layer and of its parts, by the backend of its experts. On a device, or on
    one that is played."""
    from moelink.nn import MoE, RouterConfig

    config = ep.config
    x = torch.randn(LAYER_TOKENS, config.hidden_size, device=ep.device).bfloat16()
    times: dict[str, dict[str, float]] = {}
    torch.set_num_threads(1)
    for backend in ("triton", "dequantize") if ep.device.type == "cuda" else ("triton",):
        layer = MoE(
            ep, intermediate_size=LAYER_INNER, router=RouterConfig(**ROUTER), experts_backend=backend,  # type: ignore[arg-type]
            load_steps=0, dtype=torch.bfloat16,
        )  # fmt: skip
        times[backend] = layer_times(layer, x)
        if backend == "dequantize":
            learning = x.clone().requires_grad_()
            times[backend]["layer, gradients"] = least(partial(layer, learning), ProcessorClock(ep.device))
            step = partial(make_step, layer, learning, torch.ones_like(x))
            times[backend]["step"] = least(step, ProcessorClock(ep.device))
    return {"microseconds": times}


def make_step(layer: Any, x: Tensor, grad: Tensor) -> None:
    """Make a forward and the backward of ``grad``, and drop all gradients."""
    layer(x).backward(grad)
    x.grad = None
    layer.zero_grad()


@torch.no_grad()
def layer_times(layer: Any, x: Tensor) -> dict[str, float]:
    """Return the microseconds of a call without gradients and of its parts."""
    from moelink.rows.dequantize import dequantized

    ep, routing = layer.ep, layer.router(x)
    recv = ep.dispatch(x, routing.topk_ids, routing.topk_weights, max_tokens=len(x))
    rows = dequantized(recv, ep.config, dtype=torch.bfloat16)

    def pair() -> None:
        ep.combine(rows, ep.dispatch(x, routing.topk_ids, routing.topk_weights, max_tokens=len(x)))

    def experts() -> Tensor:
        if layer.experts_backend == "triton":
            return layer.experts(recv.tokens, recv.scales, recv.row_offsets)  # type: ignore[no-any-return]
        return layer.experts(dequantized(recv, ep.config, dtype=torch.bfloat16), recv.row_offsets)  # type: ignore[no-any-return]

    parts: dict[str, Callable[[], Any]] = {
        "layer": partial(layer, x), "router": partial(layer.router, x), "experts": experts, "pair": pair,
    }  # fmt: skip
    return {name: least(call, ProcessorClock(ep.device)) for name, call in parts.items()}


def layer_fields(kind: str) -> dict[str, Any]:
    """Measure a layer on a device of this kind ("cpu", "cuda"), print the times, return the fields of the result."""
    settings = {"batches": BATCHES, "calls": CALLS, "warmup": WARMUP, "tokens": LAYER_TOKENS, "inner": LAYER_INNER}
    unit = "microseconds of the host's processor time per call"
    return measured(kind, measure_layer, {"unit": unit, "settings": settings, "targets": LAYER_TARGETS})


def opened(kind: str) -> tuple[Any, dict[str, Any]]:
    """Return a context with a communicator on a device of this kind ("cpu", "cuda"), played on a CPU, and its case."""
    case = {**SIZES, "dispatch_format": FORMAT, "capacity": CAPACITY, **({} if kind == "cuda" else SMALL)}
    if kind == "cuda":
        return moelink.init(**case, transport="symmetric", device=torch.device("cuda", 0)), case
    os.environ["TRITON_INTERPRET"] = "1"
    from moelink_bench.played import played

    return played(**case), case


SCRAPER = """
import sys, time, urllib.request
for line in sys.stdin:
    begin = time.perf_counter()
    urllib.request.urlopen(sys.argv[1]).read()
    print(time.perf_counter() - begin, flush=True)
"""
"""Scrapes an endpoint once for each line that it reads. It is a process of its own, as a Prometheus server is."""


def measure_metrics(ep: moelink.Communicator) -> dict[str, Any]:
    """Return the microseconds of a pair without metrics, and with an endpoint that is scraped once in each block of
    pairs, in turns; by how much a call is longer, with the confidence interval of that mean; and how long a scrape
    takes on the client's clock."""
    x = torch.randn(TOKENS, ep.config.hidden_size, device=ep.device).bfloat16()
    topk_weights, topk_ids = torch.rand(TOKENS, ep.config.num_experts, device=ep.device).topk(ep.config.topk)
    topk_ids = topk_ids.int()
    y = torch.zeros(ep.config.row_capacity, ep.config.hidden_size, device=ep.device).bfloat16()
    took: list[float] = []

    def pairs() -> None:
        for _ in range(BLOCK):
            ep.combine(y, ep.dispatch(x, topk_ids, topk_weights))

    endpoint = metrics.serve(ep, port=0)
    command = [sys.executable, "-c", SCRAPER, f"http://127.0.0.1:{endpoint.port}/metrics"]
    with closing(endpoint), subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, bufsize=1) as scraper:
        assert scraper.stdin is not None
        assert scraper.stdout is not None

        def scraped() -> None:
            scraper.stdin.write("\n")  # type: ignore[union-attr]
            pairs()
            took.append(1e6 * float(scraper.stdout.readline()))  # type: ignore[union-attr]

        with torch.no_grad():
            how = Turns(turns=BLOCKS, dropped=2)
            times = in_turns({"off": pairs, "on": scraped}, ProcessorClock(ep.device), how)
        scraper.stdin.close()
    each = {name: [value / BLOCK for value in values] for name, values in times.items()}
    us = {name: {"least": min(found), "mean": statistics.fmean(found), **spread(found)} for name, found in each.items()}
    more = [(on - off) / 2 for off, on in zip(each["off"], each["on"], strict=True)]
    mean, half = statistics.fmean(more), 1.96 * statistics.stdev(more) / len(more) ** 0.5
    return {
        "us": us, "more_a_call": {"mean": mean, "low": mean - half, "high": mean + half}, "scrape_us": spread(took),
    }  # fmt: skip


def metrics_fields(kind: str) -> dict[str, Any]:
    """Measure what metrics cost calls on a device of this kind ("cpu", "cuda"), print it, return the fields."""
    settings = {"blocks": BLOCKS, "pairs_of_a_block": BLOCK, "scrapes_of_a_block": 1, "confidence": 0.95}
    unit = "microseconds of the host's processor time per pair of dispatch and combine, or more per call, with scrapes"
    return measured(kind, measure_metrics, {"unit": unit, "settings": settings})


def measured(
    kind: str, measure: Callable[[moelink.Communicator], dict[str, Any]], fields: dict[str, Any]
) -> dict[str, Any]:
    """Measure a communicator on a device of this kind, print the times, return them with ``fields`` and the case."""
    context, case = opened(kind)
    with context as ep:
        result = measure(ep)
    print(json.dumps(result, indent=2))
    return {"launches": kind == "cuda", "case": {**case, "num_tokens": TOKENS}, **fields, **result}


def calls_fields(kind: str) -> dict[str, Any]:
    """Measure calls on a device of this kind ("cpu", "cuda"), print the times, return the fields of the result."""
    settings = {"batches": BATCHES, "calls": CALLS, "warmup": WARMUP}
    unit = "microseconds of the host's processor time per call"
    return measured(kind, measure_calls, {"unit": unit, "settings": settings, "targets": TARGETS})


def ways(ep: moelink.Communicator, x: Tensor, ids: Tensor, weights: Tensor, y: Tensor) -> dict[str, Callable[[], Any]]:
    """Return each way to make the pair; ``y`` [rows, hidden_size] is what the experts return."""
    from moelink import ops
    from moelink.transports.base import CombineRequest, DispatchRequest

    context = ep._context
    learning = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def direct() -> Tensor:
        return ep.combine(y, ep.dispatch(x, ids, weights))

    def operator() -> Tensor:
        recv = ops.call(context, DispatchRequest(x, ids, weights))
        return ops.call(context, CombineRequest(y, recv))  # type: ignore[no-any-return]

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
    device = ep.device
    x = torch.randn(num_tokens, OPERATOR_CASE["hidden_size"], device=device).bfloat16()
    scores = torch.rand(num_tokens, OPERATOR_CASE["num_experts"], device=device)
    weights, ids = scores.softmax(-1).topk(OPERATOR_CASE["topk"])
    y = torch.randn(ep.config.row_capacity, OPERATOR_CASE["hidden_size"], device=device).bfloat16()
    calls = ways(ep, x, ids, weights, y)
    want = calls["direct"]()
    for name in ("operator", "operator, gradients"):
        assert_bitwise_equal(calls[name](), want, name)
    how = Turns(turns=ROUNDS, dropped=WARMUP_ROUNDS)
    times = in_turns(calls, ProcessorClock(device), how, lambda name: torch.set_grad_enabled("gradients" in name))
    return {name: spread(values) for name, values in times.items()}


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, 20th and 80th percentile."""
    cuts = statistics.quantiles(values, n=5)
    return {"median": statistics.median(values), "p20": cuts[0], "p80": cuts[3]}


def operators_fields(kind: str) -> dict[str, Any]:
    """Measure on a device of this kind ("cpu", "cuda"), print a table, return the fields."""
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    transport: Literal["collective", "symmetric"] = "symmetric" if kind == "cuda" else "collective"
    with moelink.init(**OPERATOR_CASE, transport=transport, device=device) as ep:
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
        "case": {**OPERATOR_CASE, "ranks": 1, "dispatch_format": "bf16", "transport": transport, "rounds": ROUNDS},
        "unit": "microseconds of the host's processor time per pair of dispatch and combine",
        "budget": BUDGET,
        "gate": "passed",
        "rows": rows,
    }


# --- tables for the documents -----------------------------------------------------------------------------------------


def results(benchmark: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (file, result) of a benchmark by file name: GPUs first, and of each machine what came before first."""
    found = [(path.name, json.loads(path.read_text())) for path in results_folder().glob("*.json")]
    found = [(name, document) for name, document in found if document["benchmark"] == benchmark]
    return sorted(found, key=lambda entry: (entry[1].get("device") != "cuda", "before" not in entry[0], entry[0]))


def machine(document: dict[str, Any]) -> str:
    """Return the words for the machine of a result."""
    if document.get("device") == "cuda":
        return str(document["devices"][0])
    return f"{document['host']['processor']}, GPU played"


def times_table(documents: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Render the host time of a pair and its parts, a line per (file, result), and the targets."""
    parts = ("dispatch", "combine", "pair", "tensors", "launches", "own", "bound dispatch", "bound combine")
    words = {"tensors": "of that, tensors", "own": "moelink"}
    lines = [
        f"| host time, µs | {' | '.join(words.get(part, part) for part in parts)} | file, commit |",
        f"|---|{'---:|' * len(parts)}---|",
    ]
    for name, document in documents:
        us = document["microseconds"]
        cells = [f"{us[part]:.1f}" if part in us else "–" for part in parts]
        lines.append(f"| {machine(document)} | {' | '.join(cells)} | `{name}`, {document['commit'][:7]} |")
    targets = [f"**{TARGETS[part]:.0f}**" if part in TARGETS else "" for part in parts]
    lines.append(f"| **target, with an H200** | {' | '.join(targets)} | |")
    return "\n".join(lines)


def verdict(name: str, document: dict[str, Any]) -> str:
    """Return a sentence: whether a pair and bound calls meet their targets, and what of the time is whose."""
    us = document["microseconds"]
    pair, target = us["pair"], TARGETS["pair"]
    bound = [part for part in TARGETS if part.startswith("bound") and us.get(part, 0.0) > TARGETS[part]]
    words = f"`{name}`: a pair takes {pair:.1f} µs"
    words += f", within its target of {target:.0f}" if pair <= target else f", {pair - target:.1f} more than its target"
    if "launches" not in us:
        return f"{words}; the launches alone were not measured, so it is not known which part is whose."
    floor = us["tensors"] + us["launches"]
    words += (
        f". {floor:.1f} of it are the driver's launches and PyTorch's tensors, and {us['own']:.1f} moelink's Python"
    )
    if pair > target:
        words += ": without any of that" if floor > target else f": with {target - floor:.1f} of that"
        words += f" it would still take {floor:.1f}" if floor > target else " the target would be met"
    if bound:
        words += f". Over {TARGETS[bound[0]]:.0f} is a {' and a '.join(bound)}"
    return f"{words}."


def host_summary(documents: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the paragraphs of docs/performance.md about host time: a table, then a line for each present result on a
    GPU. Earlier results are not judged."""
    judged = [verdict(*each) for each in documents if each[1]["launches"] and "before" not in each[0]]
    return [times_table(documents), *[f"* {line}" for line in judged]]


def overhead_of(document: dict[str, Any]) -> str:
    """Return what the operator layer costs by one result, and whether that is within the budget."""
    row, versions = document["rows"][0], document["versions"]
    us = {name: times["median"] for name, times in row["us"].items()}
    more = {name: us[name] - us["direct"] for name in BUDGET}
    within = all(more[name] <= BUDGET[name] for name in BUDGET)
    device = document["devices"][0] if document.get("device") == "cuda" else document["host"]["processor"]
    token = f"{row['tokens']} token{'s' * (row['tokens'] != 1)}"
    return (
        f"Through the operators, a pair of dispatch and combine of {token} takes {more['operator']:.0f} µs more than "
        f"the {us['direct']:.0f} µs of the direct way, and {more['operator, gradients']:.0f} where gradients are "
        f"recorded. Choosing between the two takes {us['choice']:.1f} µs. The budget of {BUDGET['operator']:.0f} and "
        f"{BUDGET['operator, gradients']:.0f} µs is {'kept' if within else 'exceeded'}. One rank of the "
        f"{document['case']['transport']} transport, {device}, torch {versions['torch']}, {document['date']}."
    )


# --- the script -------------------------------------------------------------------------------------------------------


MEASURES: Mapping[str, tuple[Callable[[str], dict[str, Any]], str]] = MappingProxyType({
    "calls": (calls_fields, HOST_BENCHMARK),
    "layer": (layer_fields, LAYER_BENCHMARK),
    "operators": (operators_fields, OPERATORS_BENCHMARK),
    "metrics": (metrics_fields, METRICS_BENCHMARK),
})  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("what", choices=tuple(MEASURES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def run(args: argparse.Namespace, save: Save) -> int:
    """Measure and save the result; ``render`` brings those of the first two into docs/performance.md and
    docs/pytorch.md."""
    measure, name = MEASURES[args.what]
    fields = measure(args.device)
    save(name, {"device": args.device, "devices": device_names(args.device), **fields})
    return 0


main = Script("host", __doc__, options, run, out="{benchmark}_{device}.json").main

if __name__ == "__main__":
    raise SystemExit(main())
