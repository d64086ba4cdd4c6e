"""A layer of an inference engine over its own dispatcher and over moelink: outputs compared, then calls timed.

The layer's experts are products by group in bf16, the same code between both dispatchers. Every size is one batch that
each rank has: few tokens as in decode, many as in prefill.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from moelink_bench.frameworks.steps import differences, largest_over_ranks
from moelink_bench.timing import Clock, CudaClock, WallClock, attempt, capture, everyone, slowest_rank

SIZES = (1, 32, 128, 1024, 4096)
"""Tokens of a rank: decode, and prefill."""

ROUNDS = 3
"""Samples of a contender are taken in so many turns, so that a clock that falls meets all of them."""

FLUSH_BYTES = 128 << 20
"""More than the second-level cache of any GPU here."""

LAYER, EXCHANGE = "layer", "dispatch and combine"


@dataclass(frozen=True)
class EngineCase:
    """Sizes of the layer.

    Attributes:
        tokens: of each rank, one entry for each size that is measured.
        hidden_size, intermediate_size, num_experts, topk: of the layer.
        device: "cuda" or "cpu".
    """

    tokens: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_experts: int
    topk: int
    device: str

    def own_experts(self, rank: int, ranks: int) -> slice:
        """Return the experts of ``rank``, of the case's."""
        each = self.num_experts // ranks
        return slice(rank * each, (rank + 1) * each)


@dataclass(frozen=True)
class Weights:
    """Weights of experts, bf16: gate and up projections [experts, 2 intermediate, hidden], and
    down [experts, hidden, intermediate]."""

    up: Tensor
    down: Tensor

    def of(self, experts: slice) -> Weights:
        """Return those of some experts, in memory of their own."""
        return Weights(self.up[experts].clone(), self.down[experts].clone())


def make_weights(case: EngineCase) -> Weights:
    """Return the weights of all experts, the same on every rank."""
    generator = torch.Generator(case.device).manual_seed(1)

    def made(*shape: int) -> Tensor:
        values = torch.empty(shape, device=case.device, dtype=torch.bfloat16)
        return values.normal_(0, shape[-1] ** -0.5, generator=generator)

    return Weights(
        made(case.num_experts, 2 * case.intermediate_size, case.hidden_size),
        made(case.num_experts, case.hidden_size, case.intermediate_size),
    )


@dataclass(frozen=True)
class Batch:
    """Tokens of a rank: rows [tokens, hidden] bf16, router weights [tokens, topk] fp32, and ids likewise, int32."""

    x: Tensor
    weights: Tensor
    ids: Tensor


def make_batch(case: EngineCase, rank: int, tokens: int) -> Batch:
    """Return the batch of ``rank``: each token's experts are drawn evenly, and their weights sum to 1."""
    generator = torch.Generator().manual_seed(100 * tokens + rank)
    x = torch.randn(tokens, case.hidden_size, generator=generator)
    weights, ids = torch.randn(tokens, case.num_experts, generator=generator).softmax(-1).topk(case.topk)
    weights /= weights.sum(-1, keepdim=True)
    return Batch(x.to(case.device, torch.bfloat16), weights.to(case.device), ids.int().to(case.device))


def products(rows: Tensor, weights: Weights, ends: Tensor) -> Tensor:
    """Return the experts' outputs of ``rows``, [rows, hidden], which lie grouped by expert; ``ends`` of the groups.

    Rows past the last end are not computed, and hold anything.
    """
    gate, value = torch._grouped_mm(rows, weights.up.transpose(1, 2), offs=ends).chunk(2, -1)
    out: Tensor = torch._grouped_mm(silu(gate) * value, weights.down.transpose(1, 2), offs=ends)
    return out


