"""Measure a training step of a Mixture-of-Experts layer: forward and backward, and the peak of its memory.

A step is a forward that records gradients and the backward from a given gradient of its output, to those of the tokens,
the router's weight and the experts of this rank. Ranks do not sum gradients of the router, which is the same for all.
Steps are made one by one, as training makes them.

* ``moelink bf16``: :class:`moelink.nn.MoE`. ``exact rows``: with ``host_counts=True``, so that tensors between dispatch
  and combine have the rows that came, and not room for the worst case, for which the host waits once a call.
* ``moelink fp8_block128``: tokens travel in fp8 and are dequantised before the products, as is what training can
  differentiate; gradients travel in bf16.
* ``sort + all-to-all``: the same products and activation between a sort and torch's all-to-all, each with a backward
  that moves rows once.
* ``transformers grouped_mm``: on one rank.

Every contender's output, and the gradients of tokens and of the router's weight, are compared with fp32 before it is
timed.

**Memory.** ``peak`` is the most memory that torch's allocator held in a step beyond that before it, when no gradient
and no activation was alive. Beside it stands what must be alive in one::

    activations = 2 * R * (H + 2 I + I + H) + 4 * T * E       bytes
    gradients   = 2 * 3 * G * I * H + 2 * E * H

for R rows that came to this rank, in bf16: what goes into the first product, what leaves it, what goes into the second
and what leaves that (which the gradients of router weights need); and the router's logits. ``over`` is the peak by the
sum of both, of the rank where it is largest. Communication memory outside of torch's allocator is not in it.

    python -m moelink_bench.training --ranks 2
    python -m moelink_bench.training --device cpu --case tiny --tokens 5
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moelink.formats import get_format
from moelink.routing import ExpertMap
from moelink_bench.document import device_names, markdown
from moelink_bench.layer.contenders import LayerContender, MoelinkLayer, Setting
from moelink_bench.layer.data import LayerInput, empty_weights, fill_expert, make_inputs, make_weights, worst_error
from moelink_bench.layer.peers import EXCHANGE, TRANSFORMERS, ExchangeLayer, TransformersLayer
from moelink_bench.layer.plan import SHAPES, LayerCase, LayerPlan, Shape, make_layer_plan
from moelink_bench.ranks import CALL_TIMEOUT, joined, reports_of, teller
from moelink_bench.script import Save, Script, positive
from moelink_bench.timing import Clock, attempt, everyone, first_fault, slowest_rank

BENCHMARK = "training"
TOKENS = (1024, 2048, 4096, 8192)
STEPS, SAMPLES = 4, 7
OUT_TOLERANCE, GRADIENT_TOLERANCE = 2.0**-6, 2.0**-5
"""Most that an output's worst token, and a gradient as a whole, may differ from fp32, relative to their lengths."""
EXACT = "moelink bf16, exact rows"


def _moelink(fmt: str, *, exact: bool = False) -> Callable[[Setting], LayerContender]:
    """Return the maker of a layer of moelink that trains."""

    def make(at: Setting) -> LayerContender:
        made = MoelinkLayer(
            at.shape, at.weights, fmt=fmt, max_tokens=at.max_tokens, device=at.device, timeout=at.timeout,
            experts_backend="dequantize",
        )  # fmt: skip
        made.moe.host_counts = exact
        return made

    return make


MAKERS: Mapping[str, Callable[[Setting], LayerContender]] = MappingProxyType({
    "moelink bf16": _moelink("bf16"),
    EXACT: _moelink("bf16", exact=True),
    "moelink fp8_block128": _moelink("fp8_block128"),
    EXCHANGE: ExchangeLayer,
    TRANSFORMERS: TransformersLayer,
})  # fmt: skip
"""Every contender, in the order of tables."""


@dataclass(frozen=True)
class Truth:
    """A layer's output [T, H], and the gradients of the tokens [T, H] and of the router's weight [E, H], in fp32."""

    out: Tensor
    x: Tensor
    router: Tensor


