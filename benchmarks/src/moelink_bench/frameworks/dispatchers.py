"""Dispatchers of a framework and of moelink in the same layer: their comparison and their times.

Each rank has one batch of every size: few tokens as in decode, many as in prefill or in training. The outputs of the
layer are compared before any call is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moelink_bench.contenders import Contender
from moelink_bench.timing import Action, Clock, Turns, attempt, capture, everyone, in_turns, repeated, slowest_rank

Parts = dict[str, Tensor]
"""Tensors that a layer makes, by name: its output, and its gradients where it trains."""

TOLERANCE = 0.02
"""Of a part's length, in bf16: both round rows and sums to 8 bits, at different places."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of the layer.

    Attributes:
        tokens: of each rank, one entry for each size that is measured.
        hidden_size, intermediate_size, num_experts, topk: of the layer.
        device: "cuda" or "cpu".
        room: rows that moelink's outputs have, over the expected ones; None for the worst case.
    """

    tokens: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_experts: int
    topk: int
    device: str
    room: float | None = None

    @property
    def capacity(self) -> int | None:
        """Rows of moelink's outputs, in all experts of a rank; uniform routing expects tokens x topk of them."""
        return None if self.room is None else int(self.room * max(self.tokens) * self.topk)


@dataclass
class Dispatcher(Contender):
    """One dispatcher in the layer; its inputs are named by the tokens of a rank.

    Attributes:
        name: whose it is.
        passes: the timed calls by name; each takes the tokens of a rank.
        made: returns the parts of the layer for so many tokens, for the comparison.
        checked: raises where a call since the last check lost rows or failed.
    """

    name: str
    passes: Mapping[str, Callable[[int], object]]
    made: Callable[[int], Parts]
    checked: Callable[[], None] = lambda: None

    def repeats(self, copy: int) -> dict[str, Action]:
        """Return the timed calls for ``copy`` tokens of each rank."""
        return {name: functools.partial(call, copy) for name, call in self.passes.items()}

    def check(self) -> str:
        self.checked()
        return ""


@dataclass(frozen=True)
class Layer:
    """The layer of a framework for a case.

    Attributes:
        contenders: the framework's own dispatcher, and moelink's.
        note: remarks on the first.
        close: closes moelink's communicators and the framework's groups. Collective.
        step: the context of a step of the framework with so many tokens on every rank.
        expected: returns the right parts for so many tokens; None if the first contender is the measure.
        captured: passes are timed in CUDA graphs too, where they can be.
    """

    contenders: Sequence[Dispatcher]
    note: str
    close: Callable[[], None]
    step: Callable[[int], contextlib.AbstractContextManager[object]] = lambda tokens: contextlib.nullcontext()
    expected: Callable[[int], Parts] | None = None
    captured: bool = False


@dataclass(frozen=True)
class Amount:
    """How often passes run: so many ``calls`` in each sample of ``turns``, which contenders take."""

    calls: int
    turns: Turns


def differences(theirs: Parts, ours: Parts) -> dict[str, float]:
    """Return |ours - theirs| / |theirs| of each part; infinite where one is missing or not finite.

    >>> differences({"out": torch.tensor([3.0, 4.0])}, {"out": torch.tensor([3.0, 4.5])})
    {'out': 0.1}
    """
    found = {}
    for name, expected in theirs.items():
        made = ours.get(name)
        if made is None or made.shape != expected.shape:
            found[name] = float("inf")
            continue
        length = float(expected.double().norm())
        off = float((made.double() - expected.double()).norm())
        ratio = off / length if length else off
        found[name] = ratio if ratio < float("inf") else float("inf")
    return found


def largest_over_ranks(found: Mapping[str, float]) -> dict[str, float]:
    """Return the largest of all ranks for each name, which all ranks have. Collective."""
    values = torch.tensor([found[name] for name in sorted(found)], dtype=torch.float64)  # over gloo
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(sorted(found), values.tolist(), strict=True))


def compare(layer: Layer, case: Case) -> dict[str, float]:
    """Return how far what is made is from what is expected, relative to its length, by name. Collective.

    Without :attr:`Layer.expected` moelink's parts are compared with those of the first contender.
    """
    found: dict[str, float] = {}
    for tokens in case.tokens:
        with layer.step(tokens):
            made = {each.name: each.made(tokens) for each in layer.contenders}
            if layer.expected is None:
                theirs, ours = made.values()
                found |= differences(theirs, ours)
                continue
            expected = layer.expected(tokens)
            for name, parts in made.items():
                found[f"{name}, {tokens} tokens"] = differences(expected, parts)["out"]
    return largest_over_ranks(found)


