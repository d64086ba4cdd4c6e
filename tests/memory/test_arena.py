"""Small tensors of an output in one allocation: made when somebody looks, apart for operators."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import moelink
from moelink.output import ArenaLayout, Blank, DispatchOutput
from moelink.testing import assert_bitwise_equal
from moelink.transports.base import DispatchRequest
from moelink_bench.played import played

SIZES = {"num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": 5}
FIELDS = {**SIZES, "transport": "symmetric"}
SMALL = {"row_offsets", "expert_ids", "src_info", "weights", "num_recv_tokens", "overflow"}


def test_places_are_multiples_of_16_bytes_and_do_not_overlap() -> None:
    blanks = {"a": Blank.of(3), "b": Blank.of(), "c": Blank.of(5, dtype=torch.float64), "d": Blank.of(0, 7)}
    layout = ArenaLayout.of(blanks.items())
    assert [begin for begin, _ in layout.places.values()] == [0, 16, 32, 80]
    assert layout.words == 20
    memory = torch.empty(layout.words, dtype=torch.int32)
    assert memory.numel() == 20
    tensors = {name: layout.tensor(memory, name) for name in blanks}
    for name, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (blanks[name].shape, blanks[name].dtype)
        tensor.fill_(ord(name))
    assert all(bool((tensor == ord(name)).all()) for name, tensor in tensors.items())


def test_fields_are_made_at_the_first_look_and_kept() -> None:
    """By an ordinary call and by a quick one."""
    x, ids, weights = torch.randn(3, 128).bfloat16(), torch.tensor([[0, 3], [1, -1], [2, 2]]), torch.rand(3, 2)
    with played(**SIZES) as ep:
        for _ in range(2):
            recv = ep.dispatch(x, ids, weights)
            assert vars(recv).keys() - {"scales"} == {"_source", "tokens"}
            assert recv.row_offsets.shape == (5,)
            assert recv.row_offsets is recv.row_offsets
            assert recv.scales is recv.topk_ids is recv.host_counts is None
            assert "src_info" not in vars(recv)
            storage = recv.row_offsets.untyped_storage().data_ptr()
            assert {getattr(recv, name).untyped_storage().data_ptr() for name in SMALL} == {storage}
            assert recv.tokens.untyped_storage().data_ptr() != storage
            handle = recv.handle
            assert handle is recv.handle
            assert (handle.owner, handle.rank, handle.num_tokens) == (ep._session.identity, 0, 3)
            assert handle.topk_ids is ids
            assert handle.topk_weights is weights
            assert handle.ids_version == ids._version
            assert handle.counts.shape == (4, 1)
            for tensor in (handle.counts, handle.routing.notes):
                assert tensor.untyped_storage().data_ptr() == storage
            for other in (dataclasses.replace(recv), copy.copy(recv)):
                assert all(getattr(other, name) is getattr(recv, name) for name in (*SMALL, "tokens", "handle"))
            for name in ("rows", "counts", "notes"):  # the last two are in the arena, but no fields of an output
                with pytest.raises(AttributeError, match=f"DispatchOutput has no attribute '{name}'"):
                    getattr(recv, name)
    assert not hasattr(object.__new__(DispatchOutput), "row_offsets")


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_results_of_operators_share_no_memory(layout: str) -> None:
    with moelink.init(**FIELDS, layout=layout) as ep:
        x, ids = torch.randn(3, 128).bfloat16(), torch.tensor([[0, 3], [1, -1], [2, 2]])
        request = DispatchRequest(x, ids, torch.rand(3, 2), separate=True)
        (apart,) = ep._session.call([request], fused=True).wait()
        recv = ep.dispatch(x, ids, request.topk_weights)
        names = [
            field.name for field in dataclasses.fields(recv) if isinstance(getattr(recv, field.name), torch.Tensor)
        ]
        storages = [getattr(apart, name).untyped_storage().data_ptr() for name in names]
        storages += [apart.handle.counts.untyped_storage().data_ptr(), apart.handle.routing.notes.data_ptr()]
        assert len(set(storages)) == len(storages)
        rows = int(recv.row_offsets[-1])
        for name in names:
            mine, other = getattr(recv, name), getattr(apart, name)
            cut = slice(rows) if mine.dim() and mine.shape[0] == len(recv.tokens) else ...
            assert_bitwise_equal(other[cut], mine[cut], name)
