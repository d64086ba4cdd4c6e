"""Auxiliary losses, updates of router biases and padding masks, against one process in plain torch with all tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moelink
from moelink.nn import (
    AuxLossConfig,
    MoE,
    Placement,
    RouterConfig,
    add_aux_losses,
    all_reduce_gradients,
    fully_shard,
    mark_experts,
    update_router_bias,
)
from moelink.testing import run_ranks
from tests.nn.plain_moe import close, joined

EXPERTS, TOPK, HIDDEN, INNER, LENGTH = 6, 2, 16, 8, 5
SIZES: dict[str, Any] = {
    "num_experts": EXPERTS, "topk": TOPK, "hidden_size": HIDDEN, "max_tokens_per_rank": 4 * LENGTH,
    "dispatch_format": "fp64", "combine_dtype": torch.float64, "device": "cpu", "timeout": 60,
}  # fmt: skip
BIASED = RouterConfig(scoring="sigmoid", correction_bias=True)
FACTORS = {"balance": 3.0, "sequence": 2.0, "z": 0.5}
SEQUENCES = (2, 0, 3, 1)
BIAS = torch.linspace(-0.2, 0.2, EXPERTS)


@dataclass(frozen=True)
class Case:
    """How ranks train: the tokens that losses are over, the router, the mode, what sums the gradients ("" for
    all_reduce_gradients), and whether the model is compiled."""

    world: int
    over: str = "all"
    router: RouterConfig | None = None
    mode: str = "alltoall"
    wrapper: str = ""
    compiled: bool = False

    def __str__(self) -> str:
        router = "biased" if self.router else ""
        parts = self.world, self.over, router, self.mode, self.wrapper, "compiled" if self.compiled else ""
        return "-".join(str(part) for part in parts if part)


CASES = [
    Case(1), Case(2), Case(4, router=BIASED), Case(4, "rank"), Case(2, "rank", router=BIASED), Case(2, wrapper="ddp"),
    Case(2, "rank", wrapper="ddp"), Case(2, mode="allreduce"), Case(2, "rank", mode="allreduce"),
    Case(2, wrapper="fsdp"), Case(2, compiled=True), Case(2, "rank", wrapper="ddp", compiled=True),
]  # fmt: skip
PLANTED = [Case(4, router=BIASED), Case(2, wrapper="ddp")]


class Model(torch.nn.Module):
    """A layer in a model."""

    def __init__(self, ep: moelink.Communicator, case: Case) -> None:
        super().__init__()
        losses = AuxLossConfig(**FACTORS, over=case.over)  # type: ignore[arg-type]
        self.moe = MoE(ep, intermediate_size=INNER, router=case.router, aux_loss=losses, seed=7)
        if self.moe.router.correction_bias is not None:
            self.moe.router.correction_bias.copy_(BIAS)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        out: Tensor = self.moe(x, padding_mask=padding_mask)
        return 1 * out  # no view, of which fully_shard warns


def inputs(rank: int, step: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [sequences, LENGTH, HIDDEN] of ``rank``, the gradient of their results, and which are padding. One of
    three sequences is all padding."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    shape = SEQUENCES[rank], LENGTH, HIDDEN
    x, heard = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    padding = torch.rand(shape[:2], generator=generator) < 0.3
    padding[2:] = True
    return 3 * x, heard, padding


def whole(gradient: Any) -> Tensor:
    full: Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full


def train(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    with moelink.init(**SIZES, mode=case.mode) as ep:
        model: Any = Model(ep, case)
        if case.compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        run = DistributedDataParallel(mark_experts(model)) if case.wrapper == "ddp" else model
        if case.wrapper == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        x, heard, padding = inputs(0 if case.mode == "allreduce" else rank)
        x.requires_grad_()
        task = (run(x, padding) * heard).sum()
        loss = add_aux_losses(task, model)
        loss.backward()
        if not case.wrapper:
            all_reduce_gradients(model)
        return {
            "x": x.grad, "aux": model.moe.aux_losses.values, "added": (loss - task).detach(),
            "grads": {name: whole(parameter.grad) for name, parameter in model.named_parameters()},
        }  # fmt: skip


# --- the same in one process, token by token --------------------------------------------------------------------------


def scores_of(logits: Tensor, router: RouterConfig | None) -> Tensor:
    return logits.softmax(-1) if router is None else logits.sigmoid()


def plain_layer(state: dict[str, Tensor], x: Tensor, router: RouterConfig | None) -> Tensor:
    scores = scores_of(x @ state["moe.router.weight"].T, router)
    ids = (scores.detach() + (0 if router is None else BIAS)).topk(TOPK).indices
    weights = scores.gather(-1, ids)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = (x @ state["moe.experts.gate_up_proj"][expert].T).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ state["moe.experts.down_proj"][expert].T
        out = out + (weights * (ids == expert)).sum(-1, keepdim=True) * y
    return out


def plain_losses(state: dict[str, Tensor], x: Tensor, padding: Tensor, router: RouterConfig | None) -> list[Tensor]:
    """The three losses of a batch, as their definitions say."""
    logits = x @ state["moe.router.weight"].T
    scores = scores_of(logits, router)
    scores = scores / scores.sum(-1, keepdim=True)
    places = [[(b, t) for t in range(LENGTH) if not padding[b, t]] for b in range(len(x))]
    chosen = {at: set(scores[at].detach().topk(TOPK).indices.tolist()) for row in places for at in row}

    def balance(tokens: list[tuple[int, int]]) -> Tensor:
        total = logits.new_zeros(())
        for expert in range(EXPERTS):
            fraction = sum(expert in chosen[at] for at in tokens) / len(tokens) / TOPK
            total = total + EXPERTS * fraction * torch.stack([scores[at][expert] for at in tokens]).mean()
        return total

    every, kept = [at for row in places for at in row], [row for row in places if row]
    if not every:
        return [logits.new_zeros(())] * 3
    z = torch.stack([logits[at].exp().sum().log() ** 2 for at in every]).mean()
    return [balance(every), torch.stack([balance(row) for row in kept]).mean(), z]


def plain_training(case: Case, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
    """Gradients of parameters and of each rank's tokens, and the losses times their factors."""
    ranks = 1 if case.mode == "allreduce" else case.world
    state = {name: value.clone().requires_grad_(value.dtype == torch.float64) for name, value in state.items()}
    batches = [inputs(rank) for rank in range(ranks)]
    xs = [x.requires_grad_() for x, _, _ in batches]
    tasks = [(plain_layer(state, x, case.router) * heard * ~padding[..., None]).sum() for x, heard, padding in batches]
    if case.over == "all":
        parts = [plain_losses(state, torch.cat(xs), torch.cat([padding for *_, padding in batches]), case.router)]
    else:
        parts = [plain_losses(state, x, padding, case.router) for x, _, padding in batches]
    losses = torch.stack([torch.stack(part) for part in parts]).mean(0) * torch.tensor([*FACTORS.values()])
    (torch.stack(tasks).sum() / (case.world if case.wrapper == "ddp" else 1) + losses.sum()).backward()
    grads = {name: value.grad for name, value in state.items() if value.requires_grad}
    return grads, [x.grad for x in xs], losses.detach()  # type: ignore[return-value,misc]


