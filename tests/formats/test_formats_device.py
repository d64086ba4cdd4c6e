"""Device functions of the formats against the torch twins, bit for bit: interpreted, compiled, and on a GPU."""

import numpy as np
import pytest
import torch

from moelink.formats import format_names, get_format
from tests.formats.format_inputs import fp32_inputs, rows
from tests.support.processes import run_compiled

pytest.importorskip("triton")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from moelink.formats.device import Codec, divide_rows  # noqa: E402
from tests.formats.format_kernels import CODECS, decode_kernel, encode_kernel, shape  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
SCALE_DTYPES = {4: torch.float32, 1: torch.uint8, 0: torch.uint8}
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


def bits(x):
    """Bits as numpy unsigned integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.cpu().contiguous().view(kinds[x.dtype.itemsize]).numpy().view(f"u{x.dtype.itemsize}")


def padded(x, block):
    """1-D tensor with zeros up to a multiple of ``block``."""
    return torch.cat([x, x.new_zeros(-x.numel() % block)])


def encode(name, x, s=1.0, native=False):
    """(payload bits, scale bits) of flat fp32, by the device function."""
    codec = get_format(name).codec()
    ng, gs, pe = shape(name)
    x = padded(x, ng * gs).to(DEVICE)
    payload = torch.zeros(x.numel() // gs * pe, dtype=UNSIGNED[codec.ELEMENT_BYTES], device=DEVICE)
    scale = torch.zeros(x.numel() // gs, dtype=SCALE_DTYPES[codec.SCALE_BYTES], device=DEVICE)
    s = torch.tensor([s], device=DEVICE)
    encode_kernel[(x.numel() // (ng * gs),)](x, payload, scale, s, codec.encode, ng, gs, pe, native)
    return bits(payload), bits(scale)


def decode(name, payload, scale, s=1.0, native=False):
    """fp32 of flat payload bits and scales, by the device function."""
    codec = get_format(name).codec()
    ng, gs, pe = shape(name)
    groups = payload.numel() // pe
    payload, scale = padded(payload, ng * pe).to(DEVICE), padded(scale, ng).to(DEVICE)
    x = torch.zeros(scale.numel() * gs, device=DEVICE)
    s = torch.tensor([s], device=DEVICE)
    decode_kernel[(scale.numel() // ng,)](x, payload, scale, s, codec.decode, ng, gs, pe, native)
    return x[: groups * gs].cpu()


def check_encode(name, s=1.0, native=False, twin_device="cpu"):
    x = torch.from_numpy(rows(256 if name == "fp8_token" else 384))
    payload, scale = encode(name, x.flatten(), s, native)
    fmt = get_format(name)
    input_scale = torch.tensor([s], device=twin_device) if fmt.uses_input_scale else None
    twin = fmt.quantize(x.to(twin_device), input_scale)
    want = bits(twin.payload).reshape(-1)
    np.testing.assert_array_equal(payload[: want.size], want)
    if fmt.scale_dtype is not None:
        want = bits(twin.scales)
        if fmt.scale_dtype == torch.int32:  # four of them a word, and 3 groups a row
            want = want.view(np.uint8)[:, :3]
        want = want.reshape(-1)
        np.testing.assert_array_equal(scale[: want.size], want)


def check_decode(name, s=1.0, native=False, twin_device="cpu"):
    """Every payload byte (16-bit code, fp32 input) under every scale byte (or 512 fp32 scales)."""
    fmt = get_format(name)
    codec = fmt.codec()
    if codec.SCALE_BYTES == 0:
        payload = (
            torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
            if name == "bf16"
            else torch.from_numpy(fp32_inputs())
        )
        payload = payload[: payload.numel() // 64 * 64]
        scale = torch.zeros(payload.numel() // 64, dtype=torch.uint8)
        got = decode(name, payload.view(UNSIGNED[codec.ELEMENT_BYTES]), scale, native=native)
        want = payload.view(fmt.payload_dtype).float()
    else:
        per_scale = 256 // shape(name)[2]
        scale = (
            torch.from_numpy(fp32_inputs()[::401].copy())
            if codec.SCALE_BYTES == 4
            else torch.arange(256).to(torch.uint8)
        )
        payload = torch.arange(256).to(torch.uint8).repeat(scale.numel(), 1)
        scale = scale[:, None].expand(-1, per_scale).contiguous()
        got = decode(name, payload.flatten(), scale.flatten(), s, native)
        input_scale = torch.tensor(s, device=twin_device) if fmt.uses_input_scale else None
        if fmt.scale_dtype == torch.int32:
            scale = torch.nn.functional.pad(scale, (0, -per_scale % 4))
        payload, scale = payload.view(fmt.payload_dtype), scale.view(fmt.scale_dtype)
        want = fmt.dequantize(payload.to(twin_device), scale.to(twin_device), input_scale).flatten().cpu()
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    np.testing.assert_array_equal(bits(got[~nan]), bits(want[~nan]))


OWN = pytest.mark.quick("each format has arithmetic of its own")
CASES = [pytest.param(name, 1.0, marks=OWN) for name in CODECS] + [
    ("nvfp4", s) for s in (37.3, 2.0**-40, 2.0**100, 0.0)
]


@pytest.mark.quick("each format has an encoder and a decoder of its own")
@pytest.mark.parametrize("name,s", CASES)
def test_encode_equals_the_twin(name, s):
    check_encode(name, s)


@pytest.mark.quick("each format has an encoder and a decoder of its own")
@pytest.mark.parametrize("name,s", CASES)
def test_decode_equals_the_twin(name, s):
    check_decode(name, s)


def test_codecs_state_the_sizes_of_their_formats():
    for name in format_names():
        fmt, codec = get_format(name), get_format(name).codec()
        assert isinstance(codec, Codec)
        hidden = 1024
        assert fmt.group == codec.GROUP
        assert fmt.payload_dtype.itemsize == codec.ELEMENT_BYTES
        assert codec.PAYLOAD_BYTES_PER_GROUP * hidden // codec.GROUP == fmt.payload_bytes(hidden)
        assert codec.SCALE_BYTES * hidden // fmt.elements_per_scale(hidden) == fmt.scale_bytes(hidden)
        assert (codec.encode is None) == (codec.decode is None) == (name == "fp64")


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_device_functions_compile_without_a_gpu(target):
    result = run_compiled("tests.formats.format_kernels", target)
    assert result.returncode == 0, result.stderr[-3000:]


class TestOnGpu:
    """Compiled functions, the twin on CUDA and the twin on CPU agree."""

    pytestmark = gpu

    @pytest.mark.parametrize("native", [False, True])
    @pytest.mark.parametrize("name,s", CASES)
    def test_encode(self, name, s, native):
        check_encode(name, s, native, "cpu")
        check_encode(name, s, native, "cuda")

    @pytest.mark.parametrize("native", [False, True])
    @pytest.mark.parametrize("name,s", CASES)
    def test_decode(self, name, s, native):
        check_decode(name, s, native, "cpu")
        check_decode(name, s, native, "cuda")

    @pytest.mark.parametrize("name", CODECS)
    def test_twin_is_capturable(self, name):
        fmt, x = get_format(name), torch.randn(64, 512, device="cuda")
        s = torch.full((1,), 3.0, device="cuda") if fmt.uses_input_scale else None
        warm = fmt.quantize(x, s)
        fmt.dequantize(warm.payload, warm.scales, s)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fmt.quantize(x + 0, s)  # of fp32 nothing else is a kernel, and an empty graph is a warning
            back = fmt.dequantize(captured.payload, captured.scales, s)
        x.mul_(2)
        graph.replay()
        again = fmt.quantize(x, s)
        assert np.array_equal(bits(captured.payload), bits(again.payload))
        assert torch.equal(back, fmt.dequantize(again.payload, again.scales, s))

    @pytest.mark.parametrize("name", ["fp8_block128", "mxfp8", "mxfp4"])
    def test_scale_layout_is_capturable(self, name):
        fmt, sizes = get_format(name), torch.tensor([100, 0, 130], dtype=torch.int32, device="cuda")
        layout, row_offsets = fmt.scale_layout, torch.tensor([0, 100, 100, 232], dtype=torch.int32, device="cuda")
        groups = torch.tensor([0] * 100 + [2] * 130, device="cuda")
        rows_ = torch.arange(230, device="cuda")
        scales = torch.randint(1, 127, (230, 6), device="cuda").to(torch.uint8)
        out = torch.full(layout.shape(240, 6, 3), 99, dtype=torch.uint8, device="cuda")
        where = {"rows": rows_, "groups": groups, "row_offsets": row_offsets}

        def work():
            layout.scatter(out, scales, **where)
            layout.clear_padding(out, row_offsets=row_offsets, group_sizes=sizes)
            return layout.gather(out, scale_width=6, **where), layout.scales_offsets(row_offsets)

        want = work()[0].clone()
        assert torch.equal(want, scales)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            back, _ = work()
        out.fill_(99)
        graph.replay()
        assert torch.equal(back, want)


@triton.jit
def divide_kernel(x, divisor, out):
    at = tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + at, divide_rows(tl.load(x + at), tl.load(divisor + tl.arange(0, 2)), True))


def test_quotients_by_one_reciprocal_a_row_keep_their_sign():
    x = torch.tensor([[-0.0, 0.0, -1.0, 1e-45], [3.0, -(2.0**-149), -0.0, 2.0**-140]], device=DEVICE)
    divisor, out = torch.tensor([0.5, 3.0], device=DEVICE), torch.empty_like(x)
    divide_kernel[(1,)](x, divisor, out)
    assert torch.equal(out.signbit(), x.signbit()), out
    assert torch.equal(out[0, :3].cpu(), torch.tensor([-0.0, 0.0, -2.0]))


def test_quotients_by_one_reciprocal_a_row_are_exact():
    """The arithmetic of ``divide_rows`` where fused multiply-adds are, in wide numbers: IEEE quotients, bit for bit."""
    numpy = pytest.importorskip("numpy")
    single, wide = numpy.float32, numpy.longdouble

    def fma(a, b, c):
        return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(single)

    generator = numpy.random.default_rng(0)
    x = generator.integers(0, 2**32, (4000, 128), dtype=numpy.uint32).view(single)
    x[::2] = generator.standard_normal((2000, 128)) * numpy.exp2(generator.integers(-30, 30, (2000, 1)))
    x = numpy.where(numpy.isfinite(x), x, single(1.5))
    with numpy.errstate(all="ignore"):
        scale = (numpy.maximum(abs(x).max(1, keepdims=True), single(1e-4)) / single(448)).astype(single)
        row, inverse = scale + 0 * x, single(1) / scale
        rough = (x * inverse).astype(single)
        close = fma(fma(-rough, row, x), inverse, rough)
        got = fma(fma(-close, row, x), inverse, close)
        expected = (x / row).astype(single)
    # Quotients below a quarter of the smallest e4m3 number are zero there, whatever their last bit.
    assert (got == expected)[abs(expected) > 2.0**-11].all()
    assert (abs(got)[abs(expected) <= 2.0**-11] < 2.0**-10).all()
