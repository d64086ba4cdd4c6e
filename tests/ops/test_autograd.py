"""Gradients through dispatch and combine: against one process, against finite differences, and where torch moves or
recomputes what was saved for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moelink
from moelink import epilogues
from moelink.memory.layout import DispatchMessage
from moelink.testing import run_ranks
from tests.ops.gradients import TOPK, Case, Inputs, expected, gradient_cases, gradients, inputs, layer
from tests.support.patience import hurry, join, meet

CASES = gradient_cases()
COLLECTIVE = {"transport": "collective"}


def close(what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape, f"{what}: {list(got.shape)}, expected {list(want.shape)}"
    if want.numel():
        scale, error = float(want.abs().max()), float((got.double() - want).abs().max())
        assert error <= tolerance * scale, f"{what}: off by {error} of {scale}"


def check(
    case: Case, world_size: int, got: list[dict[str, Tensor]], *, tolerance: float = 1e-12, rounded: Any = None
) -> None:
    """Each rank's result and gradients; gradients of experts, which every rank holds, added up."""
    want = expected(case, world_size, rounded=rounded)
    zero = torch.zeros_like(want[0]["experts"])
    summed = sum((g.get("experts", zero).double() for g in got), zero)
    close(f"{case.id}: experts", summed, want[0]["experts"], tolerance)
    if len(want) < world_size:
        got = [{name: sum(g[name].double() for g in got) for name in got[0]}]  # replicated activations
    for rank, (mine, right) in enumerate(zip(got, want, strict=True)):
        for name in right.keys() - {"experts"}:
            close(f"{case.id} rank {rank}: {name}", mine[name], right[name], tolerance)


def check_all(cases: list[Case], world_size: int, options: dict[str, Any], **how: Any) -> None:
    results = run_ranks(gradients, world_size, cases, options, timeout=240)
    for index, case in enumerate(cases):
        check(case, world_size, [result[index] for result in results], **how)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_equal_those_of_one_process(world_size: int) -> None:
    check_all(CASES, world_size, COLLECTIVE)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_over_interpreted_kernels(world_size: int) -> None:
    late = (("pre_reduce", False),)
    cases = [Case(), Case(late, weights="combine", scenario="holes"), Case((("layout", "rank"),), added="shared")]
    check_all(cases, world_size, {"transport": "symmetric"})


