"""Outputs that a call is to overwrite: each tensor is refused unless it is what the call would have made itself, as on
a device nothing else stops a kernel from storing past its end."""

import dataclasses

import pytest
import torch

import moelink
from moelink import epilogues
from moelink.testing import assert_bitwise_equal, rank_data
from tests.support.cases import FIELDS

SIZES = {"num_experts": 6, "topk": 2, "hidden_size": 256, "max_tokens_per_rank": 4}


def call(**options):
    """A communicator of one rank, and arguments for its dispatch."""
    ep = moelink.init(**SIZES, transport="collective", **options)
    d = rank_data(seed=8, rank=0, num_tokens=3, hidden_size=256, num_experts=6, topk=2)
    return ep, (d.x, d.topk_ids, d.topk_weights)


def present(recv):
    return [name for name in FIELDS if getattr(recv, name) is not None]


def with_room(tensor, offset):
    """``tensor`` again, ``offset`` bytes past a multiple of 16."""
    room = torch.zeros(tensor.nbytes + 16 + offset, dtype=torch.uint8)
    begin = -room.data_ptr() % 16 + offset
    return room[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_every_tensor_of_a_reused_output_has_to_be_of_its_size_type_and_alignment(fmt, layout):
    ep, arguments = call(dispatch_format=fmt, layout=layout)
    with ep:
        good = ep.dispatch(*arguments)
        spoiled = 0
        for name in present(good):
            tensor = getattr(good, name)
            others = {
                r"expected shape ": torch.zeros(*tensor.shape, 1, dtype=tensor.dtype),
                r"expected dtype ": tensor.view(torch.int8) if tensor.dtype == torch.uint8 else tensor.to(torch.bool),
                r"expected memory that begins at a multiple of 16 bytes": with_room(tensor, 8),
                r"expected a tensor, got str": "tensor",
            }
            if tensor.dim():
                others[r"expected shape \["] = tensor[:-1]
            for expected, other in others.items():
                with pytest.raises(moelink.ArgumentError, match=rf"^out\.{name}: {expected}"):
                    ep.dispatch(*arguments, out=dataclasses.replace(good, **{name: other}))
                spoiled += 1
        assert spoiled >= 5 * len(present(good)) - 2  # but for two scalars, which cannot be shorter
        fresh = {name: with_room(getattr(good, name), 16) for name in present(good)}
        again = ep.dispatch(*arguments, out=dataclasses.replace(good, **fresh))
        rows = int(good.row_offsets[-1])
        for name in present(good):
            assert getattr(again, name) is fresh[name]
        assert_bitwise_equal(again.tokens[:rows], good.tokens[:rows])


def test_an_output_of_a_smaller_communicator_is_refused():
    """As many rows, fewer experts: its offsets are too few."""
    ep, arguments = call(capacity=8)
    with ep, moelink.init(**{**SIZES, "num_experts": 3}, capacity=8, transport="collective") as other:
        smaller = other.dispatch(arguments[0], arguments[1] % 3, arguments[2])
        assert smaller.tokens.shape == ep.dispatch(*arguments).tokens.shape
        with pytest.raises(moelink.ArgumentError, match=r"^out.row_offsets: expected shape \[7\], got \[4\]$"):
            ep.dispatch(*arguments, out=smaller)


def test_what_a_call_does_not_return_is_refused():
    ep, arguments = call()
    with ep:
        good = ep.dispatch(*arguments)
        with pytest.raises(
            moelink.ArgumentError, match=r"^out.scales: expected None, which a call like this returns, got"
        ):
            ep.dispatch(*arguments, out=dataclasses.replace(good, scales=good.weights))


def test_what_a_call_reads_cannot_be_what_it_overwrites():
    ep, (x, ids, weights) = call(dispatch_format="fp32", combine_dtype=torch.float32)
    own = "expected memory of its own, got memory that the call reads, too$"
    with ep:
        recv = ep.dispatch(x.float(), ids, weights)
        with pytest.raises(moelink.ArgumentError, match=f"^out.tokens: {own}"):
            ep.dispatch(recv.tokens[:3], ids, weights, out=recv)
        with pytest.raises(moelink.ArgumentError, match=f"^out.expert_ids: {own}"):
            ep.dispatch(x.float(), recv.expert_ids.view(3, 2), weights, out=recv)
        y = recv.tokens.clone()
        with pytest.raises(moelink.ArgumentError, match=f"^out: {own}"):
            ep.combine(y, recv, out=y[1:4])
        residuals = torch.ones(4, 256)
        with pytest.raises(moelink.ArgumentError, match=f"^out: {own}"):
            ep.combine(y, recv, epilogue=residuals[1:], out=residuals[:3])
        want = ep.combine(y, recv, epilogue=residuals[:3])
        assert_bitwise_equal(ep.combine(y, recv, epilogue=residuals[:3], out=residuals[:3]), want)


IDENTITY, REVERSED = torch.arange(4).view(4, 1), torch.arange(3, -1, -1).view(4, 1)
FORMS = {
    "call": lambda ep, x, ids, out: ep.dispatch(x, ids, out=out),
    "async": lambda ep, x, ids, out: ep.dispatch_async(x, ids, out=out).wait(),
    "bound": lambda ep, x, ids, out: ep.bind(x, ids, out=out)(),
    "over itself": lambda ep, x, ids, out: ep.dispatch(x, None, routing=out, out=out),
}


@pytest.mark.quick("each form of a call renews the output at a place of its own")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_a_reused_output_is_that_of_the_later_dispatch(transport, form):
    """Combined by its former routing, rows of the later dispatch went home to other tokens."""
    fields = {"num_experts": 4, "topk": 1, "hidden_size": 8, "max_tokens_per_rank": 4, "device": "cpu"}
    with moelink.init(**fields, transport=transport) as ep:
        x = torch.arange(4.0).repeat_interleave(8).view(4, 8).bfloat16()
        recv = ep.dispatch(x, IDENTITY)
        tokens = recv.tokens
        assert ep.combine(recv.tokens, recv)[:, 0].tolist() == [0, 1, 2, 3]
        made = FORMS[form](ep, x + 1, REVERSED, recv)
        assert made is recv
        assert recv.tokens is tokens
        for _ in range(2):
            assert ep.combine(recv.tokens, recv)[:, 0].tolist() == [1, 2, 3, 4]


def test_a_dropped_dispatch_renews_the_output_that_it_overwrites():
    with moelink.init(**{**SIZES, "topk": 1, "num_experts": 4}, transport="symmetric") as ep:
        x = torch.arange(4.0).repeat_interleave(256).view(4, 256).bfloat16()
        recv = ep.dispatch(x, IDENTITY)
        ep.dispatch_async(x + 1, REVERSED, out=recv)
        ep.check()
        assert ep.combine(recv.tokens, recv)[:, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_a_hook_of_kernels_stores_into_its_own_tensors_alone(transport):
    with moelink.init(**{**SIZES, "topk": 1, "num_experts": 4}, transport=transport) as ep:
        x = torch.ones(4, 256, dtype=torch.bfloat16)
        recv = ep.dispatch(x, IDENTITY)
        room = torch.zeros(5, 256)
        hook = epilogues.cast(room[1:])
        with pytest.raises(moelink.ArgumentError, match=r"^out: expected None or a tensor of the epilogue's hook"):
            ep.combine(recv.tokens, recv, epilogue=hook, out=torch.empty(4, 256))
        assert ep.combine(recv.tokens, recv, epilogue=hook, out=room[1:]).eq(1).all()
        assert room.sum(1).tolist() == [0, 256, 256, 256, 256]
        nothing = ep.dispatch(x[:0], IDENTITY[:0])
        assert ep.combine(nothing.tokens, nothing, epilogue=epilogues.cast(room), out=room[:0]).shape == (0, 256)
