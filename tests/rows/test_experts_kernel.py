"""The experts of few rows in one launch, interpreted: the bits of the three launches."""

from __future__ import annotations

import pytest
import torch

from moelink.formats import get_format
from moelink.activation import silu_and_quantize
from moelink.nn.block_quantized import quantize_weight
from moelink.rows import experts_kernel, grouped_fp8
from moelink.testing import assert_bitwise_equal

SHAPES = {
    "few": ((4, 0, 4), 0, 128, 128), "many row tiles": ((20, 4, 0, 36), 8, 256, 384), "no rows": ((0, 0), 4, 128, 128),
    "one group": ((0, 8, 0), 3, 384, 256),
}


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_one_launch_has_the_bits_of_three(name: str, programs: int) -> None:
    sizes, room, hidden, inner = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    rows = sum(sizes) + room
    quantized = get_format("fp8_block128").quantize(torch.randn(rows, hidden, generator=generator))
    codes, scales = quantized.payload, quantized.scales.t().contiguous()
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    gate_up = quantize_weight(torch.randn(len(sizes), 2 * inner, hidden, generator=generator) / 8)
    down = quantize_weight(torch.randn(len(sizes), hidden, inner, generator=generator) / 8)
    one_launch = grouped_fp8.Settings(grouped_fp8.Tiles(16, swapped=True, descriptors=False), None)
    between = torch.full((rows, 2 * inner), 7.0, dtype=torch.bfloat16)
    grouped_fp8.launch(codes, scales, offsets, gate_up.codes, gate_up.scales, between, one_launch)
    middle = silu_and_quantize(between, offsets, format="fp8_block128")
    want = torch.full((rows, hidden), 7.0, dtype=torch.bfloat16)
    grouped_fp8.launch(middle.tokens, middle.scales, offsets, down.codes, down.scales, want, one_launch)
    counters = torch.zeros(experts_kernel.counters_for(rows, len(sizes)), dtype=torch.int32)
    for _ in range(2):
        got = torch.full((rows, hidden), 7.0, dtype=torch.bfloat16)
        made = torch.full_like(between, 7.0), torch.zeros(rows, inner, dtype=torch.uint8), torch.zeros(inner // 128, rows)
        experts_kernel.launch(
            codes, scales, offsets, (gate_up.codes, gate_up.scales), (down.codes, down.scales), made, counters, got,
            programs=programs,
        )
        assert_bitwise_equal(made[0], between, "gate and up")
        assert_bitwise_equal(got, want, "out")
        assert not counters.any(), "the next call finds zeros"
