"""Ready epilogues for ``combine``: hooks that take the sums before rounding and store them themselves.

>>> import moelink
>>> from moelink import epilogues
>>> x, ids = torch.tensor([[1.0, 2.0]]), torch.tensor([[0]])
>>> with moelink.init(num_experts=1, topk=1, hidden_size=2, max_tokens_per_rank=1, dispatch_format="fp32",
...                   combine_dtype=torch.float32) as ep:
...     recv = ep.dispatch(x, ids)
...     ep.combine(recv.tokens, recv, epilogue=epilogues.bias(torch.tensor([10.0, 20.0]), out=torch.empty(1, 2)))
tensor([[11., 22.]])

A hook belongs to its tensors: make it once, give it to every combine that is to fill them. ``out`` must have a row for
every token of the call and may have more, which are left alone. It may be of any float dtype: sums are in fp32 (fp64
for combine_dtype fp64), terms are added in it, and one rounding to nearest even follows (fp64 sums go to a narrower
``out`` by way of fp32). NaN is 0x7fff in bf16. A plain tensor as ``epilogue`` adds too, but keeps combine's own dtype.

Twin and kernel give the same bits. docs/pytorch.md shows how to write one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moelink.arguments import check_tensor
from moelink.errors import ArgumentError, UnsupportedError
from moelink.formats import get_format
from moelink.formats.casts import to_bf16
from moelink.hooks import Hook

Check = Callable[[int, int, torch.device], None]
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_UNITS = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cast(out: Tensor) -> Hook:
    """Store the sums in the dtype of ``out`` [num_tokens, hidden_size], contiguous."""
    _check_out(out)
    return _hook("cast", _cast, out, check=_fits(out=out))


def bias(vector: Tensor, out: Tensor) -> Hook:
    """Add ``vector`` [hidden_size] to every token's sum and store in ``out`` [num_tokens, hidden_size], contiguous."""
    _check_out(out)
    check_tensor("vector", vector, shape=out.shape[1:], dtypes=_FLOATS, device=out.device)
    return _hook("bias", _bias, out, vector, check=_fits(out=out))


def residual(tensor: Tensor, out: Tensor) -> Hook:
    """Add a row of ``tensor`` to each token's sum and store in ``out``, which may be the same tensor.

    Both are [num_tokens, hidden_size], contiguous.
    """
    _check_out(out)
    check_tensor("tensor", tensor, shape=(None, out.shape[1]), dtypes=_FLOATS, device=out.device)
    return _hook("residual", _residual, out, tensor, check=_fits(out=out, tensor=tensor))