Calls = dict[tuple[str, str], Action]
"""Timed calls, by contender and pass."""


def time_calls(calls: Calls, clock: Clock, how: Amount) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the figure of each of ``calls``, in turns. Collective."""
    taken = in_turns({key: repeated(call, how.calls) for key, call in calls.items()}, clock, how.turns)
    return {
        key: dataclasses.asdict(slowest_rank(everyone([time / how.calls for time in times])))
        for key, times in taken.items()
    }


def _calls(layer: Layer, tokens: int) -> Calls:
    return {(each.name, name): call for each in layer.contenders for name, call in each.repeats(tokens).items()}


def time_layer(layer: Layer, case: Case, clock: Clock, how: Amount) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rows of figures, one for each size and contender, and whether CUDA graphs held the calls. Collective.

    Calls are timed one by one, and, where all can be captured, as replays of a graph of one call.
    """
    rows = []
    for tokens in case.tokens:
        with layer.step(tokens):
            figures = time_calls(_calls(layer, tokens), clock, how)
        rows += [
            {"contender": each.name, "tokens": tokens, **{name: figures[each.name, name] for name in each.passes}}
            for each in layer.contenders
        ]
    graphs: dict[str, Any] = {"captured": False, "reason": "on CPUs there are none"}
    if layer.captured and clock.device.type == "cuda":
        graphs = _time_graphs(layer, rows, case, clock, how)
    for each in layer.contenders:
        each.check()
    return rows, graphs


def _time_graphs(layer: Layer, rows: list[dict[str, Any]], case: Case, clock: Clock, how: Amount) -> dict[str, Any]:
    """Add figures of replayed graphs to ``rows``, and return whether all calls could be captured. Collective."""
    for tokens in case.tokens:
        with layer.step(tokens):
            replays: Calls = {}
            for (name, what), call in _calls(layer, tokens).items():
                graph, reason = attempt(functools.partial(capture, [call], clock.device))
                if graph is None:
                    return {"captured": False, "reason": f"{name}, {what}, {tokens} tokens: {reason}"}
                replays[name, f"{what}, in a graph"] = graph.replay
            figures = time_calls(replays, clock, how)
        for row in rows:
            if row["tokens"] == tokens:
                row |= {what: figure for (name, what), figure in figures.items() if name == row["contender"]}
        torch.cuda.synchronize()
    return {"captured": True, "reason": ""}


def times_as_fast(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each size how many times as fast the second contender's medians are as the first's.

    >>> figure = lambda median: {"median": median}
    >>> rows = [{"contender": "theirs", "tokens": 1, "layer": figure(3.0)}]
    >>> times_as_fast([*rows, {"contender": "moelink", "tokens": 1, "layer": figure(2.0)}])
    [{'tokens': 1, 'layer': 1.5}]
    """
    made = []
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        what = [name for name in theirs if name not in ("contender", "tokens")]
        ratios = {name: round(theirs[name]["median"] / ours[name]["median"], 3) for name in what}
        made.append({"tokens": theirs["tokens"], **ratios})
    return made


PASSES = ("forward", "forward and backward")
"""Of a layer that trains."""


def trained(
    name: str, layer: Callable[..., Tensor], given: Mapping[str, Tensor], heard: Tensor, module: torch.nn.Module,
    dispatcher: Any,
) -> Dispatcher:  # fmt: skip
    """Return the contender of a layer that makes an output of the tensors ``given``.

    Args:
        name: whose dispatcher it is.
        layer: called with the tensors of ``given``, in their order.
        given: by name, those that gradients are asked of.
        heard: gradient of the output.
        module: has the parameters that gradients are asked of.
        dispatcher: has moelink's communicator as ``ep``, if it is moelink's.
    """

    def forward(_: int) -> Tensor:
        with torch.no_grad():
            return layer(*given.values())

    def both(_: int) -> Parts:
        leaves = {each: tensor.detach().requires_grad_() for each, tensor in given.items()}
        module.zero_grad(set_to_none=True)
        out = layer(*leaves.values())
        out.backward(heard)
        grads = {f"{each}.grad": leaf.grad for each, leaf in (*leaves.items(), *module.named_parameters())}
        return {"out": out.detach(), **{each: grad for each, grad in grads.items() if grad is not None}}

    checked: Callable[[], None] = getattr(getattr(dispatcher, "ep", None), "check", lambda: None)
    return Dispatcher(name, dict(zip(PASSES, (forward, both), strict=True)), both, checked)
