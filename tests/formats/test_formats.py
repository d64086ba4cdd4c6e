"""Formats in torch against oracles written with numpy and ml_dtypes, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelink.errors import ArgumentError, ConfigError
from moelink.formats import casts, get_format
from tests.formats.format_inputs import CORNERS, E2M1_VALUES, fp32_inputs, ml_dtypes, rows

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")


@pytest.fixture(autouse=True)
def quiet_numpy():
    """The oracles compute with NaN, inf and zeros, of which numpy warns."""
    with np.errstate(all="ignore"):
        yield


QUANTISED = ["fp8_block128", "mxfp8", "nvfp4", "mxfp4", "fp8_block128_e8m0", "fp8_token"]
FP32_SCALES = ("fp8_block128", "fp8_token")
F32_MAX = float(np.finfo(np.float32).max)


def bits(tensor):
    """The tensor as numpy unsigned integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.dtype.itemsize]).numpy().view(f"u{tensor.dtype.itemsize}")


def oracle_e4m3(x):
    code = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), code)


def oracle_e2m1(x):
    code = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return np.where(np.isnan(x), np.uint8(7), code)


def oracle_e8m0_up(x):
    mantissa, exponent = np.frexp(np.abs(x.astype(np.float64)))
    code = np.where(x == 0, 0, np.clip(exponent - (mantissa == 0.5) + 127, 0, 254))
    return np.where(np.isnan(x), 255, np.where(np.isinf(x), 254, code)).astype(np.uint8)


def oracle_e8m0_value(code):
    return np.where(code == 255, np.nan, np.exp2(code.astype(np.float64) - 127))


def words(code):
    """Bytes [n, g] as words [n, ceil(g / 4)] of four, the first the lowest; zeros fill up the last."""
    filled = np.concatenate([code, np.zeros((len(code), -code.shape[1] % 4), np.uint8)], 1)
    return filled.reshape(len(code), -1, 4).astype(np.uint32) @ (np.uint32(256) ** np.arange(4, dtype=np.uint32))


def group_of(name, hidden):
    """Elements that share a scale."""
    return hidden if name == "fp8_token" else get_format(name).group


