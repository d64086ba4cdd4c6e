"""Make a layer's launches on rows outside of calls, so that their kernels can be prepared.

A layer's work between its router and combine is done here in tensors of the sizes of a call whose groups are empty. So
products of torch, which really run, have nothing to do, and the choice of a product by the likely rows is that of a
call.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.nn.experts import known_max_tokens, likely_rows
from moelink.nn.placed_experts import Experts, QuantizedExperts
from moelink.nn.router import Router
from moelink.output import DispatchHandle, DispatchOutput, OutputShape
from moelink.rows.dequantize import dequantized
from moelink.rows.scale_rows import cast_rows, row_gradients
from moelink.tuning import FEW_LOGITS, FEW_PRODUCTS, FEW_ROWS, ROWS_OF_MXFP4


class Layer(Protocol):
    """The parts of a layer that launch kernels on rows."""

    router: Router
    experts: Experts | QuantizedExperts


def rehearse(layer: Layer, config: EPConfig, bounds: tuple[int, ...], *, training: bool, load: bool) -> None:
    """Make the launches of calls with rows of ``max_tokens`` tokens, for each of ``bounds``, while they only prepare
    (a :class:`moelink.transports.ahead.Step`). ``training``: and those of the backward, in this thread."""
    from moelink.kernels.launch.row_launch import row_launcher

    device = layer.router.weight.device
    with (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        row_launcher().preparing(load=load),
        torch.set_grad_enabled(training),
        torch.autograd.set_multithreading_enabled(False),
    ):
        for bound in sorted({*bounds, *_by_rows(config, max(bounds), layer.experts)}):
            _call(layer, config, bound, training=training)
        for count in _few_logits(layer.router.weight):
            layer.router(_tokens(layer, config, count, training=training))


def _few_logits(weight: torch.Tensor) -> set[int]:
    """Return numbers of tokens whose logits have, together, all forms of their kernel, with a router's ``weight``."""
    most = min(FEW_LOGITS, FEW_PRODUCTS // weight.numel())
    return {1 << power for power in range(most.bit_length())} | {most} - {0}


def _by_rows(config: EPConfig, most: int, experts: Experts | QuantizedExperts) -> set[int]:
    """Return, for each number of rows at which a product takes other tiles, or the activation other steps, the most
    tokens of calls that are likely to have no more. Calls have smaller buffers than those of ``most`` tokens if this
    rank knows the tokens of all ranks."""
    from moelink.rows.activation_kernel import rows_of_short_steps

    if known_max_tokens(config, most) is None:
        return set()
    edges = [
        rows_of_short_steps(experts.down_proj.device, experts.sizes[2]),
        *(mean * config.num_groups for mean, _ in (*FEW_ROWS, *ROWS_OF_MXFP4)),
    ]

    rows_of = partial(likely_rows, config)
    return {bisect_right(range(most), edge, key=rows_of) - 1 for edge in edges} - {-1, 0}


def _call(layer: Layer, config: EPConfig, bound: int, *, training: bool) -> None:
    routing = layer.router(_tokens(layer, config, bound, training=training))
    ids = routing.topk_ids  # which are undefined, as their kernel only prepares; nothing here reads them
    recv = received(config, bound, ids, training=training)
    experts = layer.experts
    if isinstance(experts, QuantizedExperts):
        y = experts(recv.tokens, recv.scales, recv.row_offsets, likely_rows=likely_rows(config, bound))
    else:
        rows = dequantized(recv, config, dtype=experts.down_proj.dtype)
        y = experts(rows, recv.row_offsets)
    out = cast_rows(y, recv.row_offsets, config.combine_dtype)
    if not training:
        return
    grad = torch.zeros(1, config.hidden_size, dtype=out.dtype, device=out.device).expand_as(out).contiguous()
    dy, _ = row_gradients(grad, recv.row_offsets, y=out.detach(), weights=recv.weights, dtype=out.dtype)
    arrived = recv.tokens if recv.handle.carrier is None else recv.handle.carrier
    learned = [each for each in experts.parameters() if each.requires_grad]
    found = torch.autograd.grad(out, [arrived, *learned], dy)
    torch.autograd.grad(routing.topk_weights, routing.logits, torch.zeros_like(routing.topk_weights))
    cast_rows(found[0], recv.row_offsets, config.combine_dtype)


def _tokens(layer: Layer, config: EPConfig, count: int, *, training: bool) -> Tensor:
    shape, device = (count, config.hidden_size), layer.router.weight.device
    return torch.zeros(shape, dtype=config.combine_dtype, device=device, requires_grad=training)


def received(config: EPConfig, bound: int, ids: Tensor, *, training: bool) -> DispatchOutput:
    """Return an output of dispatch with room for the rows of ``bound`` tokens of every rank, and none in it."""
    device, rows = ids.device, config.output_rows(bound)
    counts = torch.zeros(config.num_local_experts, config.world_size, dtype=torch.int32, device=device)
    carrier = None
    if training and config.format.scale_dtype is not None:
        zero = torch.zeros(1, 1, dtype=config.combine_dtype, device=device)
        carrier = zero.expand(rows, config.hidden_size).requires_grad_()
    handle = DispatchHandle("", config.rank, len(ids), ids, None, counts, None, carrier=carrier)
    recv = OutputShape.of(config, rows=rows, weighted=True).allocate(handle, device)
    for name in ("row_offsets", "scales_offsets"):
        if (tensor := getattr(recv, name)) is not None:
            tensor.zero_()
    if training and carrier is None:
        recv.tokens.requires_grad_()
    return recv
