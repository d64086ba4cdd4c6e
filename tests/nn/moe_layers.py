"""Cases of the MoE layer, the ranks that run them, and the layer in one process that judges them: plain torch in fp64.

Inputs are a function of (case, rank). Ranks return what they got; the parent compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import moelink
from moelink.nn import GatedMLP, MoE, RouterConfig, all_reduce_gradients, merge_state_dicts, route
from moelink.testing import assert_bitwise_equal

EXPERTS, TOPK, INNER, MAX_TOKENS = 6, 3, 24, 9
"""Sizes of a case unless it says otherwise."""

TOKENS = (7, 0, 9, 4)
ROUTERS = {
    "softmax": RouterConfig(),
    "deepseek": RouterConfig(
        scoring="sigmoid", correction_bias=True, num_groups=3, topk_groups=2, group_score="top2", scaling_factor=2.5
    ),
}


@dataclass(frozen=True)
class Case:
    """One layer.

    Attributes:
        format, combine_dtype: of the communicator; parameters have ``combine_dtype`` too.
        shared: "" for no shared expert, "overlapped" or "fused".
        router: a name in :data:`ROUTERS`.
        experts, topk, inner: sizes.
        width: hidden size, or None for one that suits the format.
        host_counts: the layer's option.
        options: further arguments of ``moelink.init``.
    """

    format: str = "fp64"
    combine_dtype: torch.dtype = torch.float64
    shared: str = ""
    router: str = "softmax"
    experts: int = EXPERTS
    topk: int = TOPK
    inner: int = INNER
    width: int | None = None
    host_counts: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def id(self) -> str:
        return "-".join(filter(None, [self.format, self.shared, self.router, *(f"{k}={v}" for k, v in self.options)]))

    @property
    def hidden(self) -> int:
        quantised = self.format in ("fp8_block128", "mxfp8", "mxfp4", "nvfp4")
        return self.width or (128 if quantised else 16)

    @property
    def fields(self) -> dict[str, Any]:
        sizes = {
            "num_experts": self.experts, "topk": self.topk, "hidden_size": self.hidden,
            "max_tokens_per_rank": MAX_TOKENS, "dispatch_format": self.format, "combine_dtype": self.combine_dtype,
            "fused_shared_expert": self.shared == "fused",
        }  # fmt: skip
        return {**sizes, **dict(self.options)}

    def make(self, ep: moelink.Communicator, **changes: Any) -> MoE:
        """The layer on ``ep``, with a bias of the router that changes choices."""
        shared = None
        if self.shared == "overlapped":
            shared = GatedMLP(self.hidden, self.inner, seed=5, device=ep.device, dtype=self.combine_dtype)
        options = {
            "intermediate_size": self.inner,
            "router": ROUTERS[self.router],
            "shared_expert": shared,
            "seed": 5,
            "host_counts": self.host_counts,
        }
        layer = MoE(ep, **{**options, **changes})
        if layer.router.correction_bias is not None:
            layer.router.correction_bias.copy_(torch.linspace(-0.2, 0.2, self.experts))
        return layer

    def inputs(self, rank: int) -> tuple[Tensor, Tensor]:
        """Tokens of ``rank`` and the gradient of their results."""
        generator = torch.Generator().manual_seed(rank)
        x, grad = torch.randn(2, TOKENS[rank % 4], self.hidden, generator=generator, dtype=torch.float64)
        return x.to(self.combine_dtype), grad.to(self.combine_dtype)


def train(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Entry point of a rank: result, gradients (replicated ones summed), first weights and load of every case."""
    results = []
    for case in cases:
        with moelink.init(**case.fields, timeout=60) as ep:
            layer = case.make(ep)
            x, grad = (tensor.to(ep.device) for tensor in case.inputs(rank))
            x.requires_grad_()
            out = layer(x)
            out.backward(grad)
            all_reduce_gradients(layer)
            grads = {name: parameter.grad.cpu() for name, parameter in layer.named_parameters()}
            results.append(
                {
                    "out": out.detach().cpu(), "x": x.grad.cpu(), "grads": grads, "stats": layer.stats(),
                    "state": {name: value.cpu() for name, value in layer.state_dict().items()},
                }
            )  # fmt: skip
    return results


