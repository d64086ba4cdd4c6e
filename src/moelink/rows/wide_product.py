"""The product of rows and a weight with fp32 sums, in which bf16 numbers stay as they are: the logits of a router.

A product of two bf16 numbers is exact in fp32. So tensor cores that sum these in fp32 give what a product of converted
numbers gives, but for the order of the sum. Torch has this as ``torch.mm(..., out_dtype=torch.float32)`` since 2.8,
for CUDA and without a gradient. Here it is an operator whose gradient is computed from numbers converted to fp32.

Few rows (:func:`has_few_logits`) are multiplied by a kernel (:mod:`moelink.rows.wide_product_kernel`) in one launch;
the library's product of so few may take two. Calls with gradients and without, and compiled ones, take the same.
The order of a sum, and so its last bits, depends on the number of rows, as with the library.

The library's is for bf16 rows and weights on NVIDIA GPUs from compute capability 8.0 on, the kernel for AMD's as well.
All other numbers are converted to fp32 (fp64 for fp64 rows) and then multiplied: fp16, since
``torch.backends.cuda.matmul.allow_fp16_accumulation`` may take it at its word; and an fp32 weight of bf16 rows, of
which bf16 would keep 8 of 24 bits.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moelink.errors import ArgumentError
from moelink.rows import eager
from moelink.tuning import FEW_LOGITS, FEW_PRODUCTS


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [R, K] times the transposed ``weight`` [N, K]: [R, N] fp32, fp64 if ``x`` is fp64. Differentiable.

    >>> x, weight = torch.tensor([[1.0, 2.0**-8]]).bfloat16(), torch.ones(1, 2).bfloat16()
    >>> wide_product(x, weight).item()    # bf16 would round it to 1
    1.00390625
    """
    if eager.takes_kernels(x) and x.dtype == weight.dtype == torch.bfloat16:
        return eager.run(torch.ops.moelink.wide_product, _product, _Product, x, weight)  # type: ignore[no-any-return]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return functional.linear(x.to(dtype), weight.to(dtype))


@cache  # torch looks at the driver's state, and for the device's number, at each question
def has_wide_sums(device: torch.device) -> bool:
    """Return whether torch multiplies bf16 numbers into fp32 on ``device``."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def has_few_logits(rows: int, weight: Tensor) -> bool:
    """Return whether the kernel multiplies so many rows and ``weight`` [N, K]."""
    return 0 < rows <= FEW_LOGITS and rows * weight.shape[0] * weight.shape[1] <= FEW_PRODUCTS


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if eager.takes_kernels(x) and has_few_logits(x.shape[0], weight):
        return eager.repeated((x.contiguous(), weight.contiguous()), by_kernel)[0]
    if has_wide_sums(x.device):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())


def by_kernel(x: Tensor, weight: Tensor) -> tuple[tuple[Tensor], tuple[()]]:
    """Launch the kernel for contiguous tensors: a function on rows (:func:`moelink.rows.eager.repeated`)."""
    from moelink.rows.wide_product_kernel import launch

    if weight.device != x.device:  # a kernel would read memory that it cannot
        raise ArgumentError("weight", f"a tensor on {x.device}, as x is", weight.device)
    out = _product_fake(x, weight)
    launch(x, weight, out)
    return (out,), ()


def _product_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    wants_x, wants_weight = ctx.needs_input_grad
    kind = grad.device.type
    # To enter a context takes longer than a product.
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        dx = (grad @ weight.float()).to(x.dtype) if wants_x else None
        dweight = (grad.t() @ x.float()).to(weight.dtype) if wants_weight else None
    return dx, dweight


_Product = eager.function_of(_product, _save, _backward)
_operator = torch.library.custom_op("moelink::wide_product", _product, mutates_args=())
_operator.register_fake(_product_fake)
_operator.register_autograd(_backward, setup_context=_save)