def truth(given: LayerInput, grad: Tensor, shape: Shape, *, fmt: str, seed: int) -> Truth:
    """Compute the layer, and the gradients for ``grad`` [T, H] of its output, expert by expert with torch's operators.

    Tokens are rounded to ``fmt`` on their way to the experts; its gradient passes straight through. Experts are those
    that the router chooses; their weights are computed here.
    """
    codec, config, grad = get_format(fmt), shape.router, grad.float()
    with torch.no_grad():
        ids = given.router(given.x).topk_ids.long()
        quantized = codec.quantize(given.x)
        rounded = codec.dequantize(quantized.payload, quantized.scales).float()
    x = given.x.detach().float().requires_grad_()
    router = given.router.weight.detach().float().requires_grad_()
    logits = x @ router.T
    scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
    chosen = scores.gather(1, ids)
    weights = chosen / chosen.sum(-1, keepdim=True) if config.renormalize else chosen
    weights = weights * config.scaling_factor
    out, dx, dweights = (torch.zeros_like(each) for each in (rounded, rounded, weights))
    one = empty_weights(shape, 1, x.device)
    gate_up, down = one.gate_up[0], one.down[0]
    for expert in range(shape.num_experts):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        fill_expert(gate_up, down, seed=seed, expert=expert)
        rows = rounded[tokens].requires_grad_()
        weight = weights.detach()[tokens, slots].requires_grad_()
        gate, up = (rows @ gate_up.float().T).chunk(2, dim=1)
        part = (gate * gate.sigmoid() * up) @ down.float().T * weight[:, None]
        of_rows, of_weight = torch.autograd.grad(part, (rows, weight), grad[tokens])
        out.index_add_(0, tokens, part.detach())
        dx.index_add_(0, tokens, of_rows)
        dweights[tokens, slots] = of_weight
    by_router, of_router = torch.autograd.grad(weights, (x, router), dweights)
    return Truth(out, dx + by_router, of_router)


class Step:
    """Training steps of one contender.

    Attributes:
        contender: the layer.
        learned: the tensors whose gradients a step makes, besides those of its tokens.
    """

    def __init__(self, contender: LayerContender, at: Setting, inputs: Sequence[LayerInput]) -> None:
        self.contender = contender
        experts: list[Tensor] = [at.weights.gate_up, at.weights.down]
        if isinstance(contender, MoelinkLayer):
            experts = list(contender.moe.experts.parameters())
        elif isinstance(contender, TransformersLayer):
            experts = list(contender.experts.parameters())
        self.learned = [*experts, inputs[0].router.weight]
        for tensor in self.learned:
            tensor.requires_grad_()

    def forward(self, given: LayerInput) -> Tensor:
        """Return the output of a forward that records gradients."""
        return self.contender.layer(given)

    def run(self, given: LayerInput, grad: Tensor) -> Tensor:
        """Make a step, without the gradients of the one before it; return its output."""
        self.forget(given)
        out = self.forward(given)
        out.backward(grad)
        return out.detach()

    def forget(self, given: LayerInput) -> None:
        """Drop all gradients."""
        for tensor in (*self.learned, given.x):
            tensor.grad = None

    def close(self) -> None:
        """Let nothing require gradients that other contenders share, and close the contender."""
        for tensor in self.learned:
            tensor.grad = None
            if not isinstance(tensor, torch.nn.Parameter):
                tensor.requires_grad_(False)
        self.contender.close()


def wrong(step: Step, given: LayerInput, grad: Tensor, want: Truth) -> tuple[dict[str, float], str]:
    """Return the errors of a step, and what is wrong with it, or ""."""
    out = step.run(given, grad)
    step.contender.check()
    router = step.learned[-1].grad
    assert given.x.grad is not None
    assert router is not None
    errors = {"out": worst_error(out, want.out), "x": far(given.x.grad, want.x), "router": far(router, want.router)}
    for name, error in errors.items():
        most = OUT_TOLERANCE if name == "out" else GRADIENT_TOLERANCE
        if math.isnan(error) or error > most:
            what = "the output" if name == "out" else f"the gradient of {name}"
            return errors, f"{what} is wrong by {error:.3g} of its length, more than the {most:g} of roundings"
    return errors, ""


def far(got: Tensor, want: Tensor) -> float:
    """Return the distance of a tensor from the truth, relative to the length of the truth.

    >>> far(torch.tensor([3.0, 5.0]), torch.tensor([0.0, 4.0]))  # the square root of 9 + 1, by 4
    0.7905694246292114
    """
    return float(torch.linalg.vector_norm(got.float() - want) / torch.linalg.vector_norm(want))