def block_quantize(
    format_name: str, payload_out: Tensor, scales_out: Tensor, *, input_scale: Tensor | None = None
) -> Hook:
    """Quantise the sums, in fp32, to ``payload_out`` and ``scales_out``; combine returns ``payload_out``.

    Args:
        format_name: "fp8_block128", "mxfp8", "mxfp4" or "nvfp4"; a registered format with scales works in torch only.
        payload_out: [num_tokens, payload_width] of the format's payload dtype, contiguous.
        scales_out: [num_tokens, hidden_size / group] of its scale dtype, row-major, contiguous.
        input_scale: fp32, one element: the global scale of nvfp4. None for 1.

    Raises:
        ArgumentError: an argument is not as above.
        UnsupportedError: a format in which a scale is not an element of its own per group (fp8_block128_e8m0,
            fp8_token): combine stores a row in blocks of columns, which may divide what such a scale stands for.
    """
    fmt = get_format(format_name)
    if fmt.scale_dtype is None:
        raise ArgumentError("format_name", "a format with scales (cast() stores rows without)", repr(format_name))
    if fmt.scale_width(4 * fmt.group) != 4:
        raise UnsupportedError(
            f"format_name: expected a format with one element of scales per group, got {format_name!r}; call "
            f"get_format({format_name!r}).quantize on what combine returns"
        )
    if not isinstance(scales_out, Tensor) or scales_out.dim() != 2:
        raise ArgumentError("scales_out", "a tensor [num_tokens, hidden_size / group]", _shape(scales_out))
    shape = (scales_out.shape[0], fmt.payload_width(scales_out.shape[1] * fmt.group))
    device = scales_out.device
    check_tensor("payload_out", payload_out, shape=shape, dtypes=(fmt.payload_dtype,), device=device)
    check_tensor("scales_out", scales_out, shape=(None, None), dtypes=(fmt.scale_dtype,), device=device)
    extra: tuple[Tensor, ...] = ()
    if fmt.uses_input_scale:
        scale = torch.ones(1, device=device) if input_scale is None else input_scale
        extra = (check_tensor("input_scale", scale.reshape(-1), shape=(1,), dtypes=(torch.float32,), device=device),)
    elif input_scale is not None:
        raise ArgumentError("input_scale", f"None (format {fmt.name!r} has no global scale)", "a tensor")

    def quantize(tensors: tuple[Tensor, ...], token: Tensor, columns: Tensor, block: Tensor, mask: Tensor) -> None:
        payload, scales = tensors[:2]
        rows = fmt.quantize(block.to(torch.float32), tensors[3] if fmt.uses_input_scale else None)
        assert rows.scales is not None
        per_byte = block.shape[1] // rows.payload.shape[1]
        for out, value, step in ((payload, rows.payload, per_byte), (scales, rows.scales, fmt.group)):
            bits = _BITS[out.dtype.itemsize]
            _store(out.view(bits), token, columns[:, ::step] // step, value.view(bits), mask[:, ::step])

    bits = scales_out if scales_out.dtype == torch.float32 else scales_out.view(torch.uint8)
    tensors = (payload_out, bits, _width(payload_out), *extra)
    check = _fits(fmt.group, scales_out=scales_out)
    return Hook(_triton(lambda kernels: kernels.QUANTIZE.get(fmt.name)), quantize, tensors, check)


def _hook(name: str, torch_fn: Callable[..., None], out: Tensor, *more: Tensor, check: Check) -> Hook:
    return Hook(_triton(lambda kernels: getattr(kernels, name)), torch_fn, (out, _width(out), *more), check)


def _fits(elements: int = 1, **rows: Tensor) -> Check:
    """The check that each of ``rows`` [n, hidden_size / elements] has a row for every token, where combine runs."""

    def check(num_tokens: int, hidden_size: int, device: torch.device) -> None:
        for name, tensor in rows.items():
            if tensor.shape[0] < num_tokens or tensor.shape[1] * elements != hidden_size or tensor.device != device:
                wanted = f"at least {num_tokens} rows of {hidden_size // elements} on {device}"
                raise ArgumentError(f"epilogue.{name}", wanted, f"shape {list(tensor.shape)} on {tensor.device}")

    return check


def _triton(pick: Callable[[Any], Any]) -> Any:
    """A function of ``moelink.kernels.epilogues``, or None where triton is not installed (collective only)."""
    if importlib.util.find_spec("triton") is None:
        return None
    from moelink.kernels import epilogues

    return pick(epilogues)


def _width(rows: Tensor) -> Tensor:
    """The row width as ``kernels.epilogues.row_width`` reads it: int32 units of 16 elements, or int64 elements."""
    width = rows.shape[1]
    if width % _UNITS:
        return torch.tensor([width], dtype=torch.int64, device=rows.device)
    return torch.tensor([width // _UNITS], dtype=torch.int32, device=rows.device)


def _shape(value: object) -> object:
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _check_out(out: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise ArgumentError("out", "a tensor", type(out).__name__)
    check_tensor("out", out, shape=(None, None), dtypes=_FLOATS, device=out.device)


def _store(out: Tensor, token: Tensor, columns: Tensor, value: Tensor, mask: Tensor) -> None:
    """``out[token, columns] = value`` where ``mask``; columns of ``out`` only."""
    out[token, columns] = torch.where(mask, value, out[token, columns])


def _round(total: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        return total.to(dtype)
    total = total.to(torch.float32)
    return to_bf16(total) if dtype == torch.bfloat16 else total.to(dtype)


def _cast(tensors: tuple[Tensor, ...], token: Tensor, columns: Tensor, block: Tensor, mask: Tensor) -> None:
    out = tensors[0]
    _store(out, token, columns, _round(block, out.dtype), mask)


def _bias(tensors: tuple[Tensor, ...], token: Tensor, columns: Tensor, block: Tensor, mask: Tensor) -> None:
    _cast(tensors, token, columns, block + tensors[2][columns].to(block.dtype), mask)


def _residual(tensors: tuple[Tensor, ...], token: Tensor, columns: Tensor, block: Tensor, mask: Tensor) -> None:
    _cast(tensors, token, columns, block + tensors[2][token, columns].to(block.dtype), mask)
