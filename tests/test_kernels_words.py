"""The small integers in the docstrings of kernels whose words are their own signal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import moelink.workspace as workspaces
from moelink.kernels import small_calls, tagged, tagged_rows
from moelink.kernels.spec import dispatch_spec
from moelink.transports.base import DispatchRequest
from symmetric_ranks import one_process

SMALL = dict(num_experts=4, topk=2, hidden_size=8, max_tokens_per_rank=4)


@triton.jit
def _pack_bytes(row, words, call):
    tl.store(words + tl.arange(0, 2), tagged.words_of(tl.load(row + tl.arange(0, 8)), call))


def test_bytes_are_in_a_word_as_they_are_in_memory():
    words = torch.zeros(2, dtype=torch.int64)
    _pack_bytes[(1,)](torch.tensor([1, 2, 3, 0xF4, 0, 0xFF, 0, 5], dtype=torch.uint8), words, 7)
    assert [f"{word:016x}" for word in words.tolist()] == ["00000007f4030201", "000000070500ff00"]


@triton.jit
def _address(block, out, S: tl.constexpr):
    tl.store(out, small_calls.words_at(tl.load(block), tl.load(block + 1), 1, S).to(tl.int64))


def test_rows_of_small_calls_lie_side_by_side():
    """The example of ``kernels.small_calls``, in a region at offset 640 of a block at address 1024."""
    out = torch.zeros(1, dtype=torch.int64)
    _address[(1,)](torch.tensor([1024, 2]), out, S=SimpleNamespace(O_TAGGED=640, TAGGED=4, TW=32))
    assert out.item() - 1024 - 640 == 8 * 32 * (2 * 4 + 1)


def test_a_message_of_words(monkeypatch):
    """The examples of ``kernels.tagged_messages`` and ``kernels.place_words``."""
    monkeypatch.setattr(workspaces, "TAGGED_MESSAGE_BYTES", 1 << 12)
    dispatch_spec.cache_clear()
    transport = one_process(SMALL, 2)
    x = torch.arange(8, dtype=torch.bfloat16)[None]
    ids = [torch.tensor([[3, -1]]), torch.zeros(0, 2, dtype=torch.int64)]
    for _ in range(3):
        recv = transport.dispatch([DispatchRequest(x[: len(i)], i) for i in ids]).wait()[1]
    dispatch_spec.cache_clear()
    words = transport.ranks[1].workspace.regions["tagged_messages"].view(transport.ranks[1].memory.local)[0, 0]
    assert torch.equal((words[:4] & 0xFFFFFFFF).to(torch.int32), x.view(torch.int32)[0])
    text = [f"{word:016x}" for word in words.tolist()]
    assert {word[:8] for word in text[:4]} == {"00000003"}
    assert [text[i] for i in (4, 8, 9, 12, 13)] == [
        "0000000300000000", "0000000300000001", "00000003ffffffff", "0000000300000000", "0000000300000000",
    ]  # fmt: skip
    assert torch.equal(recv.tokens[:1], x)
    assert recv.src_info[0].tolist() == [0, 0, 0]


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