def living_bytes(shape: Shape, *, tokens: int, rows: int, groups: int) -> dict[str, int]:
    """Return the bytes that must be alive in a step, of bf16 numbers: activations and gradients, as the module says.

    Example: H = 128, I = 32, E = 6, T = 5, 7 rows of 3 experts: 2 * 7 * (2 * 128 + 3 * 32) + 4 * 5 * 6 = 5048 bytes of
    activations, and 2 * 3 * 3 * 32 * 128 + 2 * 6 * 128 = 75264 of gradients.
    """
    hidden, inner, experts = shape.hidden_size, shape.intermediate_size, shape.num_experts
    return {
        "activations": 2 * rows * (2 * hidden + 3 * inner) + 4 * tokens * experts,
        "gradients": 2 * 3 * groups * inner * hidden + 2 * experts * hidden,
    }


def rows_of_rank(given: LayerInput, experts: ExpertMap, rank: int) -> int:
    """Return how many rows come to ``rank``, of the first input of every rank. Collective."""
    with torch.no_grad():
        counts = torch.bincount(given.router(given.x).topk_ids.flatten().long(), minlength=experts.num_experts).tolist()
    first, local = experts.first(rank), experts.num_local(rank)
    return sum(sum(each[first : first + local]) for each in everyone(counts))


def peak_bytes(step: Step, given: LayerInput, grad: Tensor, device: torch.device) -> int | None:
    """Return the peak of a step's memory beyond that before it; None on a CPU."""
    if device.type != "cuda":
        return None
    step.run(given, grad)
    step.forget(given)
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step.run(given, grad)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measure(
    step: Step, inputs: Sequence[LayerInput], grad: Tensor, clock: Clock, samples: int
) -> dict[str, list[float]]:
    """Return the microseconds of a forward and of a whole step, a sample of several each. Collective."""

    def forwards() -> None:
        for given in inputs:
            step.forward(given)

    def steps() -> None:
        for given in inputs:
            step.run(given, grad)

    measured = {
        name: clock.measure(action, samples=samples, warmup=1)
        for name, action in (("forward", forwards), ("step", steps))
    }
    return {name: [sample / len(inputs) for sample in taken] for name, taken in measured.items()}


def training_main(
    rank: int, world_size: int, plan: LayerPlan, progress: str = "", names: Sequence[str] = tuple(MAKERS)
) -> list[list[dict[str, Any]]]:
    """Run all cases; every rank returns the rows of all. The program of ``world_size`` processes."""
    say = teller(rank, progress)
    with joined(rank, plan.device, flush_bytes=plan.flush_bytes, timeout=plan.timeout) as clock:
        rows: list[dict[str, Any]] = []
        for index, case in enumerate(plan.cases):
            weights = make_weights(
                case.shape, seed=plan.settings.seed, rank=rank, world_size=world_size, device=clock.device
            )
            most = plan.shapes()[case.shape]  # so that kernels of all cases are the same
            at = Setting(plan, case.shape, weights, most, rank, clock.device, CALL_TIMEOUT)
            rows += ({"case": index, **row} for row in rows_of_case(case, at, clock, names, say))
            del weights, at
            gc.collect()
            if plan.device == "cuda":
                torch.cuda.empty_cache()
        return list(everyone(rows))


