"""The small integers in the docstrings of kernels whose words are their own signal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from moelink.kernels import small_calls, tagged, tagged_rows


@triton.jit
def _address(block, out, S: tl.constexpr):
    tl.store(out, small_calls.words_at(tl.load(block), tl.load(block + 1), 1, S).to(tl.int64))


def test_rows_of_small_calls_lie_side_by_side():
    """The example of ``kernels.small_calls``, in a region at offset 640 of a block at address 1024."""
    out = torch.zeros(1, dtype=torch.int64)
    _address[(1,)](torch.tensor([1024, 2]), out, S=SimpleNamespace(O_TAGGED=640, TAGGED=4, TW=32))
    assert out.item() - 1024 - 640 == 8 * 32 * (2 * 4 + 1)


@triton.jit
def _pack(columns, words, back, call, S: tl.constexpr):
    i = tl.arange(0, 4)
    packed = tagged.words_of(tl.load(columns + i), call)
    tl.store(words + tl.arange(0, packed.shape[0]), packed)
    tl.store(back + i, tagged_rows.columns_of(packed, S))


@pytest.mark.parametrize(("dtype", "words"), [
    (torch.bfloat16, [0x00000005_40003F80, 0x00000005_7FC18000]),
    (torch.float32, [0x00000005_3F800000, 0x00000005_40000000, 0x00000005_80000000, 0x00000005_7FC10000]),
], ids=str)  # fmt: skip
def test_a_word_holds_the_call_and_four_bytes(dtype, words):
    """Of NaN, and of the sign of zero, too."""
    nan = torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16).to(dtype)
    columns = torch.cat([torch.tensor([1.0, 2.0, -0.0], dtype=dtype), nan])
    packed, back = torch.zeros(len(words), dtype=torch.int64), torch.zeros(4)
    types = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    _pack[(1,)](columns, packed, back, 5 + 2**31, S=SimpleNamespace(DTYPE=types[dtype], ACC=tl.float32))
    assert packed.tolist() == words
    assert torch.equal(back.view(torch.int32), columns.float().view(torch.int32))