QUANTISED = {"fp8_block128": 128, "mxfp8": 32, "nvfp4": 16, "mxfp4": 32}


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_gradients_of_quantised_rows_are_straight_through(layout: str) -> None:
    common = (("combine_dtype", torch.float32), ("layout", layout))
    cases = {
        name: Case((("dispatch_format", name), ("hidden_size", hidden), *common)) for name, hidden in QUANTISED.items()
    }
    results = run_ranks(gradients, 2, list(cases.values()), COLLECTIVE, timeout=240)
    for index, (name, case) in enumerate(cases.items()):
        fmt = moelink.get_format(name)

        def rounded(x: Tensor, fmt: moelink.Format = fmt) -> Tensor:
            rows = fmt.quantize(x)
            return fmt.dequantize(rows.payload, rows.scales)

        check(case, 2, [result[index] for result in results], tolerance=2e-5, rounded=rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_gradients_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    case = Case((("dispatch_format", name), ("combine_dtype", dtype)))
    # A few roundings of the coarsest dtype on the way.
    check_all([case], 2, COLLECTIVE, tolerance=8 * 2.0**-8)


def finite_differences(rank: int, world_size: int, cases: list[Case]) -> bool:
    for case in cases:
        with moelink.init(**case.fields, timeout=60, transport="collective") as ep:
            m = inputs(case, rank).learning()

            def function(x: Tensor, weights: Tensor, extra: Tensor, m: Inputs = m, case: Case = case) -> Tensor:
                return layer(ep, case, replace(m, x=x, weights=weights, extra=extra))  # noqa: B023 - called in this round

            # Every rank disturbs as many numbers of its own, and so makes as many calls. What one disturbs does not
            # reach another's result, for tokens do not mix.
            assert torch.autograd.gradcheck(function, (m.x, m.weights, m.extra))
    return True


@pytest.mark.parametrize("world_size", [1, 2])
def test_finite_differences(world_size: int) -> None:
    small = (("hidden_size", 3),)
    cases = [
        Case(small, added="shared", tokens=2),
        Case((*small, ("pre_reduce", False)), weights="combine", added="residual", tokens=2),
        Case((*small, ("layout", "rank")), added="shared", tokens=2),
        Case((*small, ("fused_shared_expert", True)), added="residual", tokens=2),
        Case(small, host_counts=True, added="shared", tokens=2),
    ]
    assert run_ranks(finite_differences, world_size, cases, timeout=240) == [True] * world_size


def saved_elsewhere(rank: int, world_size: int) -> dict[str, list[str]]:
    """Calls that each way to keep or recompute makes; all give the same gradients."""
    case = Case(added="shared")
    operators = [torch.ops.moelink.dispatch.default, torch.ops.moelink.combine.default]
    contexts = partial(create_selective_checkpoint_contexts, operators)

    def on_cpu(run: Callable[[], Tensor]) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return run()

    ways: dict[str, Callable[[Callable[[], Tensor]], Tensor]] = {
        "kept": lambda run: run(),
        "save_on_cpu": on_cpu,
        "checkpoint": lambda run: checkpoint(run, use_reentrant=False),
        "selective": lambda run: checkpoint(run, use_reentrant=False, context_fn=contexts),
    }
    found, calls = {}, {}
    with moelink.init(**case.fields, timeout=60, transport="collective") as ep:
        made = count_calls(ep)
        for name, way in ways.items():
            m = inputs(case, rank).learning()
            made.clear()
            out = way(partial(layer, ep, case, m))
            out.backward(m.out_grad)
            found[name] = [out.detach(), *(leaf.grad for leaf in m.leaves().values() if leaf.grad is not None)]
            calls[name] = list(made)
    for name in ways:
        assert all(map(torch.equal, found[name], found["kept"])), name
    return calls


def count_calls(ep: moelink.Communicator) -> list[str]:
    """A list that grows with every dispatch and combine of the communicator's own transport, and with every refusal."""
    calls: list[str] = []

    def counted(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls.append(name)
        return call(*args, **options)

    transport = ep._session.transport
    for name in ("dispatch", "combine", "refuse"):
        setattr(transport, name, partial(counted, name, getattr(transport, name)))
    return calls


def test_saved_tensors_may_be_moved_or_recomputed() -> None:
    both = ["dispatch", "combine"]
    wanted = {"kept": 2 * both, "save_on_cpu": 2 * both, "checkpoint": 3 * both, "selective": 2 * both}
    assert run_ranks(saved_elsewhere, 2) == [wanted] * 2


def traffic_of_backward(rank: int, world_size: int) -> tuple[int, int]:
    case = Case()
    with moelink.init(**case.fields, timeout=60, transport="collective") as ep:
        m = inputs(case, rank).learning()
        out = layer(ep, case, m)
        forward = ep.traffic().dispatch
        out.backward(m.out_grad)
        config = ep.config
        new = DispatchMessage(config.format, config.hidden_size, TOPK, weight_dtype=torch.float64)
        old = DispatchMessage(config.format, config.hidden_size, TOPK, with_ids=False, weight_dtype=None)
        return (ep.traffic().dispatch - forward) * new.nbytes, forward * old.nbytes


def test_the_backward_sends_rows_without_ids_over_the_routing_of_the_forward() -> None:
    for sent, wanted in run_ranks(traffic_of_backward, 2):
        assert sent == wanted > 0


def refused_with_peers(rank: int, world_size: int) -> bool:
    case = Case()
    with moelink.init(**case.fields, timeout=60, transport="collective") as ep:
        m = inputs(case, rank).learning()
        with torch.no_grad():
            earlier = ep.dispatch(m.x, m.ids)
        if rank == 0:
            with pytest.raises(moelink.UnsupportedError, match="^out:"):
                ep.dispatch(m.x, m.ids, out=earlier)
        else:
            with pytest.raises(moelink.PeerAbortedError, match="rank 0 refused"):
                ep.dispatch(m.x, m.ids)
        wrong = {"shared": "a tensor of another kind"} if rank == 1 else {}
        recv = ep.dispatch(m.x, m.ids)
        error = moelink.ArgumentError if rank == 1 else moelink.PeerAbortedError
        with pytest.raises(error, match="shared: expected a tensor, got str" if rank == 1 else "rank 1 refused"):
            ep.combine(recv.tokens, recv, **wrong)
        with pytest.raises(error, match="y: expected shape" if rank == 1 else "rank 1 refused"):
            ep.combine(recv.tokens[rank:], recv)
        layer(ep, case, m).backward(m.out_grad)
    return True


def test_what_has_no_gradient_is_refused_towards_peers_too() -> None:
    assert run_ranks(refused_with_peers, 2) == [True] * 2


def absent(rank: int, world_size: int) -> bool:
    case = Case(weights="none")
    with join(**case.fields, transport="collective") as ep:
        m = inputs(case, rank).learning()
        out = layer(ep, case, m)
        meet()
        if rank == 0:
            hurry(ep)
            with pytest.raises(moelink.PeerTimeoutError, match="rank 1 did not arrive in dispatch"):
                out.backward(m.out_grad)
        meet()
    return True


def test_a_rank_that_stays_away_from_the_backward_is_named() -> None:
    assert run_ranks(absent, 2) == [True] * 2


def one_rank(**changes: Any) -> moelink.Communicator:
    sizes = {"num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": 4, "transport": "collective"}
    return moelink.init(**{**sizes, **changes})


IDS = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]])


