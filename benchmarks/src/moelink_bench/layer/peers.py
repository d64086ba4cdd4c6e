"""The layer without moelink: transformers', those made of torch and an all-to-all or of FlashInfer's, and DeepGEMM's.

DeepGEMM is the package ``deep_gemm`` of ``sgl-deep-gemm``, whose kernel ``fp8_mega_moe`` is dispatch, both products,
the activation and combine in one launch. :class:`DeepGemmProducts` takes its grouped products alone, with moelink's
dispatch and combine. In fp8, contenders have the weights and the scales of moelink's, but for those that say otherwise.

Legend: ``T`` tokens, ``K`` topk, ``H`` hidden_size, ``W`` ranks, ``G`` experts of a rank.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moelink.arith import ceil_div
from moelink.formats import get_format
from moelink.nn.block_quantized import BLOCK, BlockQuantized, launch_kernel, quantize_weight
from moelink.nn.experts import group_of_rows
from moelink.nn.placed_experts import QuantizedExperts
from moelink.routing import ExpertMap
from moelink_bench.exchange import Exchange, count_ids, starts
from moelink_bench.layer.contenders import (
    PEER_ROUNDINGS,
    ROUTE,
    LayerContender,
    MoelinkLayer,
    Part,
    Routed,
    Rows,
    Setting,
    expert_parts,
    fp8_expert_parts,
    quantized_weights,
    require,
)
from moelink_bench.layer.data import LayerInput, choose
from moelink_bench.peers import flashinfer_refusal, open_flashinfer

TRANSFORMERS = "transformers grouped_mm"
EXCHANGE = "sort + all-to-all"
EXCHANGE_FP8 = "sort + all-to-all fp8"
FLASHINFER_LAYER = "FlashInfer one-sided"
FLASHINFER_FP8 = "FlashInfer one-sided fp8"
DEEP_GEMM = "DeepGEMM fused"
DEEP_GEMM_PRODUCTS = "DeepGEMM products"
IN_FP8 = (EXCHANGE_FP8, FLASHINFER_FP8, DEEP_GEMM, DEEP_GEMM_PRODUCTS)
"""Contenders with experts in fp8."""


def deep_gemm_refusal(*names: str) -> str:
    """Return why DeepGEMM's functions of these names cannot be measured here, and what to do; "" if they can."""
    if importlib.util.find_spec("deep_gemm") is None:
        return "expected package deep_gemm, got none; run pip install sgl-deep-gemm, a release built for this torch"
    if torch.cuda.get_device_capability()[0] != 9:
        return "runs on devices of compute capability 9.0 only"
    try:
        lacks = [name for name in names if not hasattr(importlib.import_module("deep_gemm"), name)]
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # bound to another torch, or no nvcc
        return f"deep_gemm does not load: {error}"[:300]
    return f"expected deep_gemm with {', '.join(lacks)}, got one without; install sgl-deep-gemm" if lacks else ""


class TransformersLayer(LayerContender):
    """The experts of Hugging Face transformers with its implementation "grouped_mm", its own function.

    Attributes:
        experts: the module that it makes.
    """

    name = TRANSFORMERS
    note = "transformers' own function, products and activation included; its weights are bf16, as models pass them"

    def __init__(self, at: Setting) -> None:
        """Find the function. Raises UnsupportedError where it cannot run."""
        require(at.plan.ranks == 1, "runs on one rank only")
        require(importlib.util.find_spec("transformers") is not None, "transformers is not installed")
        module = importlib.import_module("transformers.integrations.moe")
        self.experts = _experts(module, at)

    def layer(self, given: LayerInput) -> Tensor:
        routing = choose(given)
        out: Tensor = self.experts(given.x, routing.topk_ids, routing.topk_weights.to(given.x.dtype))
        return out

    def parts(self) -> tuple[Part, ...]:
        """None: it is one function."""
        return ()


def _experts(module: Any, at: Setting) -> torch.nn.Module:
    """The module that transformers makes of a class with stacked weights."""

    @module.use_experts_implementation  # type: ignore[untyped-decorator]
    class Experts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = config.num_experts
            self.act_fn = functional.silu
            self.gate_up_proj = torch.nn.Parameter(at.weights.gate_up, requires_grad=False)
            self.down_proj = torch.nn.Parameter(at.weights.down, requires_grad=False)

        def forward(self, *args: Any) -> Tensor:
            raise AssertionError("transformers calls the implementation that the configuration names")

    return Experts(SimpleNamespace(num_experts=at.shape.num_experts, _experts_implementation="grouped_mm"))  # type: ignore[no-any-return]