def oracle_quantize(name, x, s=1.0):
    """(payload bytes [n, .], scale bits [n, .]) of fp32 [n, hidden]."""
    groups = x.reshape(len(x), -1, group_of(name, x.shape[1]))
    amax = np.minimum(np.abs(groups).max(-1), F32_MAX)
    if name in FP32_SCALES:
        scale = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
        code, divisor, dead = scale.view(np.uint32), scale, np.zeros(scale.shape, bool)
        code = np.where(np.isnan(scale), np.uint32(0x7FC00000), code)
    elif name == "nvfp4":
        code = oracle_e4m3(np.float32(s) * (amax / np.float32(6)))
        stored = code.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        divisor, dead = stored / np.float32(s), stored == 0
    else:
        if name == "mxfp8":
            code = oracle_e8m0_up(amax / np.float32(448))
        elif name == "fp8_block128_e8m0":
            code = oracle_e8m0_up(np.maximum(amax, np.float32(1e-4)) / np.float32(448))
        else:
            mantissa, exponent = np.frexp(amax.astype(np.float64))
            code = np.clip(exponent - 1 + (mantissa * 2 >= 1.75) - 2 + 127, 0, 254)
            code = np.where(amax == 0, 0, np.where(np.isnan(amax), 255, code)).astype(np.uint8)
        divisor, dead = oracle_e8m0_value(code), code == 0
    scaled = (groups / divisor[..., None]).astype(np.float32)
    scaled = np.where(dead[..., None], np.float32(0), scaled)
    if "fp8" in name:
        return oracle_e4m3(scaled).reshape(x.shape), words(code) if name == "fp8_block128_e8m0" else code
    codes = oracle_e2m1(scaled).reshape(x.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, code


# Casts


def test_casts_from_fp32_are_exact_on_every_case():
    x = fp32_inputs()
    t = torch.from_numpy(x)
    np.testing.assert_array_equal(bits(casts.f32_to_e4m3(t)), oracle_e4m3(x))
    np.testing.assert_array_equal(bits(casts.f32_to_e2m1(t)), oracle_e2m1(x))
    np.testing.assert_array_equal(bits(casts.f32_to_e8m0_up(t)), oracle_e8m0_up(x))
    bf16 = np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(bits(casts.to_bf16(t)), bf16)


def test_casts_to_fp32_are_exact_for_every_code():
    code = np.arange(256, dtype=np.uint8)
    t = torch.from_numpy(code)
    np.testing.assert_array_equal(casts.e4m3_to_f32(t), code.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    np.testing.assert_array_equal(casts.e8m0_to_f32(t), oracle_e8m0_value(code))
    np.testing.assert_array_equal(casts.e8m0_to_f32(t), code.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    signed = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
    np.testing.assert_array_equal(bits(casts.e2m1_to_f32(t[:16])), signed.view(np.uint32))
    np.testing.assert_array_equal(casts.pack_e2m1(casts.unpack_e2m1(t)), t)
    assert casts.pack_e2m1(torch.tensor([1, 2], dtype=torch.uint8)).item() == 0x21


def test_reciprocal_of_a_scale_is_exact():
    code = torch.arange(1, 254, dtype=torch.uint8)
    assert torch.equal(
        casts.e8m0_reciprocal(code).double() * casts.e8m0_to_f32(code).double(), torch.ones(253).double()
    )


@pytest.mark.parametrize("x,code", [(1.0, 127), (1.0 + 2.0**-23, 128), (1.5, 128), (2.0, 128), (0.0, 0), (2.0**-127, 0),
                                    (2.0**-127 + 2.0**-149, 1), (2.0**127, 254), (F32_MAX, 254)])  # fmt: skip
def test_e8m0_rounds_up(x, code):
    assert casts.f32_to_e8m0_up(torch.tensor([x], dtype=torch.float32)).item() == code


@pytest.mark.parametrize(
    "x,value", [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4), (7.0, 6)]
)
def test_e2m1_ties_go_to_even(x, value):
    assert casts.e2m1_to_f32(casts.f32_to_e2m1(torch.tensor([x, -x]))).tolist() == [value, -value]


def test_division_is_ieee():
    x = torch.from_numpy(fp32_inputs())
    np.testing.assert_array_equal(casts.divide(x, 6.0), fp32_inputs() / np.float32(6))


# Formats


@pytest.mark.parametrize("name", QUANTISED)
def test_quantize_equals_the_oracle(name):
    for s in (1.0, 37.3, 2.0**-40) if name == "nvfp4" else (None,):
        scale = None if s in (None, 1.0) else torch.tensor([s])
        quantised = get_format(name).quantize(torch.from_numpy(rows()), scale)
        payload, code = oracle_quantize(name, rows(), s or 1.0)
        np.testing.assert_array_equal(bits(quantised.scales), code)
        np.testing.assert_array_equal(bits(quantised.payload), payload)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_widened_first(name, dtype):
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 256)
    half, full = get_format(name).quantize(x), get_format(name).quantize(x.float())
    assert np.array_equal(bits(half.payload), bits(full.payload))
    assert np.array_equal(bits(half.scales), bits(full.scales))


@pytest.mark.parametrize("name", QUANTISED)
def test_dequantize_multiplies_every_code_by_every_scale(name):
    fmt, s = get_format(name), 0.3
    scale_codes = fp32_inputs()[:4096].view(np.uint32) if name in FP32_SCALES else np.arange(256, dtype=np.uint8)
    group = group_of(name, 256)
    per_row = np.arange(256, dtype=np.uint8).reshape(-1, group // (1 if "fp8" in name else 2))
    payload = np.tile(per_row.reshape(1, -1), (len(scale_codes), 1))
    tiled = np.repeat(scale_codes[:, None], len(per_row), 1)
    stored = words(tiled) if name == "fp8_block128_e8m0" else tiled
    width = {1: torch.uint8, 4: torch.int32}[stored.dtype.itemsize]
    scales = torch.from_numpy(stored.view(f"i{stored.itemsize}")).view(width).view(fmt.scale_dtype)
    uses = name == "nvfp4"
    got = fmt.dequantize(
        torch.from_numpy(payload).view(fmt.payload_dtype), scales, torch.tensor(s) if uses else None
    ).numpy()
    if "fp8" in name:
        values = payload.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        values = np.concatenate([E2M1_VALUES, -E2M1_VALUES])[np.stack([payload & 15, payload >> 4], -1)].reshape(
            len(payload), -1
        )
    if fmt.scale_dtype in (torch.float8_e8m0fnu, torch.int32):
        factor = oracle_e8m0_value(tiled).astype(np.float32)
    else:
        factor = tiled.view(np.float32 if "fp8" in name else ml_dtypes.float8_e4m3fn).astype(np.float32)
        factor = factor / np.float32(s) if uses else factor
    want = values * np.repeat(factor, group, 1)
    np.testing.assert_array_equal(got, want)


# rows of data whose scales are in the range that the formats state for their tolerance
SCALE_RANGE = {"mxfp8": (-117, 120), "nvfp4": (-2, 10), "mxfp4": (-123, 120)}
SCALE_RANGE |= dict.fromkeys(("fp8_block128", "fp8_block128_e8m0", "fp8_token"), (-13, 120))


@given(data=st.data(), seed=st.integers(0, 2**32), rows_=st.integers(0, 5), groups=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_tolerance_holds(data, seed, rows_, groups):
    name = data.draw(st.sampled_from(QUANTISED))
    fmt, rng = get_format(name), np.random.default_rng(seed)
    low, high = SCALE_RANGE[name]
    largest = np.exp2(rng.uniform(low, high, (rows_, groups, 1)))
    unit = rng.uniform(-1, 1, (rows_, groups, fmt.group))
    unit[..., 0] = 1
    x = torch.from_numpy((unit * largest).astype(np.float32).reshape(rows_, groups * fmt.group))
    quantised = fmt.quantize(x)
    error = (fmt.dequantize(quantised.payload, quantised.scales).double() - x.double()).abs()
    elements = group_of(name, x.shape[1])
    parts = (rows_, x.shape[1] // elements, elements)
    bound = x.double().abs().view(parts).amax(-1, keepdim=True) * fmt.tolerance
    assert (error.view(parts) <= bound).all()


@pytest.mark.parametrize(
    "name,amax,worst",
    [("fp8_block128", 448.0, 432.0), ("mxfp8", 272.0, 272.0), ("mxfp4", 5.0, 5.0), ("fp8_block128_e8m0", 272.0, 272.0),
     ("fp8_token", 448.0, 432.0)],
)  # fmt: skip
def test_tolerance_is_reached(name, amax, worst):
    fmt = get_format(name)
    x = torch.zeros(1, fmt.group)
    x[0, :2] = torch.tensor([amax, worst])
    error = (fmt.dequantize(*vars(fmt.quantize(x)).values()) - x).abs().max().item() / amax
    assert fmt.tolerance - 2.0**-19 <= error <= fmt.tolerance


def test_tolerance_is_reached_by_nvfp4():
    fmt, sf = get_format("nvfp4"), 1.125
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([6 * 1.0625 + 2.0**-20, 5 * sf])
    quantised = fmt.quantize(x)
    assert quantised.scales.float().item() == sf
    error = (fmt.dequantize(quantised.payload, quantised.scales) - x).abs()[0, 1].item()
    assert 3 / 17 - 1e-5 <= error / x.max().item() <= fmt.tolerance


FLOOR = int((np.float32(1e-4) / np.float32(448)).view(np.uint32))  # below 2**-22, whose code is 105


@pytest.mark.parametrize(
    "name,zero_scale",
    [("fp8_block128", FLOOR), ("mxfp8", 0), ("nvfp4", 0), ("mxfp4", 0), ("fp8_block128_e8m0", 105 + (105 << 8)),
     ("fp8_token", FLOOR)], ids=QUANTISED,
)  # fmt: skip
def test_zero_groups(name, zero_scale):
    quantised = get_format(name).quantize(torch.zeros(3, 256))
    assert not bits(quantised.payload).any()
    assert (bits(quantised.scales) == zero_scale).all()


@pytest.mark.parametrize(
    "name,tiny", [("mxfp8", 448 * 2.0**-127), ("nvfp4", 6 * 2.0**-10), ("mxfp4", 1.74 * 2.0**-125)]
)
def test_a_stored_scale_of_zero_means_zero_codes(name, tiny):
    quantised = get_format(name).quantize(torch.full((2, 256), -tiny))
    assert not bits(quantised.scales).any()
    assert not bits(quantised.payload).any()
    assert bits(get_format(name).quantize(torch.full((2, 256), tiny * 1.01)).payload).all()


@pytest.mark.parametrize(
    "name,scale_nan,payload_nan",
    [("fp8_block128", 0x7FC00000, 0x7F), ("mxfp8", 255, 0x7F), ("nvfp4", 0x7F, 0x77), ("mxfp4", 255, 0x77),
     ("fp8_block128_e8m0", 119 + (255 << 8), 0x7F), ("fp8_token", 0x7FC00000, 0x7F)],
)  # fmt: skip
@pytest.mark.parametrize("nan", CORNERS[np.isnan(CORNERS)].view(np.uint32))
def test_nan_fills_its_group_alone(name, scale_nan, payload_nan, nan):
    fmt, x, group = get_format(name), np.ones((2, 256), np.float32), group_of(name, 256)
    hit = 1 % (256 // group)
    for sign in (0, 1 << 31):
        x.view(np.uint32)[1, hit * group + 3] = nan | sign
        quantised = fmt.quantize(torch.from_numpy(x))
        assert bits(quantised.scales)[1, min(hit, fmt.scale_width(256) - 1)] == scale_nan
        codes = bits(quantised.payload).reshape(2, 256 // group, -1)
        assert (codes[1, hit] == payload_nan).all()
        values = fmt.dequantize(quantised.payload, quantised.scales).view(2, -1, group)
        assert values[1, hit].isnan().all()
        assert values.isnan().sum() == group


@pytest.mark.parametrize("name", QUANTISED)
def test_inf_saturates_beside_the_largest_finite(name):
    fmt, x = get_format(name), torch.ones(1, 256)
    x[0, 0], x[0, 1] = -torch.inf, F32_MAX
    quantised = fmt.quantize(x)
    top = 0xFE if "fp8" in name else 0xF
    assert bits(quantised.payload)[0, 0] & (0xFF if "fp8" in name else 0xF) == top
    x[0, 0] = -F32_MAX
    assert np.array_equal(bits(fmt.quantize(x).scales), bits(quantised.scales))


@pytest.mark.parametrize("amax,code", [(1.6, 125), (1.75, 126), (1.0, 125), (2.0, 126), (F32_MAX, 253)])
def test_mxfp4_scale(amax, code):
    assert bits(get_format("mxfp4").quantize(torch.full((1, 32), amax)).scales).item() == code


def test_plain_formats_carry_rows_unchanged():
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)):
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        x = torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max, (64, 33), dtype=kind).view(dtype)
        quantised = get_format(name).quantize(x)
        assert quantised.scales is None
        assert np.array_equal(bits(quantised.payload), bits(x))
        back = get_format(name).dequantize(quantised.payload, None)
        assert back.dtype == (torch.float64 if name == "fp64" else torch.float32)
        assert np.array_equal(back.double().numpy(), x.double().numpy(), equal_nan=True)
    half = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(-1, 64)
    np.testing.assert_array_equal(get_format("fp64").quantize(half).payload, half.double())
    np.testing.assert_array_equal(get_format("fp32").quantize(half).payload, half.float())


def test_sizes():
    want = {"bf16": (14336, 0), "fp32": (28672, 0), "fp64": (57344, 0), "fp8_block128": (7168, 224),
            "mxfp8": (7168, 224), "nvfp4": (3584, 448), "mxfp4": (3584, 224), "fp8_block128_e8m0": (7168, 56),
            "fp8_token": (7168, 4)}  # fmt: skip
    for name, (payload, scales) in want.items():
        fmt = get_format(name)
        assert (fmt.payload_bytes(7168), fmt.scale_bytes(7168), fmt.bytes_per_token(7168)) == (
            payload,
            scales,
            payload + scales,
        )
        quantised = fmt.quantize(torch.zeros(0, 7168))
        assert quantised.payload.shape == (0, fmt.payload_width(7168))
        assert quantised.payload.dtype == fmt.payload_dtype
        if fmt.scale_dtype is not None:
            assert (quantised.scales.shape, quantised.scales.dtype) == ((0, fmt.scale_width(7168)), fmt.scale_dtype)
            assert fmt.dequantize(quantised.payload, quantised.scales).shape == (0, 7168)


def test_four_e8m0_codes_share_a_word():
    fmt, x = get_format("fp8_block128_e8m0"), torch.zeros(1, 640)
    x[0, ::128] = 448 * torch.tensor([1.0, 2.0, 0.5, 1.0, 8.0])
    quantised = fmt.quantize(x)
    assert bits(quantised.scales).tolist() == [[0x7F7E807F, 0x00000082]]
    assert torch.equal(fmt.dequantize(quantised.payload, quantised.scales), x)
    one_column = quantised.scales[:, :1].t().contiguous().t()  # of any stride
    assert torch.equal(fmt.dequantize(quantised.payload[:, :512], one_column), x[:, :512])


def test_a_scale_per_row_takes_its_rows_largest():
    fmt, x = get_format("fp8_token"), torch.ones(2, 48)
    x[1, 40] = -448.0
    quantised = fmt.quantize(x)
    assert torch.equal(quantised.scales[1], torch.tensor([1.0]))
    assert quantised.payload.float()[1].tolist() == x[1].tolist()
    assert (quantised.payload.float()[0] == 448).all()


def test_arguments_are_refused():
    fmt = get_format("fp8_block128")
    with pytest.raises(ConfigError, match=r"hidden_size: expected a multiple of 128 .*fp8_block128.*got 200"):
        fmt.quantize(torch.zeros(2, 200))
    with pytest.raises(ConfigError, match=r"hidden_size: expected a multiple of 16 .*fp8_token.*got 200"):
        get_format("fp8_token").quantize(torch.zeros(2, 200))
    with pytest.raises(ArgumentError, match="x: .*float64"):
        fmt.quantize(torch.zeros(2, 128, dtype=torch.float64))
    with pytest.raises(ArgumentError, match=r"x: expected a tensor \[n, hidden\]"):
        fmt.quantize(torch.zeros(128))
    with pytest.raises(ArgumentError, match="input_scale"):
        fmt.quantize(torch.zeros(2, 128), torch.ones(1))
    with pytest.raises(ArgumentError, match="scales"):
        fmt.dequantize(torch.zeros(2, 128).to(torch.float8_e4m3fn), None)


@pytest.mark.parametrize("name", [*QUANTISED, "bf16", "fp32", "fp64"])
def test_codes_of_another_dtype_are_refused(name):
    fmt = get_format(name)
    rows = fmt.quantize(torch.linspace(-3, 3, 512).view(2, 256))
    want = fmt.dequantize(rows.payload, rows.scales)
    half = torch.zeros(rows.payload.shape, dtype=torch.float16)
    with pytest.raises(ArgumentError, match=f"^payload: expected {fmt.payload_dtype}.*'{name}'.*, got torch.float16"):
        fmt.dequantize(half, rows.scales)
    if rows.scales is not None:
        half = torch.ones(rows.scales.shape, dtype=torch.float16)
        with pytest.raises(ArgumentError, match=f"^scales: expected {fmt.scale_dtype}.*'{name}'.*, got torch.float16"):
            fmt.dequantize(rows.payload, half)
    as_bytes = [
        codes.view(torch.uint8) if codes is not None and codes.dtype.itemsize == 1 else codes
        for codes in (rows.payload, rows.scales)
    ]
    assert torch.equal(fmt.dequantize(*as_bytes), want)


def test_tolerance_of_bf16_is_half_an_ulp_and_reached():
    x = torch.tensor([[1 + 2.0**-8 - 2.0**-20, 1 + 2.0**-8, -3.14159, 1e-20]])
    fmt = get_format("bf16")
    error = (fmt.dequantize(fmt.quantize(x).payload, None) - x).abs() / x.abs()
    assert 0.99 * fmt.tolerance < error.max() <= fmt.tolerance
