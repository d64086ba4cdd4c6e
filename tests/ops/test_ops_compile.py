"""Layers of operators under ``torch.compile`` and ``torch.export``: no graph break, same bits, calls in order."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import moelink
from moelink import epilogues, ops
from moelink.testing import assert_bitwise_equal, run_ranks
from tests.ops.op_layers import IDS, H, K, T, noting, one_rank
from tests.ops.test_autograd import count_calls

# Inductor gives the linker torch's folder without quotes.
HAS_INDUCTOR = shutil.which("g++") is not None and " " not in torch.__file__
NEEDED = "Inductor needs g++, and torch in a folder without a space in its path"
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(not HAS_INDUCTOR, reason=NEEDED))]


# --- compiled layers --------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A Mixture-of-Experts layer as one writes it: router, grouped matmuls, a shared expert."""

    def __init__(self, ep: moelink.Communicator, **options: Any) -> None:
        super().__init__()
        config = ep.config
        self.ep, self.options = ep, options
        torch.manual_seed(7)
        everyone = torch.randn(2, config.num_experts, config.hidden_size, config.hidden_size) / config.hidden_size**0.5
        first = moelink.routing.ExpertMap(config.num_experts, config.world_size).first(config.rank)
        mine = everyone[:, first : first + config.num_local_experts].bfloat16()
        self.gate = torch.nn.Linear(config.hidden_size, config.num_experts, bias=False, dtype=torch.bfloat16)
        self.up, self.down = torch.nn.Parameter(mine[0].clone()), torch.nn.Parameter(mine[1].clone())

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(self.ep.config.topk)
        recv = self.ep.dispatch(x, ids, weights, **self.options)
        offsets = recv.row_offsets[1:]
        rows = ops.dequantize(self.ep, recv)
        hidden = torch.nn.functional.silu(torch._grouped_mm(rows, self.up, offs=offsets))
        return self.ep.combine(torch._grouped_mm(hidden, self.down, offs=offsets), recv, shared=2 * x)


def train(layer: torch.nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Result and gradients of one step."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = run(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


def same(got: list[Tensor], want: list[Tensor], backend: str) -> None:
    """The same bits; from Inductor, which rounds less often, within a few roundings."""
    for a, b in zip(got, want, strict=True):
        if backend == "inductor":
            torch.testing.assert_close(a, b, rtol=0, atol=float(b.abs().max()) * 4 * 2.0**-8)
        else:
            assert_bitwise_equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_compiles_without_a_graph_break(backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with one_rank() as ep:
        layer = Layer(ep)
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        for tokens in (T, T - 1, T - 2):  # from the second on the number of tokens is a symbol
            x = torch.randn(tokens, H).bfloat16()
            same(train(layer, compiled, x), train(layer, layer, x), backend)
        with torch.no_grad():
            same([compiled(x)], [layer(x)], backend)
        again = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), backend=backend, fullgraph=True)
        same(train(layer, again, x), train(layer, layer, x), backend)


OPTIONS: list[dict[str, Any]] = [{"dispatch_format": "fp8_block128", "hidden_size": 128}, {"pre_reduce": False}]


def test_layers_that_are_compiled_apart_run_one_after_the_other() -> None:
    """All declare to write one tensor; the backward of the first comes after the forward and backward of the second."""
    torch._dynamo.reset()
    with one_rank() as ep:
        layers = torch.nn.Sequential(Layer(ep), Layer(ep))
        x = torch.randn(T, H, dtype=torch.bfloat16)
        want = train(layers, layers, x)
        for layer in layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        same(train(layers, layers, x), want, "aot_eager")


def test_a_compiled_backward_over_a_forward_of_other_ranks_is_refused() -> None:
    """Its graph knows the forward by a name. Once the ranks have changed, a new graph is compiled."""
    torch._dynamo.reset()
    with one_rank() as ep:
        layer = Layer(ep)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x = torch.randn(T, H, dtype=torch.bfloat16)
        want = train(layer, compiled, x)
        before = compiled(x)
        ep._context.change(ep._context.world)
        with pytest.raises(moelink.ForeignHandleError, match=r"combine \(backward\): expected a forward"):
            before.sum().backward()
        same(train(layer, compiled, x), want, "aot_eager")


