"""Received rows become numbers: the kernel, interpreted and compiled, and the operator, against the formats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import moelink
from moelink import get_format
from moelink.kernels.launch.device import is_interpreted
from moelink.rows import dequantize_kernel as kernel
from moelink.rows.dequantize import _by_kernel

FORMATS = ("fp8_block128", "mxfp8", "nvfp4", "mxfp4", "fp8_block128_e8m0", "fp8_token")
HIDDEN = {
    "fp8_block128": 384, "mxfp8": 96, "nvfp4": 80, "mxfp4": 96, "fp8_block128_e8m0": 640, "fp8_token": 48,
}  # fmt: skip
SIZES = (3, 0, 130, 1, 12)
SPARE = 5
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
each_format = pytest.mark.parametrize("name", FORMATS)


def received(name: str, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Rows in a format as dispatch returns them, with spare capacity, and what they should become."""
    fmt, hidden = get_format(name), HIDDEN[name]
    sizes = torch.tensor(SIZES)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).int()
    count, scale = int(offsets[-1]), torch.tensor([3.5]) if fmt.uses_input_scale else None
    x = torch.randn(count, hidden, generator=torch.Generator().manual_seed(7)) * 20
    quantized = fmt.quantize(x, scale)
    layout = fmt.scale_layout
    assert layout is not None
    assert quantized.scales is not None
    scales = torch.zeros(layout.shape(count + SPARE, fmt.scale_width(hidden), len(SIZES)), dtype=fmt.scale_dtype)
    groups = torch.repeat_interleave(torch.arange(len(SIZES)), sizes)
    layout.scatter(scales, quantized.scales, rows=torch.arange(count), groups=groups, row_offsets=offsets)
    tokens = torch.zeros(count + SPARE, quantized.payload.shape[1], dtype=torch.uint8).view(quantized.payload.dtype)
    tokens[:count] = quantized.payload
    places = layout.scales_offsets(offsets)
    expected = fmt.dequantize(quantized.payload, quantized.scales, scale)
    tensors = (tokens, scales, offsets, places, scale, expected)
    return tuple(None if tensor is None else tensor.to(device) for tensor in tensors)  # type: ignore[return-value]


@pytest.mark.quick("each format has a layout and a device function of its own")
@pytest.mark.parametrize("device", DEVICES)
@each_format
def test_the_kernel_is_the_format(name: str, device: str) -> None:
    if (device == "cpu") != is_interpreted():
        pytest.skip("a process either interprets kernels, on CPUs, or compiles them (TRITON_INTERPRET)")
    tokens, scales, offsets, places, input_scale, expected = received(name, device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = torch.full((len(tokens), HIDDEN[name]), 7.0, dtype=dtype, device=device)
        kernel.launch(tokens, scales, offsets, places, input_scale, out, get_format(name))
        assert torch.equal(out[:-SPARE], expected.to(dtype))
        assert bool((out[-SPARE:] == 7).all()), "rows that do not exist are not written"


@pytest.mark.quick("each format has a layout and a device function of its own")
@pytest.mark.parametrize("device", DEVICES)
@each_format
def test_the_operator_is_the_format(name: str, device: str) -> None:
    tokens, scales, offsets, places, input_scale, expected = received(name, device)
    args = (tokens, scales, offsets, places, input_scale, name, HIDDEN[name], torch.float32)
    out = torch.ops.moelink.dequantize_rows(*args)
    assert out.shape == (len(tokens), HIDDEN[name])
    assert torch.equal(out[: len(expected)], expected)
    none = torch.ops.moelink.dequantize_rows(tokens, scales, offsets * 0, places, *args[4:])
    assert none.shape == out.shape


@pytest.mark.quick("each format has a device function of its own")
@pytest.mark.parametrize("device", DEVICES)
@each_format
def test_scales_by_row_as_layout_rank_has_them(name: str, device: str) -> None:
    fmt, hidden, count = get_format(name), HIDDEN[name], 11
    input_scale = torch.tensor([3.5]) if fmt.uses_input_scale else None
    x = torch.randn(count + SPARE, hidden, generator=torch.Generator().manual_seed(7)) * 20
    rows = fmt.quantize(x, input_scale)
    assert rows.scales is not None
    expected = fmt.dequantize(rows.payload, rows.scales, input_scale)[:count].to(device)
    tokens, scales = rows.payload.to(device), rows.scales.contiguous().to(device)
    input_scale = None if input_scale is None else input_scale.to(device)
    offsets = torch.tensor([0, 4, 4, count], dtype=torch.int32, device=device)
    args = (tokens, scales, offsets, None, input_scale, name, hidden)
    for dtype in (torch.float32, torch.float64):
        out = torch.ops.moelink.dequantize_rows(*args, dtype, by_row=True)
        assert torch.equal(out[:count], expected.to(dtype))
    if device == "cpu" and is_interpreted():
        out = torch.full((count + SPARE, hidden), 7.0)
        kernel.launch(tokens, scales, offsets, None, input_scale, out, fmt, by_row=True)
        assert torch.equal(out[:count], expected)
        assert bool((out[count:] == 7).all()), "rows that do not exist are not written"


@pytest.mark.quick("milliseconds, each another path")
@pytest.mark.parametrize("path", ["operator", "kernel"])
def test_rows_that_are_no_codes_are_refused(path: str) -> None:
    rows, offsets = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([0, 2], dtype=torch.int32)
    given = (rows, torch.ones(1, 2), offsets)
    call, absent = (torch.ops.moelink.dequantize_rows, None) if path == "operator" else (_by_kernel, False)
    with pytest.raises(moelink.ArgumentError, match=r"^payload: expected torch.float8_e4m3fn.*got torch.bfloat16"):
        call(*given, absent, absent, "fp8_block128", 128, torch.float32, False)


def test_the_example_of_the_kernel() -> None:
    codes = torch.zeros(4, 256)
    codes[1, :128], codes[1, 128:] = 2, 3
    scales = torch.ones(2, 4)
    scales[:, 1] = torch.tensor([0.5, 4])
    tokens, offsets = codes.to(torch.float8_e4m3fn), torch.tensor([0, 1, 2], dtype=torch.int32)
    out = torch.full((4, 256), 7.0)
    if is_interpreted():
        kernel.launch(tokens, scales, offsets, None, None, out, get_format("fp8_block128"))
    else:
        args = (tokens, scales, offsets, None, None, "fp8_block128", 256, torch.float32)
        out[:2] = torch.ops.moelink.dequantize_rows(*args)[:2]
    assert out[:, [0, 128]].tolist() == [[0, 0], [1, 12], [7, 7], [7, 7]]
