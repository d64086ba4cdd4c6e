"""Eager calls that record gradients without operators have the bits of those with operators, and are quick."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import moelink
from moelink.hooks import Hook
from moelink.ops import dequantize
from moelink.testing import assert_bitwise_equal
from moelink.transports.session import Session

FIELDS: dict[str, Any] = {
    "num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": 5, "transport": "symmetric",
}  # fmt: skip


def given(seed: int, learning: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    x, weights = torch.randn(5, 128).bfloat16(), torch.rand(5, 2)
    x.requires_grad_("x" in learning), weights.requires_grad_("w" in learning)
    return x, torch.randint(-1, 4, (5, 2)), weights


def step(ep: moelink.Communicator, seed: int, learning: str) -> list[Tensor | None]:
    """Return the result of a dispatch and a combine, and all gradients."""
    x, ids, weights = given(seed, learning)
    recv = ep.dispatch(x, ids, weights)
    rows = dequantize(ep, recv)
    y = (2 * rows).detach().requires_grad_() if learning == "y" else 2 * rows
    out = ep.combine(y, recv)
    out.backward(torch.randn(5, 128).bfloat16())
    dy = y.grad[: int(recv.row_offsets[-1])] if learning == "y" else None  # type: ignore[index]
    return [out.detach(), x.grad, weights.grad, dy]


@contextmanager
def ordinary_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    calls: list[str] = []
    start = Session.start

    def counting(session: Session, requests: Any, *, fused: bool) -> Any:
        calls.append(requests[0].phase)
        return start(session, requests, fused=fused)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "start", counting)
        yield calls


@pytest.mark.parametrize("learning", ["xw", "x", "w", "y"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dispatch_format": "fp8_block128"},
        {"pre_reduce": False},
        {"combine_format": "fp8_block128"},
        {"capacity": 3},
    ],
    ids=str,
)
def test_gradients_are_those_of_the_operators(
    options: dict[str, Any], learning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moelink.init(**FIELDS, **options) as ep, moelink.init(**FIELDS, **options) as other:
        other._context.has_nodes = False
        for seed in range(3):
            with ordinary_calls(monkeypatch) as calls:
                got = step(ep, seed, learning)
            # Scales that are laid out by a launch of their own are of no known kind.
            later = ["dispatch"] if options == {"dispatch_format": "fp8_block128"} else []
            assert not seed or calls == later, "calls of known kinds are quick, backward and forward"
            for mine, want in zip(got, step(other, seed, learning), strict=True):
                assert (mine is None) == (want is None)
                if mine is not None and want is not None:
                    assert_bitwise_equal(mine, want, "gradient")


def test_what_learns_requires_grad_and_may_be_changed_in_place() -> None:
    with moelink.init(**FIELDS) as ep:
        for learning in ("xw", "x", "w"):
            x, ids, weights = given(0, learning)
            recv = ep.dispatch(x, ids, weights)
            assert recv.weights is not None
            assert (recv.tokens.requires_grad, recv.weights.requires_grad) == ("x" in learning, "w" in learning)
            assert not any(t.requires_grad for t in (recv.src_info, recv.row_offsets, recv.handle.counts))
            assert not recv.weights._is_view()
        x, ids, weights = given(0, "w")
        recv = ep.dispatch(x, ids, weights)
        recv.weights.mul_(2)  # type: ignore[union-attr]
        ep.combine(recv.tokens, recv).float().sum().backward()
        assert weights.grad is not None
        plain = given(0, "w")
        recv = ep.dispatch(*plain)
        (2 * ep.combine(recv.tokens, recv).float()).sum().backward()
        torch.testing.assert_close(weights.grad, plain[2].grad, rtol=1e-2, atol=1e-2)


def test_ids_that_changed_before_the_backward_are_refused() -> None:
    with moelink.init(**FIELDS) as ep:
        x, ids, weights = given(0, "xw")
        recv = ep.dispatch(x, ids, weights)
        out = ep.combine(recv.tokens, recv)
        ids.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("has_nodes", [True, False])
def test_the_first_backward_after_close_is_refused(has_nodes: bool) -> None:
    """It would open a communicator of gradients that nothing closes."""
    ep = moelink.init(**FIELDS)
    ep._context.has_nodes = has_nodes
    x, ids, weights = given(0, "w")
    recv = ep.dispatch(x, ids, weights)
    ep.close()
    with pytest.raises(moelink.ClosedError, match="backward: the communicator is closed"):
        recv.weights.sum().backward()  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in make_dual
@pytest.mark.parametrize("transport", ["symmetric", "collective"])
def test_tensors_with_tangents_are_refused(transport: str) -> None:
    """Forward-mode AD would get no tangent of the result. Kinds of calls are known, and calls go on."""
    with moelink.init(**{**FIELDS, "transport": transport}) as ep:
        for _ in range(2):
            step(ep, 0, "xw")
            x, ids, weights = given(0, "")
            recv = ep.dispatch(x, ids, weights)
            ep.combine(recv.tokens, recv)
        learning = ep.dispatch(*given(0, "x"))
        out = ep.combine(learning.tokens, learning)
        with forward_ad.dual_level():
            plain = x, weights, recv.tokens, out.detach()
            plain += (recv.weights,)
            x2, weights2, y2, out2, rows2 = (forward_ad.make_dual(tensor, tensor.clone()) for tensor in plain)
            for name, call in (
                ("x", lambda: ep.dispatch(x2, ids, weights)),
                ("x", lambda: ep.dispatch_async(x2, ids, weights)),
                ("x", lambda: ep.dispatch(x2, ids, weights.clone().requires_grad_())),
                ("topk_weights", lambda: ep.dispatch(x, ids, weights2)),
                ("topk_weights", lambda: ep.dispatch(x, ids, Hook(None, lambda t, *_: t[0], (weights2,)))),
                ("y", lambda: ep.combine(y2, recv)),
                ("recv.weights", lambda: ep.combine(recv.tokens, dataclasses.replace(recv, weights=rows2))),
                ("x", lambda: out.backward(out2)),
            ):
                with pytest.raises(moelink.UnsupportedError, match=f"{name}: expected no tangent"):
                    call()
            again = ep.combine(ep.dispatch(x, ids, weights).tokens, recv)
        assert_bitwise_equal(again, ep.combine(recv.tokens, recv), "result")


def test_no_call_makes_a_tensor_that_later_ones_read() -> None:
    """In a call that is captured into a CUDA graph it would have no values until the graph runs."""
    with moelink.init(**FIELDS) as ep:
        slots = vars(ep._context)["slots"]
        step(ep, 0, "xw")
        assert ep._context.slots is slots
        assert slots.tolist() == [0, 1]


def test_nothing_of_a_step_stays() -> None:
    """An output holds no graph, and a graph that was run holds no memory of the output."""
    with moelink.init(**FIELDS) as ep:
        for _ in range(2):  # the transport keeps the tensors of its latest ordinary calls
            step(ep, 0, "xw")
        x, ids, weights = given(0, "xw")
        routed = weights * 1
        recv = ep.dispatch(x, ids, routed)
        out = ep.combine(recv.tokens, recv)
        memory = weakref.ref(vars(recv)["_source"].memory)
        assert not vars(recv)["_source"].weights.requires_grad
        out.sum().backward()
        del recv
        gc.collect()
        assert memory() is None
        assert out.grad_fn is not None


def test_what_a_tracer_must_see_goes_through_operators() -> None:
    """Under a mode of torch's dispatcher and for a tensor with rules of its own."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with moelink.init(**FIELDS) as ep:
        for _ in range(2):
            step(ep, 0, "xw")
        with Noting():
            step(ep, 0, "xw")
    assert {"moelink.dispatch.default", "moelink.combine.default"} <= set(seen)