def dense(case: Case, x: Tensor, state: dict[str, Tensor], *, rounded: Tensor | None = None) -> Tensor:
    """The layer over tokens ``x`` from a full state_dict, expert by expert, without moelink. Differentiable.

    ``rounded``: what experts are given in place of ``x``.
    """
    routing = route(
        x @ state["router.weight"].T, ROUTERS[case.router], topk=case.topk,
        correction_bias=state.get("router.correction_bias"),
    )  # fmt: skip
    rows = x if rounded is None else rounded
    shared = int(case.shared == "fused")
    out = torch.zeros_like(x)
    for expert in range(case.experts):
        weight = (routing.topk_weights * (routing.topk_ids == expert)).sum(1, keepdim=True)
        y = gated(rows, state["experts.gate_up_proj"][expert + shared], state["experts.down_proj"][expert + shared])
        out = out + weight * y
    if shared:
        out = out + gated(rows, state["experts.gate_up_proj"][0], state["experts.down_proj"][0])
    if case.shared == "overlapped":
        out = out + gated(x, state["shared_expert.gate_up_proj"], state["shared_expert.down_proj"])
    return out


def gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.T


def model_of(case: Case) -> MoE:
    """The layer as one rank makes it, on the CPU; its communicator is closed."""
    with moelink.init(**{**case.fields, "transport": "collective", "device": "cpu"}) as ep:
        return case.make(ep)


def first_state(case: Case) -> dict[str, Tensor]:
    """The full state_dict of that layer."""
    return model_of(case).state_dict()


def judge_training(case: Case, results: list[dict[str, Any]]) -> None:
    """Compare what ranks got from :func:`train` with one process that had all tokens."""
    world, model, dtype = len(results), model_of(case), case.combine_dtype
    full = model.state_dict()
    merged = merge_state_dicts(model, [result["state"] for result in results])
    assert merged.keys() == full.keys()
    for name, value in full.items():
        assert_bitwise_equal(merged[name], value, f"first {name}")
    inputs = [case.inputs(rank) for rank in range(world)]
    x = torch.cat([x for x, _ in inputs]).double().requires_grad_()
    grad = torch.cat([grad for _, grad in inputs]).double()
    state = {name: value.double().requires_grad_(name != "router.correction_bias") for name, value in full.items()}
    out = dense(case, x, state)
    out.backward(grad)
    close(torch.cat([result["out"] for result in results]), out.detach(), dtype, "out")
    close(torch.cat([result["x"] for result in results]), x.grad, dtype, "x.grad", roundings=128)
    grads = merge_state_dicts(model, [result["grads"] for result in results])
    for name in grads:
        for rank, result in enumerate(results):
            if not name.startswith("experts."):
                assert_bitwise_equal(result["grads"][name], grads[name], f"{name} on rank {rank}")
            elif case.shared == "fused":
                assert_bitwise_equal(result["grads"][name][0], grads[name][0], f"shared {name} on rank {rank}")
        close(grads[name], state[name].grad, dtype, name, roundings=256)
    assert sum(sum(result["stats"].tokens_per_expert) for result in results) == len(x) * case.topk


def judge_rounded(case: Case, results: list[dict[str, Any]]) -> None:
    """Compare results of :func:`train` with the layer whose experts get dequantised rows."""
    fmt = moelink.get_format(case.format)
    x = torch.cat([case.inputs(rank)[0] for rank in range(len(results))])
    state = {name: value.double() for name, value in first_state(case).items()}
    want = dense(case, x.double(), state, rounded=rounded(case, x))
    got = torch.cat([result["out"] for result in results])
    close(got, want, case.combine_dtype, case.id, roundings=16)
    assert all(bool(grad.isfinite().all()) for result in results for grad in result["grads"].values())
    if fmt.scale_dtype is not None:
        exact = dense(case, x.double(), state)
        assert float((got.double() - want).abs().max()) < float((exact - want).abs().max()), "rounding is seen"


def rounded(case: Case, x: Tensor) -> Tensor:
    """What experts are given of tokens ``x``, in fp64."""
    fmt = moelink.get_format(case.format)
    quantized = fmt.quantize(x)
    return fmt.dequantize(quantized.payload, quantized.scales).to(case.combine_dtype).double()


def close(got: Tensor, want: Tensor, dtype: torch.dtype, what: str, *, roundings: float = 32) -> None:
    """Equal within ``roundings`` half ulps of ``dtype`` at the largest value."""
    assert got.shape == want.shape, what
    largest = float(want.abs().max()) if want.numel() else 0.0
    error = float((got.double().cpu() - want).abs().max()) if want.numel() else 0.0
    assert error <= roundings * torch.finfo(dtype).eps / 2 * largest, f"{what}: off by {error} of {largest}"
