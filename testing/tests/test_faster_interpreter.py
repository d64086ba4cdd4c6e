"""The faster interpreter computes what Triton's own does, bit for bit, and can be taken back."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from moelink_testing import interpreter as faster
from moelink_testing.interpreter import speed_up, stock_interpreter

N = 16


@triton.jit
def double(x):
    return x + x


@triton.jit
def elementwise(x, i, out, number, N: tl.constexpr):
    """Floats and integers, numbers and blocks, comparisons, divisions, shifts, casts and masks."""
    at = tl.arange(0, N)
    a = tl.load(x + at, mask=at < N - 3, other=-1.5)
    b = tl.load(i + at)
    tl.store(out + at, a * 3 + number - a / (b + 100))
    tl.store(out + N + at, tl.where((b > 2) & (a < 1.0), double(a), tl.exp(a)))
    tl.store(out + 2 * N + at, ((b << 2) ^ (b >> 1) | 5).to(tl.float32) + b % 7 + b // 3)
    tl.store(out + 3 * N + at, (b.to(tl.int64) * 3_000_000_000 % 1000).to(tl.float32), mask=(at & 1) == 0)
    tl.store(out + 4 * N + at, a.to(tl.bfloat16).to(tl.float32) + a.to(tl.float16))
    tl.store(out + 5 * N + at, tl.minimum(number, b) + tl.maximum(2, b) - (1 - b))


@triton.jit
def blocks(x, i, out, number, N: tl.constexpr):
    """Two dimensions: broadcasts, sums, scans, sorts, products, transposes, joins."""
    r, c = tl.arange(0, N), tl.arange(0, 4)
    a = tl.load(x + r)[:, None] + c[None, :] * number
    tl.store(out + r, tl.sum(a, 1))
    tl.store(out + N + c, tl.max(a, 0))
    tl.store(out + 2 * N + r, tl.cumsum(tl.load(x + r), 0))
    tl.store(out + 3 * N + r, tl.sort(tl.load(x + r)))
    square = tl.load(x + r)[:, None] * tl.load(x + r)[None, :]
    tl.store(out + 4 * N + r, tl.sum(tl.dot(square, tl.trans(square)), 0))
    tl.store(out + 5 * N + tl.arange(0, 2 * N), tl.reshape(tl.join(tl.load(x + r), tl.load(i + r) * 1.0), (2 * N,)))


@triton.jit
def control(x, i, out, number, N: tl.constexpr):
    """Loops, branches, tuples, atomics, several programs."""
    me = tl.program_id(0)
    pair = (tl.load(i + me), tl.load(x + me))
    total = 0.0
    for step in range(3):
        total += pair[1] * step
    left = pair[0]
    while left > 0:
        total += left
        left -= 3
    if me % 2 == 0:
        total = -total
    for step in tl.static_range(2):
        tl.atomic_add(out + N + step, total)
    tl.store(out + me, total)
    tl.atomic_max(out + 2 * N, tl.atomic_add(out + 3 * N, number))


KERNELS = {"elementwise": (elementwise, 1), "blocks": (blocks, 1), "control": (control, N)}


def results_of(kernel, programs):
    generator = torch.Generator().manual_seed(1)
    x, out = torch.randn(N, generator=generator), torch.full((8 * N,), -9.0)
    i = torch.randint(-20, 20, (N,), generator=generator, dtype=torch.int32)
    for number in (2, -3):
        kernel[(programs,)](x, i, out, number, N)
    return out


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.quick("each has other operations")
@pytest.mark.parametrize("name", KERNELS)
def test_results_are_equal_bit_for_bit(name):
    fast = results_of(*KERNELS[name])
    with stock_interpreter():
        stock = results_of(*KERNELS[name])
    again = results_of(*KERNELS[name])
    assert torch.equal(fast.view(torch.int32), stock.view(torch.int32))
    assert torch.equal(fast.view(torch.int32), again.view(torch.int32))
    assert (fast != -9).sum() > N


def test_the_stock_interpreter_is_tritons_own():
    speed_up()
    assert speed_up(), "a second time"
    fast = interpreter._patch_lang
    with stock_interpreter():
        assert interpreter._patch_lang is faster._patch
        assert core.tuple.__init__ is faster._make_tuple
        assert not hasattr(core.tuple, "type")
        assert interpreter.interpreter_builder.options.sanitize_overflow
        with stock_interpreter():
            assert interpreter._patch_lang is faster._patch
        assert interpreter._patch_lang is faster._patch
    assert interpreter._patch_lang is fast


def test_nothing_changes_where_kernels_are_compiled(monkeypatch):
    monkeypatch.setattr(faster, "is_interpreted", lambda: False)
    with stock_interpreter():
        assert not speed_up()
        assert interpreter._patch_lang is faster._patch
    monkeypatch.undo()
    speed_up()


@triton.jit
def add_first(x, out, n: tl.constexpr):
    """out[i] = x[i] + x[0], in a function that others call."""
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i) + tl.load(x))


@triton.jit
def add_first_twice(x, out, n: tl.constexpr):
    add_first(x, out, n)
    add_first(out, out, n)


def test_a_launch_patches_once_and_restores(monkeypatch):
    patches = []

    def counted(fn):
        patches.append(fn.__name__)
        return original(fn)

    original = faster._patch
    x, out = torch.arange(3, 7, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    before = {name: getattr(tl, name) for name in ("load", "range", "arange")}
    with monkeypatch.context() as patch:
        patch.setattr(faster, "_patch", counted)
        patch.setattr(faster, "_patched", set())  # a launch that raised in another test may have left some
        for _ in range(2):
            add_first_twice[(1,)](x, out, 4)
    assert out.tolist() == [12, 13, 14, 15]
    assert patches == ["add_first_twice"] * 2
    assert before == {name: getattr(tl, name) for name in before}


def test_types_are_described_alike():
    for dtype in (tl.int1, tl.bfloat16, tl.float8e4nv, tl.block_type(tl.int64, [4]), tl.pointer_type(tl.int8)):
        assert interpreter._get_np_dtype(dtype) == faster._numpy_dtype_of(dtype)
    block = tl.block_type(tl.float32, [2, 4])
    assert (str(block), block.shape.type.types) == ("<['2', '4'], fp32>", [tl.constexpr_type(2), tl.constexpr_type(4)])
