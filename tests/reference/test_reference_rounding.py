"""The oracle's quantisers against ml_dtypes and numbers worked by hand."""

import math

import numpy as np
import pytest
import torch

from moelink.reference import reference_dequantize, reference_quantize
from moelink.reference.rounding import E2M1_VALUES, e2m1_codes, e4m3_codes, e8m0_codes_up, mxfp4_scale_codes

NAN, INF = math.nan, math.inf
QUANTISED = ["fp8_block128", "mxfp8", "nvfp4", "mxfp4", "fp8_block128_e8m0", "fp8_token"]


def bits(x):
    return x.contiguous().view(torch.uint8)


def test_casts_agree_with_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    random = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32) * np.float32(100)
    x = np.concatenate([every, random])
    x = x[np.isfinite(x)]
    fp8 = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(e4m3_codes(torch.from_numpy(x)).numpy(), fp8)
    fp4 = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert np.array_equal(e2m1_codes(torch.from_numpy(x)).numpy(), fp4)


def test_casts_at_ties_zeros_and_beyond():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, INF, NAN, -0.0])
    assert e2m1_codes(ties).tolist() == [0, 2, 2, 4, 4, 6, 6, 14, 7, 7, 8]
    assert [E2M1_VALUES[code] for code in (2, 4, 6)] == [1, 2, 4]
    fp8 = torch.tensor([448.1, 17, 19, -INF, NAN, -0.0, 2.0**-10, 3 * 2.0**-10])
    assert e4m3_codes(fp8).tolist() == [0x7E, 0x58, 0x5A, 0xFE, 0x7F, 0x80, 0, 2]
    up = torch.tensor([1, 1 + 2.0**-23, 1.5, 0, 2.0**-127, 2.0**-126, 1.5 * 2.0**127, INF, NAN])
    assert e8m0_codes_up(up).tolist() == [127, 128, 128, 0, 0, 1, 254, 254, 255]
    amax = torch.tensor([1.6, 1.75, 0, 1.75 * 2.0**-125, 1.7 * 2.0**-125, 1.99 * 2.0**127, NAN])
    assert mxfp4_scale_codes(amax).tolist() == [125, 126, 0, 1, 0, 253, 255]


@pytest.mark.parametrize("name", QUANTISED)
def test_groups_of_zeros_infs_and_nans(name):
    x = torch.zeros(4, 128)
    x[1, 0], x[2, 0], x[3] = INF, NAN, torch.finfo(torch.float32).max
    payload, scales = reference_quantize(name, x)
    values = reference_dequantize(name, payload, scales)
    assert bits(payload)[0].sum() == 0
    if name == "fp8_block128_e8m0":
        assert scales[0].tolist() == [105]
    elif name.startswith("fp8"):
        assert scales[0].tolist() == [float(torch.tensor(1e-4) / torch.tensor(448.0))]
    else:
        assert bits(scales)[0].sum() == 0
    assert values[2, 0].isnan()
    assert torch.equal(bits(scales)[1, 0], bits(scales)[3, 0])
    assert values[1, 0] > 0


def test_nvfp4_by_hand():
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([3.0, -1.5, 0.6, 0.25])
    payload, scales = reference_quantize("nvfp4", x, torch.tensor(8.0))
    assert scales.float().tolist() == [[4.0]]  # 8 * (3 / 6); the divisor is 4 / 8
    assert payload[0, :2].tolist() == [0x7 | 0xD << 4, 0x2 | 0x1 << 4]  # 6, -3, 1.2 -> 1, 0.5
    assert reference_dequantize("nvfp4", payload, scales, torch.tensor(8.0))[0, :4].tolist() == [3, -1.5, 0.5, 0.25]


def test_mx_by_hand():
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([1.6, -0.9, 0.1])
    payload, scales = reference_quantize("mxfp4", x)  # scale 2**-2: 6.4 saturates, -3.6 -> -4, 0.4 -> 0.5
    assert bits(scales).tolist() == [[125]]
    assert payload[0, :2].tolist() == [0x7 | 0xE << 4, 0x1]
    payload, scales = reference_quantize("mxfp8", 448 * x)  # amax 1.6 * 448 -> scale 2
    assert bits(scales).tolist() == [[128]]
    # 358.4 -> 352, -201.6 -> -208, 22.4 -> 22
    assert payload[0, :3].float().tolist() == [352, -208, 22]


def test_powers_of_two_in_words_by_hand():
    x = torch.zeros(1, 640)
    x[0, ::128] = torch.tensor([448, 449, 1.75, -448, 2.0**127])
    payload, scales = reference_quantize("fp8_block128_e8m0", x)
    assert bits(scales).tolist() == [[127, 128, 119, 127, 246, 0, 0, 0]]
    assert payload.float()[0, ::128].tolist() == [448, 224, 448, -448, 256]
    assert reference_dequantize("fp8_block128_e8m0", payload, scales)[0, ::128].tolist() == [
        448,
        448,
        1.75,
        -448,
        2.0**127,
    ]


def test_a_scale_per_row_by_hand():
    payload, scales = reference_quantize("fp8_token", torch.tensor([[896.0, -2.0, 0.0], [1.0, 1.0, -1.0]]))
    assert scales.tolist() == [[2.0], [float(torch.tensor(1.0) / 448)]]
    assert payload.float().tolist() == [[448, -1, 0], [448, 448, -448]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_plain_rows_are_rounded_to_bf16(dtype):
    x = torch.tensor([[1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0, NAN]], dtype=dtype)
    payload, scales = reference_quantize("bf16", x)
    assert scales is None
    assert payload.view(torch.int16).tolist() == [[0x3F80, 0x3F82, -0x8000, 0x7FFF]]
    same = torch.tensor([[0x7FA1, -0x0001]], dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(reference_quantize("bf16", same)[0].view(torch.int16), same.view(torch.int16))


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="'mxfp6'"):
        reference_quantize("mxfp6", torch.zeros(1, 32))