def full_state(case: Case) -> dict[str, Tensor]:
    with moelink.init(**SIZES, transport="collective", group=None) as ep:
        return {name: value.clone() for name, value in Model(ep, case).state_dict().items()}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.quick("faults are planted that more ranks notice")] * (case in PLANTED))
        for case in CASES
    ],
    ids=str,
)
def test_losses_and_all_gradients_are_those_of_one_process(case: Case) -> None:
    results = run_ranks(train, case.world, case)
    grads, of_tokens, losses = plain_training(case, full_state(case))
    for name, want in grads.items():
        close(joined(name, [result["grads"][name] for result in results]), want, name)
    if case.mode == "allreduce":
        close(torch.stack([result["x"] for result in results]).sum(0), of_tokens[0], "gradient of tokens")
    else:
        for rank, result in enumerate(results):
            divisor = case.world if case.wrapper == "ddp" else 1  # a rank's own gradients are of its own loss
            if SEQUENCES[rank]:
                close(result["x"], of_tokens[rank] * divisor, f"gradient of tokens of rank {rank}")
    got = torch.stack([result["aux"] for result in results]).sum(0) / (case.world if case.wrapper == "ddp" else 1)
    torch.testing.assert_close(got.double(), losses, rtol=1e-6, atol=1e-6)
    for result in results:
        torch.testing.assert_close(result["added"], result["aux"].sum().double(), rtol=1e-6, atol=1e-6)


# --- compilers and checkpointing --------------------------------------------------------------------------------------