def weighed_experts(x: Tensor, weights: Weights, ids: Tensor, chosen: Tensor) -> Tensor:
    """Return [rows, hidden]: for each row of ``x`` the sum of its experts here, by router weight.

    Shapes do not depend on the routing and the host waits for nothing, so that a CUDA graph can capture it.

    Args:
        x: [rows, hidden].
        weights: of the experts here.
        ids: [rows, topk] integers that count the experts here from 0; all others are left out.
        chosen: [rows, topk], router weights.
    """
    experts, (rows, topk) = len(weights.up), ids.shape
    slots = torch.where((ids >= 0) & (ids < experts), ids, experts).view(-1)
    expert, order = slots.sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device=x.device, dtype=expert.dtype), right=True)
    made = products(x[order // topk], weights, ends.int()).masked_fill_((expert == experts)[:, None], 0)
    by_slot = torch.empty_like(made)
    by_slot[order] = made
    return torch.bmm(chosen.to(x.dtype)[:, None], by_slot.view(rows, topk, -1))[:, 0]


def reference(batch: Batch, weights: Weights) -> Tensor:
    """Return the layer of ``batch`` on this rank alone, one expert after the other, summed in fp32."""
    total = torch.zeros_like(batch.x, dtype=torch.float32)
    for expert in batch.ids.unique().tolist():
        row, slot = (batch.ids == expert).nonzero(as_tuple=True)
        gate, value = (batch.x[row] @ weights.up[expert].T).chunk(2, -1)
        made = (silu(gate) * value) @ weights.down[expert].T
        total.index_add_(0, row, made.float() * batch.weights[row, slot, None])
    return total


@dataclass(frozen=True)
class Contender:
    """One dispatcher in the layer.

    Attributes:
        name: whose it is.
        layer: runs the layer on a batch, and returns its output.
        exchange: the same with experts that compute nothing; what it returns holds anything.
        check: raises where a call since the last check lost rows or failed.
    """

    name: str
    layer: Callable[[Batch], Tensor]
    exchange: Callable[[Batch], object]
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Engine:
    """What a framework's module makes of a case.

    Attributes:
        contenders: the framework's own dispatcher, and moelink's.
        note: what has to be said of the first.
        close: closes moelink's communicators and the framework's groups. Collective.
        step: what a step of the engine with so many tokens on every rank is enclosed in.
    """

    contenders: Sequence[Contender]
    note: str
    close: Callable[[], None]
    step: Callable[[int], contextlib.AbstractContextManager[object]] = lambda tokens: contextlib.nullcontext()


Figures = dict[str, dict[str, Any]]


def compare(engine: Engine, batches: Mapping[int, Batch], weights: Weights) -> dict[str, float]:
    """Return how far each contender's output of each batch is from :func:`reference`, in its length. Collective."""
    found = {}
    for tokens, batch in batches.items():
        expected = {"out": reference(batch, weights)}
        with engine.step(tokens):
            for contender in engine.contenders:
                made = {"out": contender.layer(batch).float()}
                found[f"{contender.name}, {tokens} tokens"] = differences(expected, made)["out"]
    return largest_over_ranks(found)


def time_engine(
    engine: Engine, batches: Mapping[int, Batch], device: str, *, samples: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rows of figures, one for each size and contender, and whether CUDA graphs held the calls. Collective.

    Calls are timed one by one, and, where both contenders can be captured, as replays of a graph of one call.
    """
    clock = CudaClock(torch.device("cuda", torch.cuda.current_device()), flush_bytes=FLUSH_BYTES) if (
        device == "cuda") else WallClock()  # fmt: skip
    rows = []
    for tokens, batch in batches.items():
        with engine.step(tokens):
            figures = time_calls(_calls(engine, batch), clock, samples=samples)
        rows += [{"contender": name, "tokens": tokens, **found} for name, found in figures.items()]
    graphs: dict[str, Any] = {"captured": False, "reason": "on CPUs there are none"}
    if device == "cuda":
        graphs = _time_graphs(engine, batches, clock, rows, samples)
    for contender in engine.contenders:
        contender.check()
    return rows, graphs


Calls = dict[str, dict[str, Callable[[], object]]]


def _calls(engine: Engine, batch: Batch) -> Calls:
    """Return by contender what is timed of it."""
    return {
        contender.name: {
            LAYER: functools.partial(contender.layer, batch),
            EXCHANGE: functools.partial(contender.exchange, batch),
        }
        for contender in engine.contenders
    }


def time_calls(calls: Calls, clock: Clock, *, samples: int) -> dict[str, Figures]:
    """Return by contender and call the figure, contenders in turns. Collective."""
    taken: dict[str, dict[str, list[float]]] = {name: {what: [] for what in found} for name, found in calls.items()}
    for _ in range(ROUNDS):
        for name, found in calls.items():
            for what, call in found.items():
                taken[name][what] += clock.measure(call, samples=-(-samples // ROUNDS), warmup=2)
    return {
        name: {what: dataclasses.asdict(slowest_rank(everyone(times))) for what, times in found.items()}
        for name, found in taken.items()
    }


def _time_graphs(
    engine: Engine, batches: Mapping[int, Batch], clock: Clock, rows: list[dict[str, Any]], samples: int
) -> dict[str, Any]:
    """Add figures of replayed graphs to ``rows``, and return whether both contenders could be captured. Collective."""
    for tokens, batch in batches.items():
        with engine.step(tokens):
            replays: Calls = {}
            for name, calls in _calls(engine, batch).items():
                for what, call in calls.items():
                    graph, reason = attempt(functools.partial(capture, [call], clock.device))
                    if graph is None:
                        return {"captured": False, "reason": f"{name}, {what}, {tokens} tokens: {reason}"}
                    replays.setdefault(name, {})[f"{what}, in a graph"] = graph.replay
            figures = time_calls(replays, clock, samples=samples)
        for row in rows:
            if row["tokens"] == tokens:
                row.update(figures[row["contender"]])
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
