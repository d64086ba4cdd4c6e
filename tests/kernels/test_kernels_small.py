"""The small integers in the docstrings of kernels whose rows are their own signal, and of a piece of a row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from moelink.kernels.dispatch.pieces import columns_of
from moelink.kernels.sync import lamport_slots
from moelink.memory.protocol import COMBINE_WITH_FLAGS, CONTROL_WORDS

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _address(block, out, S: tl.constexpr):
    tl.store(out, lamport_slots.row_at(tl.load(block), tl.load(block + 1), 1, S))


def test_rows_of_small_calls_lie_side_by_side():
    """The example of ``kernels.sync.lamport_slots``, in a region at offset 640 of a block at address 1024."""
    out = torch.zeros(1, dtype=torch.int64)
    sizes = {"OFFSET_LAMPORT_SLOTS": 640, "LAMPORT_TOKENS": 4, "ROW_BYTES": 32}
    for ranks, rank, row in ((3, 2, 2 * 4 + 1), (1, 0, 1), (1, 1, 1)):
        _address[(1,)](torch.tensor([1024, rank]), out, S=SimpleNamespace(**sizes, LAMPORT_RANKS=ranks))
        assert out.item() - 1024 - 640 == 32 * row


@triton.jit
def _clear(block, S: tl.constexpr):
    lamport_slots.clear_rows(tl.load(block), S)


@pytest.mark.quick("each workspace has other slots")
@pytest.mark.parametrize("ranks", [2, 1])
def test_only_slots_are_cleared(ranks):
    """Of two ranks, or of one where own rows stay. What is before and behind them belongs to others."""
    region = torch.full((5 + 3 * 8 * 2 + 5,), 7, dtype=torch.int32)
    slots = SimpleNamespace(OFFSET_LAMPORT_SLOTS=5 * 4, LAMPORT_RANKS=ranks, LAMPORT_TOKENS=3, ROW_BYTES=32)
    _clear[(1,)](torch.tensor([region.data_ptr()]), S=SimpleNamespace(**vars(slots), WORLD_SIZE=2, BLOCK_SIZE=16))
    end = 5 + 3 * 8 * ranks
    assert (region[5:end] == 0).all()
    assert (region[:5] == 7).all()
    assert (region[end:] == 7).all()


@triton.jit
def _note(control, refused, call, out):
    lamport_slots.note_refused(control, tl.load(refused))
    tl.store(out, lamport_slots.follows_refusal(control, tl.load(call)).to(tl.int64))


def test_the_call_after_a_refused_one_has_flags():
    """Call 5 is refused: call 6 has flags, and what call 5 was is still known."""
    for before, expected in ((0, {4: 0, 5: 0, 6: 1, 7: 0, 8: 0}), (4, {5: 1, 6: 1, 7: 0, 8: 0})):
        for call, follows in expected.items():
            control, out = torch.zeros(CONTROL_WORDS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            control[COMBINE_WITH_FLAGS + 1] = before + 1 if before else 0
            _note[(1,)](control, torch.tensor([5]), torch.tensor([call]), out)
            assert out.item() == follows
            assert control[COMBINE_WITH_FLAGS].item() == 6


@triton.jit
def _travel(columns, words, back, missing, flip, S: tl.constexpr):
    i = tl.arange(0, 4)
    bits = lamport_slots.bits_of(tl.load(columns + i), tl.load(flip), S)
    tl.store(words.to(tl.pointer_type(bits.dtype), bitcast=True) + i, bits)
    n = tl.arange(0, S.WORDS)
    there = tl.load(words + n)
    tl.store(missing + n, lamport_slots.is_missing(there, S).to(tl.int32))
    tl.store(back + i, lamport_slots.columns_of(there, S))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_travels_is_never_zero(dtype):
    """Columns 1, 2, -0 and a NaN with all bits set, which bf16's rounding never makes."""
    integers = torch.int16 if dtype.itemsize == 2 else torch.int32
    canonical = torch.tensor([0x7FFF if dtype.itemsize == 2 else 0x7FFFFFFF], dtype=integers).view(dtype)
    nan = canonical if dtype == torch.bfloat16 else torch.tensor([-1], dtype=integers).view(dtype)
    columns = torch.cat([torch.tensor([1.0, 2.0, -0.0], dtype=dtype), nan])
    words = torch.zeros(2 if dtype.itemsize == 2 else 4, dtype=torch.int32)
    back, missing = torch.zeros(4), torch.ones(len(words), dtype=torch.int32)
    spec = SimpleNamespace(ROW_DTYPE=TYPES[dtype], SUM_DTYPE=tl.float32, WORDS=len(words))
    _travel[(1,)](columns, words, back, missing, torch.tensor([-1], dtype=torch.int32), S=spec)
    if dtype == torch.bfloat16:
        assert words[0].item() & 0xFFFFFFFF == 0xBFFFC07F
    assert missing.tolist() == [0] * len(words)
    assert torch.equal(back[:3], torch.tensor([1.0, 2.0, -0.0]))
    assert back[3].isnan()
    assert torch.signbit(back[2])
    _travel[(1,)](columns, words, back, missing, torch.tensor([0], dtype=torch.int32), S=spec)
    assert torch.equal(words.view(dtype)[:3].view(integers), columns[:3].view(integers))


@pytest.mark.parametrize("half", [0, 1])
def test_half_a_word_is_not_enough(half):
    words, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    words.view(torch.int16)[half] = -2
    _look[(1,)](words, out, S=SimpleNamespace(ROW_DTYPE=tl.bfloat16))
    assert out.item() == 1


@triton.jit
def _look(words, out, S: tl.constexpr):
    n = tl.arange(0, 1)
    tl.store(out + n, lamport_slots.is_missing(tl.load(words + n), S).to(tl.int32))


@triton.jit
def _columns(piece, out, S: tl.constexpr):
    words = tl.load(piece + tl.arange(0, S.GROUP_SIZE // 2))[None, :]
    tl.store(out + tl.arange(0, S.GROUP_SIZE)[None, :], columns_of(words, S))


@pytest.mark.parametrize("hidden, expected", [(2, [1, 2, 0, 0]), (4, [1, 2, 3, 0.5])])
def test_a_piece_is_taken_apart_and_filled_up_with_zeros(hidden, expected):
    """The piece of ``kernels.dispatch.send``, and two columns that are the row's, or what a masked load left there."""
    spec = SimpleNamespace(INPUT_DTYPE=tl.bfloat16, GROUPS_PER_PIECE=1, GROUP_SIZE=4, HIDDEN_SIZE=hidden)
    out = torch.empty(4)
    _columns[(1,)](torch.tensor([0x40003F80, 0x3F004040], dtype=torch.int32), out, S=spec)
    assert out.tolist() == expected
