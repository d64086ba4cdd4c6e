"""A dispatch over an earlier one's routing, on the symmetric transport: like any other, but that nothing is counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import moelink
from moelink import ops
from moelink.memory.protocol import CALL_SHIFT, COMBINE_SENT, DISPATCH_RECEIVED, DISPATCH_SENT, INVALID_IDS
from moelink.memory.workspace import Workspace
from moelink.testing import assert_bitwise_equal
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.session import Session
from moelink.transports.symmetric import plans as dispatching
from tests.support.cases import Case, Setup
from tests.support.symmetric_ranks import apart, dispatch_requests, one_process, over, poison_memory

BF16 = Setup("bf16")


def changed(requests, salt):
    """Other rows and other weights for the same ids."""
    generator = torch.Generator().manual_seed(salt)
    return [
        dataclasses.replace(
            request,
            x=torch.randn(request.x.shape, generator=generator).to(request.x.dtype),
            topk_weights=None
            if request.topk_weights is None
            else torch.rand(request.topk_weights.shape, generator=generator).to(request.topk_weights.dtype),
        )
        for request in requests
    ]


def written(config, recv):
    """What a dispatch promises to have written: rows before the last offset, scales in order, and every count."""
    rows = int(recv.row_offsets[-1])
    fields = {
        name: getattr(recv, name)
        for name in ("row_offsets", "expert_ids", "scales_offsets", "num_recv_tokens", "overflow")
    }
    for name in ("tokens", "src_info", "weights", "topk_ids", "topk_weights"):
        value = getattr(recv, name)
        fields[name] = None if value is None else value[:rows]
    scales = recv.scales
    if scales is not None:
        width = config.format.scale_width(config.hidden_size)
        shape = (rows, width)
        if config.layout == "expert":
            shape = config.format.scale_layout.shape(rows, width, config.num_groups)
        fields["scales"] = scales[tuple(slice(size) for size in shape)]
    received = recv.handle.routing.parts.received
    fields |= {"counts": recv.handle.counts, "received": received.view(-1)[: 2 * len(received) - 1]}
    return fields


def assert_alike(config, got, expected):
    a, b = written(config, got), written(config, expected)
    for name in b:
        assert (a[name] is None) == (b[name] is None), name
        if b[name] is not None:
            assert a[name].shape == b[name].shape, name
            assert_bitwise_equal(a[name].contiguous(), b[name].contiguous())


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_nothing_is_counted(layout, filled_memory):
    """What counting would read, and what it would exchange, is nonsense; the rows are right."""
    setup = Setup("mxfp8", (("layout", layout),))
    case, ranks = Case(setup, "uniform", small=True), range(3)
    transport = one_process(setup.fields, 3)
    requests = dispatch_requests(case, ranks)
    first = transport.dispatch(requests).wait()
    for rank in transport.ranks:
        regions = {region.name: region.view(rank.memory.local) for region in rank.workspace.regions}
        poison_memory(regions["block_counts"], regions["firsts"], regions["messages"])
        regions["counts"][:] = 0  # of no call
    again = over(first, changed(requests, 1))
    if layout == "expert":  # ids of the layout "rank" are an output
        again = [dataclasses.replace(r, topk_ids=torch.full_like(r.topk_ids, 99)) for r in again]
    got = transport.dispatch(again).wait()
    positions = transport._workspace.message["positions"]
    for rank in transport.ranks:
        messages = Workspace(rank.config).regions["messages"].view(rank.memory.local)
        assert (messages[:, :, positions.offset : positions.end] == 0xAA).all(), "positions travelled"
        assert rank.control[INVALID_IDS] == 0
    expected = transport.dispatch(changed(requests, 1)).wait()
    for rank in ranks:
        assert_alike(setup.config(3, rank), got[rank], expected[rank])


def test_what_is_noted_is_shared_and_not_written_again(filled_memory):
    case = Case(BF16, "uniform")
    transport = one_process(BF16.fields, 2)
    first = transport.dispatch(dispatch_requests(case, [0, 1])).wait()
    transport.dispatch(dispatch_requests(dataclasses.replace(case, seed=1), [0, 1])).wait()
    before = [[value.clone() for value in recv.handle.routing.parts] for recv in first]
    again = transport.dispatch(over(first, changed(dispatch_requests(case, [0, 1]), 3))).wait()
    for recv, old, kept in zip(again, first, before, strict=True):
        parts, olds = recv.handle.routing.parts, old.handle.routing.parts
        assert recv.handle.routing.addresses == tuple(part.data_ptr() for part in parts)
        for name, part, noted, value in zip(parts._fields, parts, olds, kept, strict=True):
            assert torch.equal(noted, value), name
            assert (part.data_ptr() == noted.data_ptr()) == (name != "received"), name
        assert olds.sent[-1] == 1, "the call that made the routing"


def dispatched(ranks, requests):
    """What each rank gets, or the error that it raises."""
    pending = [transport.dispatch([request]) for transport, request in zip(ranks, requests, strict=True)]
    results: list[Any] = []
    for one in pending:
        try:
            results.append(one.wait()[0])
        except moelink.MoelinkError as error:
            results.append(error)
    return results


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_rank_that_counts_where_others_do_not_is_named_by_all(odd):
    ranks, case = apart(BF16, 3), Case(BF16, "uniform", small=True)
    requests = dispatch_requests(case, range(3))
    first = dispatched(ranks, requests)
    mixed = over(first, requests)
    mixed[odd] = requests[odd]
    for error in dispatched(ranks, mixed):
        assert isinstance(error, moelink.ProtocolError)
        assert error.peer == odd
        assert "with other options than most ranks" in str(error)
    assert not any(isinstance(r, Exception) for r in dispatched(ranks, over(first, requests)))


def test_routings_of_different_calls_are_refused_by_all():
    ranks, case = apart(BF16, 4), Case(BF16, "uniform", small=True)
    requests = dispatch_requests(case, range(4))
    calls = [dispatched(ranks, requests) for _ in range(3)]
    for choice, blamed in (((0, 0, 1, 0), 2), ((0, 1, 1, 0), 1), ((2, 0, 1, 1), 0), ((0, 1, 2, 0), 1)):
        errors = dispatched(ranks, over([calls[c][rank] for rank, c in enumerate(choice)], requests))
        for error in errors:
            assert isinstance(error, moelink.ProtocolError)
            assert error.peer == blamed, choice
            assert "over the routing of another call" in str(error)
    # One that reuses it is as good as the call itself.
    again = dispatched(ranks, over(calls[1], requests))
    assert not any(isinstance(r, Exception) for r in dispatched(ranks, over([*again[:2], *calls[1][2:]], requests)))


def output_of(pending):
    """The output of a call under way: what a refused one leaves."""
    return pending._finish.__closure__[0].cell_contents[0].output


@pytest.mark.parametrize("fused", [False, True])
def test_the_routing_of_a_refused_call_is_no_call(fused):
    """Who refused has no output, so makes no call either; what it does next is in step with its peers."""
    ranks, case = apart(BF16, 2), Case(BF16, "uniform", small=True)
    requests = dispatch_requests(case, range(2))
    ranks[0].refuse("dispatch")
    pending = ranks[1].dispatch(requests[1:])
    refused = output_of(pending)
    with pytest.raises(moelink.PeerAbortedError):
        pending.wait()
    assert refused.handle.routing.parts.received[-1, 0] == 1
    for _ in range(2):
        (again,) = ranks[1].dispatch(over([refused], requests[1:]), fused=fused).wait()
        assert again.row_offsets.tolist() == [0] * len(again.row_offsets)
        assert int(again.num_recv_tokens) == 0
        assert again.handle.routing.parts.received[-1, 0] == 1
        refused = again
    control = ranks[1].ranks[0].control
    assert control[DISPATCH_SENT] == control[DISPATCH_RECEIVED] == 1 << CALL_SHIFT
    first = dispatched(ranks, requests)
    for recv in dispatched(ranks, over(first, requests)):
        assert int(recv.num_recv_tokens) > 0


def test_arguments_refused_over_a_refused_call_are_no_call():
    """Where errors are raised late a rank can hold such an output. Its peers make no call over it, so nor may it."""
    ranks, case = apart(BF16, 3), Case(BF16, "uniform", small=True)
    requests = dispatch_requests(case, range(3))
    ranks[0].refuse("dispatch")
    pending = [transport.dispatch([request]) for transport, request in zip(ranks[1:], requests[1:], strict=True)]
    refused = [output_of(one) for one in pending]
    for one in pending:
        with pytest.raises(moelink.PeerAbortedError):
            one.wait()
    (bad,) = over(refused[:1], [dataclasses.replace(requests[1], x=requests[1].x[:1])])
    session = Session([ranks[1].ranks[0].config], [torch.device("cpu")], ranks[1], "test")
    with pytest.raises(moelink.ArgumentError, match="rows of the reused routing"):
        session.call([bad])
    ranks[2].dispatch(over(refused[1:], requests[2:])).wait()
    y = torch.zeros(len(refused[0].tokens), ranks[0].ranks[0].config.hidden_size, dtype=torch.bfloat16)
    with pytest.raises(moelink.ArgumentError, match="y: expected shape"):
        session.call([CombineRequest(y[:, :8], refused[0])])
    ranks[2].combine([CombineRequest(y, refused[1])]).wait()
    assert [transport.ranks[0].control[COMBINE_SENT] for transport in ranks] == [0] * 3
    assert [transport.ranks[0].control[DISPATCH_SENT] for transport in ranks] == [1 << CALL_SHIFT] * 3
    assert not any(isinstance(result, Exception) for result in dispatched(ranks, requests))


def test_a_refused_call_leaves_the_routing_as_it_was():
    ranks, case = apart(BF16, 2), Case(BF16, "uniform", small=True)
    requests = dispatch_requests(case, range(2))
    first = dispatched(ranks, requests)
    for _ in range(2):
        ranks[0].refuse("dispatch")
        pending = ranks[1].dispatch(over(first, requests)[1:])
        failed = output_of(pending)
        with pytest.raises(moelink.PeerAbortedError) as error:
            pending.wait()
        assert error.value.peer == 0
        assert failed.handle.routing.parts.received[-1, 0] == 1
        assert first[1].handle.routing.parts.received[-1, 0] == 0
    again = dispatched(ranks, over(first, requests))
    for rank in range(2):
        assert_alike(BF16.config(2, rank), again[rank], first[rank])


def one_rank(**changes):
    sizes = {"num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": 4, "transport": "symmetric"}
    return moelink.init(**{**sizes, **changes})


IDS = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]])


@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_gradients_of_combine_take_it(monkeypatch, fmt, layout):
    made = []
    spec_of = dispatching.dispatch_spec

    def noted(*args, **options):
        spec = spec_of(*args, **options)
        made.append((bool(spec.CACHED_ROUTING), options["input_dtype"]))
        return spec

    monkeypatch.setattr(dispatching, "dispatch_spec", noted)
    with one_rank(dispatch_format=fmt, layout=layout) as ep:
        x = torch.randn(4, 128).bfloat16().requires_grad_()
        recv = ep.dispatch(x, IDS)
        out = ep.combine(ops.dequantize(ep, recv), recv)
        assert made == [(False, torch.bfloat16)]
        out.sum().backward()
        assert made[1:] == [(True, torch.bfloat16)]
        assert (x.grad == (1 if layout == "rank" else 2)).all()


def test_an_operator_over_a_routing_hands_out_what_is_its_own():
    """Whether a call brought anything is its own; a later combine must not take it from the routing's call."""
    with one_rank(dispatch_format="fp32", combine_dtype=torch.float32) as ep:
        x = torch.randn(4, 128)
        first = ep.dispatch(x, IDS)
        again = ops.call(ep._context, DispatchRequest(x, IDS, routing=first))
        plan, parts = first.handle.routing, again.handle.routing.tensors
        notes, received = parts
        assert notes.data_ptr() == plan.notes.data_ptr()
        assert not plan.notes.data_ptr() <= received.data_ptr() < plan.notes.data_ptr() + plan.notes.nbytes
        assert torch.equal(received.view(-1)[:3], plan.parts.received.view(-1)[:3])
        third = ep.dispatch(x.requires_grad_(), None, routing=again)
        assert_bitwise_equal(third.tokens, first.tokens)
        ep.combine(third.tokens, third).sum().backward()