def test_options_without_a_gradient_are_named() -> None:
    x = torch.randn(4, 128, requires_grad=True)
    scale = torch.ones(1, requires_grad=True)
    with one_rank(dispatch_format="nvfp4") as ep:
        with pytest.raises(moelink.UnsupportedError, match="^input_scale:"):
            ep.dispatch(x.detach(), IDS, input_scale=scale)
        hook = moelink.Hook(None, lambda tensors: tensors[0] * 2, (scale,))
        with pytest.raises(moelink.UnsupportedError, match="^input_scale:"):
            ep.dispatch(x, IDS, input_scale=hook)
        rows = ep.config.format.quantize(x.detach())
        scales = rows.scales.to(torch.float32).requires_grad_()
        with pytest.raises(moelink.UnsupportedError, match="^scales:"):
            ep.dispatch(rows.payload, IDS, scales=scales)
    with one_rank(dispatch_format="fp8_block128") as ep:
        rows = ep.config.format.quantize(x.detach())
        with pytest.raises(moelink.UnsupportedError, match="^x:"):
            ep.dispatch(rows.payload.requires_grad_(), IDS, scales=rows.scales)
    with one_rank(combine_dtype=torch.float32, dispatch_format="fp32") as ep:
        recv = ep.dispatch(x, IDS)
        out = torch.empty(4, 128)
        with pytest.raises(moelink.UnsupportedError, match="^out:"):
            ep.combine(recv.tokens, recv, out=out)
        with pytest.raises(moelink.UnsupportedError, match="^epilogue:"):
            ep.combine(recv.tokens, recv, epilogue=epilogues.cast(out))
        result = ep.combine(recv.tokens, recv)
        (grad,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
    with pytest.raises(moelink.ClosedError, match="combine"):
        ep.combine(recv.tokens, recv)
    with pytest.raises(moelink.ClosedError, match="closed"):
        result.sum().backward()


def test_devices_of_one_process_have_no_gradients() -> None:
    sizes = {"num_experts": 4, "topk": 2, "hidden_size": 8, "max_tokens_per_rank": 4, "dispatch_format": "fp32"}
    x = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    with moelink.init_devices(["cpu"] * 2, **sizes, transport="collective") as ep:
        with pytest.raises(moelink.UnsupportedError, match="init_devices"):
            ep.dispatch(x, [IDS] * 2)
        with torch.no_grad():
            ep.dispatch(x, [IDS] * 2)


def test_a_hook_for_router_weights_is_differentiated() -> None:
    logits = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    hook = moelink.Hook(None, lambda tensors, token, slot: tensors[0][token, slot].exp(), (logits,))
    x = torch.randn(4, 128, dtype=torch.float64)
    for late in (False, True):
        logits.grad = None
        with one_rank(dispatch_format="fp64", combine_dtype=torch.float64, pre_reduce=not late) as ep:
            recv = ep.dispatch(x, IDS, None if late else hook)
            ep.combine(recv.tokens.detach(), recv, hook if late else None).sum().backward()
        want = logits.detach().exp() * x.sum(1, keepdim=True)
        torch.testing.assert_close(logits.grad, want)


def test_trainable_experts_over_frozen_tokens() -> None:
    x, y_grad = torch.randn(4, 128, dtype=torch.float64), torch.randn(4, 128, dtype=torch.float64)
    with one_rank(dispatch_format="fp64", combine_dtype=torch.float64) as ep:
        recv = ep.dispatch(x, IDS)
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        ep.combine(recv.tokens * scale, recv).backward(y_grad)
    torch.testing.assert_close(scale.grad, (2 * x * y_grad).sum())


def test_weights_alone_learn() -> None:
    weights = torch.rand(4, 2, requires_grad=True)
    with one_rank() as ep:
        recv = ep.dispatch(torch.ones(4, 128).bfloat16(), IDS, weights)
        assert not recv.tokens.requires_grad
        assert recv.weights.requires_grad
        ep.combine(recv.tokens, recv).sum().backward()
    assert weights.grad.tolist() == [[128.0, 128.0]] * 4


def test_only_what_learns_requires_grad() -> None:
    x = torch.randn(4, 128, requires_grad=True)
    with one_rank(dispatch_format="fp8_block128") as ep:
        recv = ep.dispatch(x, IDS, torch.rand(4, 2))
    fields = {name for name, value in vars(recv).items() if isinstance(value, Tensor) and value.requires_grad}
    assert fields == set()
    assert recv.handle.carrier.requires_grad
    assert recv.handle.carrier.untyped_storage().nbytes() == 2
