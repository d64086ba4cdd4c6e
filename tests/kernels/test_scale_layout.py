"""Scales in their layout by a launch of their own (``kernels.dispatch.scales``) are those that receivers store."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moelink
from moelink.kernels.dispatch.scales import ep_lay_out_scales_kernel
from moelink.kernels.launch import grid as cut
from moelink.kernels.launch.constants import dispatch_spec
from moelink.kernels.records import DispatchNumbers
from moelink.memory.workspace import Workspace
from moelink.tuning import MANY_TOKENS
from tests.support.symmetric_ranks import one_process


@pytest.mark.parametrize(
    "fmt, tokens, layout, expected",
    [
        ("fp8_block128", MANY_TOKENS + 1, "expert", True), ("nvfp4", MANY_TOKENS + 1, "expert", True),
        ("fp8_block128", MANY_TOKENS, "expert", False), ("bf16", MANY_TOKENS + 1, "expert", False),
        ("fp8_block128", MANY_TOKENS + 1, "rank", False),
    ],
)  # fmt: skip
def test_only_scattered_scales_of_many_tokens_wait(fmt, tokens, layout, expected):
    config = moelink.EPConfig(
        num_experts=4, topk=2, hidden_size=256, max_tokens_per_rank=tokens, dispatch_format=fmt, layout=layout,
        world_size=2, rank=0,
    )  # fmt: skip
    for later in (True, False):
        spec = dispatch_spec(
            Workspace(config), torch.device("cuda"), input_dtype=torch.bfloat16, quantized=False, weights=True,
            later=later,
        )  # fmt: skip
        assert bool(spec.SCALES_LATER) == (expected and later)


def lay_out(fmt, scales, message_of_row, row_offsets):
    """What the kernel makes of ``scales`` [messages, bytes] uint8."""
    rows = int(row_offsets[-1])
    sizes = dict(num_experts=2, topk=1, hidden_size=2048, max_tokens_per_rank=len(scales))
    transport = one_process({**sizes, "dispatch_format": fmt}, 1)
    rank = transport.ranks[0]
    part = rank.workspace.message["scales"]
    messages = rank.workspace.regions["messages"].view(rank.memory.local)[0]
    messages[:, part.offset : part.offset + scales.shape[1]] = scales
    spec = dispatch_spec(rank.workspace, rank.device, input_dtype=torch.bfloat16, quantized=False, weights=False)
    out = torch.full((rows * 1024,), 0xAA, dtype=torch.uint8)
    noted = (torch.tensor(row_offsets, dtype=torch.int32), torch.tensor(message_of_row, dtype=torch.int32))
    kernel = rank.launcher.kernel(ep_lay_out_scales_kernel, 2, S=spec)
    numbers = DispatchNumbers(*[0] * 17)._replace(num_groups=len(row_offsets) - 1, scale_rows=rows, programs=2)
    rank.launcher.launch(kernel, lambda _: (*noted, out), numbers)
    transport.close()
    return out


def test_example():
    """Row 33 of the first tile, columns 4 to 7: word 133. What no message stands behind is zero."""
    scales = torch.arange(6 * 128).remainder(251).to(torch.uint8).view(6, 128)
    numbers = [5] * 134
    numbers[33], numbers[34], numbers[35], numbers[131] = 3, -1, 600, 2
    words = lay_out("nvfp4", scales, numbers, [0, 130, 134]).view(torch.int32)
    expected = scales.view(torch.int32)
    assert words[133] == expected[3, 1]
    for row, word in ((34, 4 * 2 + 1), (35, 4 * 3 + 1), (31, 4 * 31)):
        assert words[word] == (expected[5, 0] if row == 31 else 0)
    # The third tile is the second group's: 4 rows, and zeros behind them.
    third = words[2 * 32 * 128 :][: 32 * 128].view(32, 32, 4)
    assert third[7, :4, 0].tolist() == [expected[5, 7], expected[2, 7], expected[5, 7], expected[5, 7]]
    assert third[:, 4:].count_nonzero() == 0
    assert third[:, :, 1:].count_nonzero() == 0


def test_columns_of_all_rows():
    scales = torch.arange(6 * 64).remainder(251).to(torch.uint8).view(6, 64)
    numbers = [row % 6 for row in range(134)]
    words = lay_out("fp8_block128", scales, numbers, [0, 130, 134]).view(torch.int32)
    assert torch.equal(words[: 16 * 134].view(16, 134), scales.view(torch.int32)[numbers].T)
    assert words[16 * 134 :].eq(words[-1]).all()


def test_an_sm_limit_is_kept(monkeypatch):
    monkeypatch.setattr(cut, "sm_count", lambda device: 132)
    config = moelink.EPConfig(num_experts=4, topk=2, hidden_size=256, max_tokens_per_rank=512, world_size=2, rank=0)
    cuda = torch.device("cuda")
    assert cut.layout_launch(config, cuda).receive == 660
    assert cut.layout_launch(dataclasses.replace(config, num_sms=16), cuda).receive == 80