def rows_of_case(
    case: LayerCase, at: Setting, clock: Clock, names: Sequence[str], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield this rank's row of each contender. Collective."""
    inputs = make_inputs(case, at.plan.settings, rank=at.rank, device=at.device)
    for given in inputs:
        given.x.requires_grad_()
    generator = torch.Generator(at.device).manual_seed(7 * at.plan.settings.seed + at.rank)
    grad = torch.randn(inputs[0].x.shape, generator=generator, device=at.device).bfloat16()
    experts = ExpertMap(case.shape.num_experts, at.plan.ranks)
    rows, groups = rows_of_rank(inputs[0], experts, at.rank), experts.num_local(at.rank)
    living = living_bytes(case.shape, tokens=case.tokens, rows=rows, groups=groups)
    truths: dict[str, Truth] = {}
    for name in names:
        say(f"{case.label}: {name}")
        base = {"contender": name, "rows": rows, "living_bytes": living, "note": "", "reason": "", "errors": {}}
        step, reason = attempt(lambda name=name: Step(MAKERS[name](at), at, inputs))  # type: ignore[misc]
        if step is None:
            yield {**base, "reason": reason}
            continue
        try:
            fmt = step.contender.fmt
            if fmt not in truths:
                truths[fmt] = truth(inputs[0], grad, case.shape, fmt=fmt, seed=at.plan.settings.seed)
            row, reason = attempt(
                functools.partial(_row, step, inputs, grad, truths[fmt], clock, at.plan.settings.samples)
            )
            yield {**base, "note": step.contender.note, **(row or {"reason": reason})}
        finally:
            step.close()
            del step
            gc.collect()


def _row(
    step: Step, inputs: Sequence[LayerInput], grad: Tensor, want: Truth, clock: Clock, samples: int
) -> dict[str, Any]:
    """Return a row's errors, times and peak, or the fault of its results on any rank. Collective."""
    errors, fault = wrong(step, inputs[0], grad, want)
    if fault := first_fault(fault):
        return {"errors": errors, "fault": fault, "reason": f"not timed: {fault}"}
    times = measure(step, inputs, grad, clock, samples)
    return {"errors": errors, "us": times, "peak_bytes": peak_bytes(step, inputs[0], grad, clock.device)}


def merged(column: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one row of all ranks' rows: times of the slowest rank, memory of the one where it is most over what must
    be alive, the largest errors."""
    first = column[0]
    errors = {name: max(row["errors"][name] for row in column) for name in first["errors"]}
    row = {name: first[name] for name in ("case", "contender", "note", "reason")} | {"errors": errors, "us": {}}
    if "us" not in first:
        return {**row, "memory": None}
    row["us"] = {name: dataclasses.asdict(slowest_rank([each["us"][name] for each in column])) for name in first["us"]}
    found = [
        {"peak": each["peak_bytes"], "rows": each["rows"], **each["living_bytes"],
         "over": each["peak_bytes"] / sum(each["living_bytes"].values())}
        for each in column if each["peak_bytes"] is not None
    ]  # fmt: skip
    return {**row, "memory": max(found, key=lambda each: each["over"], default=None)}


def table(cases: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Render a line per case and contender that was timed."""
    lines = []
    for row in rows:
        if not row["us"]:
            continue
        memory, (forward, step) = row["memory"], (row["us"][name]["median"] for name in ("forward", "step"))
        said = [f"{value / 2**20:.0f}" for value in (memory["peak"], memory["activations"], memory["gradients"])] if (
            memory
        ) else ["–"] * 3  # fmt: skip
        over = f"{memory['over']:.2f}" if memory else "–"
        lines.append([cases[row["case"]], row["contender"], f"{forward:.0f}", f"{step:.0f}", *said, over])
    heads = ["layer", "contender", "forward, µs", "step, µs", "peak, MiB", "activations", "gradients", "over"]
    return markdown(heads, lines, text=2)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=positive, default=1)
    parser.add_argument("--case", choices=tuple(SHAPES), action="append", help="default: qwen3-30b-a3b")
    parser.add_argument("--tokens", type=positive, nargs="+", default=list(TOKENS), help="tokens per rank")
    parser.add_argument("--contenders", nargs="+", choices=tuple(MAKERS), default=list(MAKERS))
    parser.add_argument("--samples", type=positive, default=SAMPLES)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace, save: Save) -> int:
    """Measure, print the table and save the result. Returns 1 where a contender of moelink was wrong."""
    cases = args.case or ["qwen3-30b-a3b"]
    plan = make_layer_plan(
        "layer", ranks=args.ranks, device=args.device, cases=cases, tokens=args.tokens, samples=args.samples,
        seed=args.seed,
    )  # fmt: skip
    plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, calls=STEPS))
    program = functools.partial(training_main, names=tuple(args.contenders))
    reports, _ = reports_of(program, plan, lambda line: print(line, flush=True))
    if reports is None:
        return 0
    rows = [merged(column) for column in zip(*reports, strict=True)]
    labels = [case.label for case in plan.cases]
    print(table(labels, rows))
    faults = [row for row in rows if row["reason"].startswith("not timed")]
    for row in rows:
        if row["reason"]:
            print(f"{labels[row['case']]}, {row['contender']}: {row['reason']}")
    failed = any(row["contender"].startswith("moelink") for row in faults)
    save(BENCHMARK, {
        "device": args.device, "devices": device_names(args.device) * args.ranks, "ranks": args.ranks,
        "settings": {"steps": STEPS, "samples": args.samples, "seed": args.seed},
        "unit": "microseconds a step made one by one, the median of the slowest rank; bytes of torch's allocator",
        "tolerances": {"out": OUT_TOLERANCE, "gradients": GRADIENT_TOLERANCE},
        "gate": "failed" if failed else "passed",
        "cases": [
            {"label": case.label, "tokens": case.tokens, "shape": dataclasses.asdict(case.shape)} for case in plan.cases
        ],
        "rows": rows,
    })  # fmt: skip
    return int(failed)


main = Script("training", __doc__, options, run, out="training_{ranks}x{device}.json").main

if __name__ == "__main__":
    raise SystemExit(main())