def test_an_exported_layer_trains_after_the_ranks_have_changed() -> None:
    """Its graph keeps the name of the ranks for which it was made."""
    with one_rank() as ep:
        layer = Layer(ep)
        x = torch.randn(T, H, dtype=torch.bfloat16)
        exported = torch.export.export(layer, (x,)).module()
        before = exported(x.clone().requires_grad_())
        ep._context.change(ep._context.world)
        with pytest.raises(moelink.ForeignHandleError, match=r"combine \(backward\): expected a forward"):
            before.sum().backward()
        for _ in range(2):
            given = x.clone().requires_grad_()
            exported(given).sum().backward()
            assert given.grad is not None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_options_compile(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    with one_rank(**options) as ep:
        layer = Layer(ep)
        x = torch.randn(T, ep.config.hidden_size).bfloat16()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        same(train(layer, compiled, x), train(layer, layer, x), "aot_eager")


def compiled_ranks(rank: int, world_size: int, options: dict[str, Any]) -> bool:
    torch.manual_seed(rank)
    with one_rank(**options, timeout=60) as ep:
        layer = Layer(ep)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for tokens in (T, (rank + 2) % T, 0 if rank == 0 else 1):
            x = torch.randn(tokens, ep.config.hidden_size).bfloat16()
            same(train(layer, compiled, x), train(layer, layer, x), "aot_eager")
    return True


@pytest.mark.full("compiles on two ranks; one rank compiles in the quick tier")
def test_ranks_with_other_numbers_of_tokens_run_the_same_compiled_layer() -> None:
    assert run_ranks(compiled_ranks, 2, {}) == [True] * 2


def test_a_layer_over_interpreted_kernels_compiles() -> None:
    assert run_ranks(compiled_ranks, 1, {"transport": "symmetric"}) == [True]


@pytest.mark.full("compiles for ten seconds; test_a_layer_compiles_without_a_graph_break has one call")
def test_calls_are_neither_dropped_nor_exchanged() -> None:
    """Two branches that do not depend on each other, on two communicators, and one whose result is not used."""
    backend = "inductor" if HAS_INDUCTOR else "aot_eager"
    torch._dynamo.reset()
    with one_rank() as one, one_rank() as two:
        calls = [(name, count_calls(ep)) for name, ep in (("one", one), ("two", two))]
        made: list[str] = []
        for name, _ in calls:
            session = {"one": one, "two": two}[name]._session
            for phase in ("dispatch", "combine"):
                setattr(session, phase, noting(made, f"{phase} {name}", getattr(session, phase)))

        def branches(x: Tensor, w: Tensor) -> Tensor:
            ignored = two.dispatch((x @ w).relu(), IDS)
            first, second = one.dispatch(x @ w, IDS), two.dispatch(x.relu(), IDS)
            a = one.combine(first.tokens.tanh(), first)
            b = two.combine(second.tokens.sigmoid(), second)
            third = one.dispatch(a, IDS)
            two.combine(ignored.tokens, ignored)
            return one.combine(third.tokens, third) + b

        def step(run: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
            made.clear()
            x, w = torch.ones(T, H).bfloat16().requires_grad_(), torch.eye(H).bfloat16().requires_grad_()
            run(x, w).sum().backward()
            return list(made)

        eager = step(branches)
        compiled = step(torch.compile(branches, backend=backend, fullgraph=True))
        assert compiled[:8] == eager[:8] == [
            *("dispatch two", "dispatch one", "dispatch two", "combine one", "combine two", "dispatch one"),
            *("combine two", "combine one"),
        ]  # fmt: skip
        assert compiled == eager


@pytest.mark.parametrize("strict", [True, False])
def test_a_layer_is_exported(strict: bool) -> None:
    with one_rank() as ep, torch.no_grad():
        layer = Layer(ep)
        x = torch.randn(T, H).bfloat16()
        exported = torch.export.export(layer, (x,), strict=strict).module()
        assert_bitwise_equal(exported(x), layer(x))


def test_a_layer_runs_without_data() -> None:
    with one_rank() as ep:
        layer = Layer(ep)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert layer(mode.from_tensor(torch.empty(3, H).bfloat16())).shape == (3, H)


def test_what_cannot_be_traced_is_named() -> None:
    with one_rank() as ep, one_rank(layout="masked") as batched:
        x = torch.randn(T, H).bfloat16()
        earlier = ep.dispatch(x, IDS)
        hook = epilogues.cast(torch.empty(T, H).bfloat16())
        calls: dict[str, Callable[[Tensor], Any]] = {
            "host_counts": lambda x: ep.dispatch(x, IDS, host_counts=True).tokens,
            "out": lambda x: ep.dispatch(x, IDS, out=earlier).tokens,
            "epilogue": lambda x: ep.combine(earlier.tokens, earlier, epilogue=hook),
            "recv": lambda x: ep.combine(earlier.tokens, earlier),
            "layout": lambda x: batched.dispatch(x, IDS).tokens,
        }
        for name, call in calls.items():
            torch._dynamo.reset()
            with pytest.raises(Exception, match=rf"{name}: "):
                torch.compile(call, backend="aot_eager", fullgraph=True)(x)


def test_the_split_form_and_hooks_are_traced() -> None:
    torch._dynamo.reset()
    with one_rank() as ep:
        logits = torch.rand(T, K, requires_grad=True)

        def run(x: Tensor) -> Tensor:
            hook = moelink.Hook(None, lambda tensors, token, slot: tensors[0][token, slot].exp(), (logits,))
            pending = ep.dispatch_async(x, IDS, hook)
            extra = x * 3
            recv = pending.wait()
            return ep.combine_async(recv.tokens, recv, shared=extra).wait()

        x = torch.randn(T, H).bfloat16()
        want = run(x)
        (want_grad,) = torch.autograd.grad(want.sum(), logits)
        got = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
        assert_bitwise_equal(got.detach(), want.detach())
        (grad,) = torch.autograd.grad(got.sum(), logits)
        assert_bitwise_equal(grad, want_grad)