def once_more(kind: str, layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``layer``, recomputed in the backward or compiled."""
    if kind == "compiled":
        return torch.compile(layer, fullgraph=True, backend="aot_eager")
    if kind == "compiled inside":
        inner = torch.compile(layer, fullgraph=True, backend="aot_eager")
        return lambda *args: checkpoint(inner, *args, use_reentrant=False)  # type: ignore[no-any-return]
    again = lambda *args: checkpoint(layer, *args, use_reentrant=kind == "reentrant")  # noqa: E731
    return torch.compile(again, fullgraph=True, backend="aot_eager") if kind == "compiled outside" else again


def step(kind: str) -> list[Tensor]:
    """Two micro-batches, whose gradients add up: gradients, losses, and what the routers and the meter counted."""
    torch._dynamo.reset()
    with moelink.init(**SIZES) as ep:
        model = Model(ep, Case(1, router=BIASED))
        run = model if kind == "plain" else once_more(kind, model)
        found = []
        for index in range(2):
            x, heard, padding = inputs(0, index)
            x.requires_grad_()
            loss = add_aux_losses((run(x, padding) * heard).sum(), model)
            (loss * 8).backward()
            found += [loss.detach(), x.grad]
        counted = [model.moe.router_load.total, model.moe.load.total]
        return [*found, *(p.grad for p in model.parameters()), *counted]  # type: ignore[list-item]


@pytest.mark.parametrize("kind", ["kept", "reentrant", "compiled", "compiled inside", "compiled outside"])
def test_recomputed_and_compiled_layers_add_and_count_once(kind: str) -> None:
    for number, (got, want) in enumerate(zip(step(kind), step("plain"), strict=True)):
        close(got.double(), want.double(), f"tensor {number}")


def test_gradients_of_losses_take_the_factor_of_the_loss() -> None:
    grads = []
    for factor in (1.0, 8.0):
        with moelink.init(**SIZES) as ep:
            model = Model(ep, Case(1))
            x, _, padding = inputs(0)
            (add_aux_losses(0 * model(x, padding).sum(), model) * factor).backward()
            grads.append(model.moe.router.weight.grad)
    assert grads[0].any()
    torch.testing.assert_close(grads[1], 8 * grads[0])


def test_backward_without_the_sum_is_refused() -> None:
    with moelink.init(**SIZES) as ep:
        model = Model(ep, Case(1))
        x, heard, padding = inputs(0)
        with pytest.raises(moelink.StateError, match="aux_loss: expected the loss to be that of add_aux_losses"):
            (model(x, padding) * heard).sum().backward()
        model.eval()
        assert not add_aux_losses(model(x, padding).sum(), model).sub(model(x, padding).sum()).any(), "no losses"


@pytest.mark.quick("each is a refusal of its own, in microseconds")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"aux_loss: expected a positive coefficient of balance, sequence, z, got"),
        ({"z": -1.0}, r"aux_loss.z: expected a finite number >= 0, got -1.0"),
        ({"balance": math.nan}, r"aux_loss.balance: expected a finite number >= 0, got nan"),
        ({"z": 1.0, "over": "node"}, r"aux_loss.over: expected 'rank' or 'all', got 'node'"),
    ],
)
def test_other_losses_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(moelink.ConfigError, match=f"^{message}"):
        AuxLossConfig(**options)


def test_other_arguments_are_refused() -> None:
    with moelink.init(**SIZES) as ep:
        layer = MoE(ep, intermediate_size=INNER)
        losses = MoE(ep, intermediate_size=INNER, aux_loss=AuxLossConfig(z=1.0))
        x = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64)
        for call, message in [
            (lambda: add_aux_losses(x.sum(), layer), "model: expected layers made with aux_loss=, got MoE without any"),
            (lambda: add_aux_losses(x, losses), "loss: expected one number, got"),
            (lambda: update_router_bias(layer, 1e-3), r"model: expected layers with RouterConfig\(correction_bias"),
            (lambda: update_router_bias(layer, -1.0), "rate: expected a positive number, got -1.0"),
            (lambda: layer(x, padding_mask=torch.ones(2, LENGTH).long()), r"padding_mask: .*True for padding.*int64"),
            (lambda: layer(x, padding_mask=torch.ones(LENGTH, 2).bool()), r"padding_mask: .*shape \[2, 5\]"),
        ]:
            with pytest.raises(moelink.ArgumentError, match=f"^{message}"):
                call()


# --- biases of routers ------------------------------------------------------------------------------------------------


STEPS, MICRO, RATE = 3, 2, 0.25


def balance(rank: int, world_size: int, placed: bool) -> list[Tensor]:
    """Biases after each of three steps of two micro-batches. What is not training counts for nothing."""
    placement = Placement((3, 1, 0, 2, 5, 4)) if placed else None
    biases = []
    with moelink.init(**SIZES) as ep:
        layer = MoE(ep, intermediate_size=INNER, router=BIASED, seed=7, load_steps=0, placement=placement)
        layer.bfloat16().double()
        assert layer.router.correction_bias is not None
        for number in range(STEPS):
            for micro in range(MICRO):
                x, heard, padding = inputs(rank, MICRO * number + micro)
                run = lambda x, padding=padding: layer(x, padding_mask=padding)  # noqa: E731
                (checkpoint(run, x.requires_grad_(), use_reentrant=False) * heard).sum().backward()
            with torch.no_grad():
                layer.eval()(torch.ones(1, HIDDEN, dtype=torch.float64))
            layer.train()
            update_router_bias(torch.nn.Sequential(layer), RATE)
            biases.append(layer.router.correction_bias.clone())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(inputs(rank)[0])
        layer.load_state_dict(layer.state_dict())
        assert torch.equal(layer.router.correction_bias, biases[-1])
    return [layer.router.weight.detach(), *biases]


@pytest.mark.parametrize(("world", "placed"), [(4, False), (2, True), (1, False)])
def test_biases_follow_the_load_of_all_tokens(world: int, placed: bool) -> None:
    (weight, *biases), *others = run_ranks(balance, world, placed)
    bias = torch.zeros(EXPERTS)
    for number in range(STEPS):
        counts = [0] * EXPERTS
        for micro in range(MICRO):
            for rank in range(world):
                x, _, padding = inputs(rank, MICRO * number + micro)
                for token in x[~padding]:
                    for expert in ((weight @ token).sigmoid() + bias).topk(TOPK).indices.tolist():
                        counts[expert] += 1
        for expert, count in enumerate(counts):
            bias[expert] += RATE * ((sum(counts) > EXPERTS * count) - (sum(counts) < EXPERTS * count))
        assert torch.equal(biases[number], bias), f"step {number}: {counts}"
        assert all(torch.equal(other[1 + number], bias) for other in others)
    assert bias.any()


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["alltoall", "allreduce"])
def test_padding_is_no_token(mode: str) -> None:
    x, heard, padding = inputs(0)
    padding[0, 1] = padding[1, 4] = True
    shared = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
    with moelink.init(**SIZES, mode=mode) as ep:
        layer = MoE(ep, intermediate_size=INNER, shared_expert=shared if mode == "alltoall" else None)
        poisoned = x.masked_fill(padding[..., None], math.nan).requires_grad_()
        out = layer(poisoned, padding_mask=padding)
        (out * heard).sum().backward()
        grads = [parameter.grad.clone() for parameter in layer.parameters()]  # type: ignore[union-attr]
        assert sum(layer.stats().tokens_per_expert) == TOPK * int((~padding).sum())
        assert not out[padding].any()
        assert not poisoned.grad[padding].any()  # type: ignore[index]
        layer.zero_grad()
        packed = x[~padding].requires_grad_()
        want = layer(packed)
        (want * heard[~padding]).sum().backward()
        close(out[~padding].detach(), want.detach(), "output")
        close(poisoned.grad[~padding], packed.grad, "gradient of tokens")  # type: ignore[index,arg-type]
        for (name, parameter), got in zip(layer.named_parameters(), grads, strict=True):
            if name != "shared_expert.bias":
                close(got, parameter.grad, name)  # type: ignore[arg-type]
        with torch.no_grad():
            first = layer(x, padding_mask=padding, num_tokens=torch.tensor(LENGTH))
        close(first[0], out[0].detach(), "rows before num_tokens")
        assert not first[1].any()


def travelled(rank: int, world_size: int) -> int:
    """Rows that this rank gets if all tokens of all ranks but one are padding."""
    rows: Sequence[int] = []
    with moelink.init(**SIZES) as ep, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        layer, dispatch = MoE(ep, intermediate_size=INNER), ep.dispatch
        kept: list[Any] = []
        patch.setattr(ep, "dispatch", lambda *args, **options: kept.append(dispatch(*args, **options)) or kept[-1])
        padding = torch.ones(2, LENGTH, dtype=torch.bool)
        padding[0, 0] = rank > 0
        layer(torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64), padding_mask=padding)
        rows = kept[0].row_offsets.tolist()
    return rows[-1]


def test_padding_travels_nowhere() -> None:
    assert sum(run_ranks(travelled, 2)) == TOPK