class ExchangeLayer(LayerContender):
    """Sort by expert, all-to-all of a copy per expert, the products, all-to-all back, sum: torch alone."""

    name = EXCHANGE

    def __init__(self, at: Setting) -> None:
        """Remember the sizes."""
        self._weights = at.weights
        self._exchange = Exchange(
            num_experts=at.shape.num_experts, topk=at.shape.topk, rank=at.rank, world_size=at.plan.ranks
        )
        self.capturable = at.plan.ranks == 1 and at.device.type == "cuda"
        backend = "NCCL" if at.device.type == "cuda" else "gloo"
        waits = f"{backend}; the host waits for the counts"
        self.note = "nothing to exchange on one rank" if at.plan.ranks == 1 else waits

    def parts(self) -> tuple[Part, ...]:
        return (
            ROUTE,
            Part("dispatch", self._dispatch),
            *self._expert_parts(),
            Part("combine", lambda at: self._exchange.combine(at.rows, at.home)),
        )

    def _expert_parts(self) -> tuple[Part, ...]:
        return expert_parts(self._weights)

    def _dispatch(self, at: Routed) -> Rows:
        return Rows(*self._exchange.dispatch(at.x, at.routing.topk_ids, at.routing.topk_weights))


class ExchangeFp8Layer(ExchangeLayer):
    """The same with torch's grouped product of fp8, which takes one scale a row and one a column of a weight."""

    name, fp8_experts = EXCHANGE_FP8, True
    tolerance = 3 * 2.0**-4
    """Rows and weights are rounded with fewer scales than those of the truth: one for 7168 values in place of 128."""

    def __init__(self, at: Setting) -> None:
        """Quantise the weights. Raises UnsupportedError where torch has no such product."""
        require(at.plan.device == "cuda", "runs on CUDA devices only")
        require(torch.cuda.get_device_capability()[0] == 9, "runs on devices of compute capability 9.0 only")
        super().__init__(at)
        self.note += "; rows travel in bf16; one scale a row, by a function that torch.compile compiles"
        self._quantized = [quantize_rows(weight) for weight in (at.weights.gate_up, at.weights.down)]
        self._quantize = torch.compile(quantize_rows, dynamic=True)
        self._gate = torch.compile(_gate_and_quantize_rows, dynamic=True)

    def _expert_parts(self) -> tuple[Part, ...]:
        def product(name: str, codes: Tensor, scales: Tensor) -> Part:
            def run(at: Rows) -> Rows:
                assert at.scales is not None
                out = torch._scaled_grouped_mm(
                    at.rows, codes.transpose(1, 2), at.scales, scales[..., 0], offs=at.offsets[1:],
                    out_dtype=torch.bfloat16, use_fast_accum=True,
                )  # fmt: skip
                return Rows(out, at.offsets, at.home)

            return Part(name, run)

        return (
            Part("convert", functools.partial(_with_codes, self._quantize)),
            product("product 1", *self._quantized[0]),
            Part("activation", functools.partial(_with_codes, self._gate)),
            product("product 2", *self._quantized[1]),
        )


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [..., n] in fp8, and their scales [..., 1] fp32: one a row.

    >>> codes, scales = quantize_rows(torch.tensor([[448.0, 1.0], [0.0, -896.0]]))
    >>> codes.tolist(), scales.tolist()
    ([[448.0, 1.0], [0.0, -448.0]], [[1.0], [2.0]])
    """
    scales = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448.0
    return (rows.float() / scales).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scales


def _gate_and_quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = rows.chunk(2, dim=-1)
    return quantize_rows(functional.silu(gate.float()) * up.float())


def _with_codes(quantize: Any, at: Rows) -> Rows:
    codes, scales = quantize(at.rows)
    return Rows(codes, at.offsets, at.home, scales[:, 0])


class FlashInferLayer(LayerContender):
    """FlashInfer's one-sided all-to-all, with the products over all rows that could have come.

    Its rows stay where they arrive, by source rank. So that nothing waits for the host, the permutation by expert and
    the sum of a token's experts cover [W * T, K] slots, of which those for experts of this rank count.
    """

    name = FLASHINFER_LAYER
    note = "one all-to-all sized for the most tokens; the permutation and the sum before combine are torch's"

    def __init__(self, at: Setting) -> None:
        """Set up FlashInfer. Collective. Raises UnsupportedError where it is not installed."""
        require(at.plan.device == "cuda", "runs on CUDA devices only")
        require(not flashinfer_refusal(), flashinfer_refusal())
        self._moe = open_flashinfer(
            rank=at.rank, world_size=at.plan.ranks, max_tokens=at.max_tokens, topk=at.shape.topk,
            num_experts=at.shape.num_experts, hidden_size=at.shape.hidden_size,
        )  # fmt: skip
        self._shape, self._weights, self._ranks = at.shape, at.weights, at.plan.ranks
        experts = ExpertMap(at.shape.num_experts, at.plan.ranks)
        self._first, self._local = experts.first(at.rank), experts.num_local(at.rank)

    def parts(self) -> tuple[Part, ...]:
        return (
            ROUTE,
            Part("dispatch", self._dispatch),
            Part("convert", self._permute),
            *self._expert_parts(),
            Part("combine", self._combine),
        )

    def _expert_parts(self) -> tuple[Part, ...]:
        return expert_parts(self._weights)

    def _payload(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def _dispatch(self, at: Routed) -> list[Tensor]:
        ids, payload = at.routing.topk_ids, self._payload(at.x)
        arrived: list[Tensor] = self._moe.dispatch(
            ids, [*payload, ids, at.routing.topk_weights], len(at.x), invalid_token_expert_id=-1,
            expert_id_payload_index=len(payload),
        )  # fmt: skip
        return arrived

    def _permute(self, arrived: list[Tensor]) -> Rows:
        x, *scales, ids, weights = arrived
        local = ids.flatten() - self._first
        mine = (local >= 0) & (local < self._local)
        groups, order = local.where(mine, self._local).sort(stable=True)
        offsets = starts(count_ids(groups, self._local + 1)[: self._local])
        rows, *row_scales = (each.reshape(-1, each.shape[-1])[order // self._shape.topk] for each in (x, *scales))
        home = (*x.shape[:2], self._shape.hidden_size), order, mine, weights.flatten()
        if not row_scales:
            return Rows(rows, offsets, home)
        return Rows(rows.view(torch.float8_e4m3fn), offsets, home, row_scales[0].t().contiguous())

    def _combine(self, at: Rows) -> Tensor:
        (ranks, tokens, hidden), order, mine, weights = at.home
        ready = self._moe.get_combine_payload_tensor_in_workspace(tokens, hidden, torch.bfloat16)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order), device=order.device)
        # Rows behind the last group are undefined, and so may be their products with a weight of zero.
        rows = at.rows[slots].masked_fill_(~mine[:, None], 0)
        rows.mul_(weights.masked_fill(~mine, 0).to(rows.dtype)[:, None])
        ready.view(ranks * tokens, hidden).copy_(rows.view(ranks * tokens, -1, hidden).sum(1))
        out: Tensor = self._moe.combine(ready.view(ranks, tokens, hidden), tokens, payload_in_workspace=True)
        return out


class FlashInferFp8Layer(FlashInferLayer):
    """The same with rows in fp8 on the way to the experts, and moelink's products in fp8."""

    name, fmt, fp8_experts, tolerance = FLASHINFER_FP8, "fp8_block128", True, PEER_ROUNDINGS
    note = f"{FlashInferLayer.note}; a function that torch.compile compiles quantises tokens"

    def __init__(self, at: Setting) -> None:
        """Quantise the weights. Otherwise as :class:`FlashInferLayer`."""
        super().__init__(at)
        self._quantized = quantize_weight(at.weights.gate_up), quantize_weight(at.weights.down)
        self._quantize = torch.compile(quantize_blocks, dynamic=True)

    def _payload(self, x: Tensor) -> tuple[Tensor, ...]:
        codes, scales = self._quantize(x)
        return codes.view(torch.uint8), scales

    def _expert_parts(self) -> tuple[Part, ...]:
        def multiplied(rows: Tensor, *given: Any) -> None:
            launch_kernel(rows, *given, likely_rows=ceil_div(len(rows), self._ranks))

        return fp8_expert_parts(multiplied, *self._quantized)


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` [T, H] in format fp8_block128, with scales [T, H / 128]."""
    made = get_format("fp8_block128").quantize(x)
    assert made.scales is not None
    return made.payload, made.scales.contiguous()


class DeepGemmLayer(LayerContender):
    """DeepGEMM's fused kernel, and the launch before it that quantises tokens into its buffer."""

    name, fmt, fp8_experts, tolerance = DEEP_GEMM, "fp8_block128", True, PEER_ROUNDINGS
    note = "dispatch, experts and combine in one launch, after one that quantises tokens"

    def __init__(self, at: Setting) -> None:
        """Lay out the weights and the buffer. Collective. Raises UnsupportedError where the kernel cannot run."""
        require(at.plan.device == "cuda", "runs on CUDA devices only")
        refusal = deep_gemm_refusal("fp8_mega_moe", "mega_moe_pre_dispatch_sm90", "transform_weights_for_mega_moe_sm90")
        require(not refusal, refusal)
        require(at.shape.num_experts % at.plan.ranks == 0, f"needs a multiple of {at.plan.ranks} experts")
        self._library: Any = importlib.import_module("deep_gemm")
        made = (quantize_weight(weight) for weight in (at.weights.gate_up, at.weights.down))
        self._gate_up, self._down = self._library.transform_weights_for_mega_moe_sm90(
            *((each.codes, each.scales) for each in made)
        )
        self._buffer = self._library.get_symm_buffer_for_mega_moe(
            dist.group.WORLD, at.shape.num_experts, at.max_tokens, at.shape.topk, at.shape.hidden_size,
            at.shape.intermediate_size,
        )  # fmt: skip

    def layer(self, given: LayerInput) -> Tensor:
        routing, buffer = choose(given), self._buffer
        self._library.mega_moe_pre_dispatch_sm90(
            given.x, routing.topk_ids, routing.topk_weights, buffer.x, buffer.x_sf, buffer.topk_idx,
            buffer.topk_weights, num_tokens=len(given.x),
        )  # fmt: skip
        out = torch.empty_like(given.x)
        self._library.fp8_mega_moe(out, self._gate_up, self._down, buffer)
        return out

    def parts(self) -> tuple[Part, ...]:
        """None: it is one kernel."""
        return ()

    def close(self) -> None:
        self._buffer.destroy()


class DeepGemmProducts(MoelinkLayer):
    """moelink's dispatch and combine, with groups of multiples of 128 rows, and DeepGEMM's grouped products."""

    def __init__(self, at: Setting) -> None:
        """Open a communicator. Collective. Raises UnsupportedError where DeepGEMM cannot run."""
        require(at.plan.device == "cuda", "runs on CUDA devices only")
        refusal = deep_gemm_refusal("m_grouped_fp8_gemm_nt_contiguous")
        require(not refusal, refusal)
        super().__init__(
            at.shape, at.weights, fmt="fp8_block128", max_tokens=at.max_tokens, device=at.device, timeout=at.timeout,
            expert_alignment=BLOCK,
        )  # fmt: skip
        self.name = DEEP_GEMM_PRODUCTS
        self.note = "moelink's dispatch and combine, and DeepGEMM's contiguous products over all rows of the buffer"
        self._library: Any = importlib.import_module("deep_gemm")

    def layer(self, given: LayerInput) -> Tensor:
        return LayerContender.layer(self, given)

    def _expert_parts(self) -> tuple[Part, ...]:
        experts = self.moe.experts
        assert isinstance(experts, QuantizedExperts)
        return fp8_expert_parts(self._multiply, *quantized_weights(experts))

    def _multiply(self, codes: Tensor, scales: Tensor, offsets: Tensor, weight: BlockQuantized, out: Tensor) -> None:
        self._library.m_grouped_fp8_gemm_nt_contiguous(
            (codes, scales.t()), (weight.codes, weight.scales), out, group_of_rows(offsets, len(out))
        )
