"""Products and a sigmoid that give a row the same bits beside any other rows.

Libraries choose the kernel of a product, and so the order of its sums, by the number of rows. :func:`multiply` always
multiplies ``BLOCK_ROWS`` rows, of which the last block fills up. Places in a block can still differ: MKL, for one, sums
the rows of [32, 18] x [18, 10] in several orders, as it does with an inner size that is no multiple of 8 and few
columns. So products of a new shape are tried on equal rows, and refused if these differ.

Torch's sigmoid on CPUs has other bits at the end of a tensor than inside it. :func:`sigmoid` takes the exponential of
:mod:`moelink.rows.activation`, made of operations that IEEE 754 rounds in one way.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moelink.errors import UnsupportedError
from moelink.rows.activation import exp

BLOCK_ROWS = 32
"""Rows of every product."""


def multiply(rows: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Fill ``out`` [R, N] with ``rows`` [R, K] times ``matrix`` [K, N], all of one dtype. On CPUs the product of
    narrower numbers is computed in fp32 and rounded once.

    Raises:
        UnsupportedError: as :func:`refuse_weight`.
    """
    refuse_weight((matrix if matrix.is_contiguous() else matrix.t()).shape, matrix.dtype, matrix.device)
    matrix = matrix.to(_dtype_of_product(matrix.dtype, matrix.device))
    # A block has one alignment, which the rows of a tensor have not. Autocast leaves products with out= alone.
    block, product = (matrix.new_zeros(BLOCK_ROWS, columns) for columns in matrix.shape)
    for part, into in zip(rows.split(BLOCK_ROWS), out.split(BLOCK_ROWS), strict=True):
        block[: len(part)] = part
        torch.mm(block, matrix, out=product)
        into.copy_(product[: len(part)])


def refuse_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a weight of ``shape`` [N, K] if the place of a row changes the bits of its product with the weight or with
    the weight's transpose.

    Raises:
        UnsupportedError: it does on this device.
    """
    if torch.compiler.is_compiling():
        return  # compiled code has the product in an operator, which asks again
    if not _places_agree(tuple(shape), _dtype_of_product(dtype, device), device):
        raise UnsupportedError(
            "batch_invariant: expected products whose bits do not depend on the place of a row, got a weight of "
            f"{list(shape)} on {device} with other ones; make its sizes multiples of 16, or leave batch_invariant out"
        )


def _dtype_of_product(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


@cache
def _places_agree(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        weight = torch.randn(shape, generator=generator, device="cpu").to(device, dtype)
        for matrix in (weight.t(), weight):
            row = torch.randn(1, matrix.shape[0], generator=generator, device="cpu").to(device, dtype)
            out = matrix.new_empty(BLOCK_ROWS, matrix.shape[1])
            torch.mm(row.expand(BLOCK_ROWS, -1).contiguous(), matrix, out=out)
            if not torch.equal(out, out[:1].expand_as(out)):
                return False
    return True


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = 1.0 / (exp(-x) + 1.0)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return grad * result * (1.0 - result)  # type: ignore[no-any-return]


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid of fp32, differentiable.

    >>> sigmoid(torch.tensor([0.0, 100.0]))
    tensor([0.5000, 1.0000])
    """
    return _Sigmoid.apply(x)  # type: ignore[no-any-return, no-untyped-call]
