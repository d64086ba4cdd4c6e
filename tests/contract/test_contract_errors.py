"""What ``EPBuffers.check`` and ``raise_error`` raise, and whom they blame."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import moelink
from moelink import contract
from moelink.errors import CapacityError, MoelinkError, PeerTimeoutError, ProtocolError, RoutingError
from moelink.memory.protocol import ABORT_RECORD, CODE_OPTIONS, MALFORMED
from tests.contract.contract_ranks import Buffers, dispatch_all, params_of, ranks_of, setup
from tests.support.cases import Case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")

CASE = Case(setup("bf16"), "skewed", weights="none")


def dispatch_ids(eps: list, ids: list[torch.Tensor], **options) -> None:
    """A dispatch of these ids on all ranks, without looking at their values."""
    buffers = [Buffers.allocate(ep, **options) for ep in eps]
    outputs = [(b.handler, b.row_offsets, b.expert_ids, b.src_info) for b in buffers]
    counters, pointers = [ep.atomic_counters[0] for ep in eps], [ep.pointers[0] for ep in eps]
    x = [CASE.data(rank).x[: len(given)] for rank, given in enumerate(ids)]
    routing = [b.routing for b in buffers]
    contract.distributed_ep_dispatch(eps, *zip(*outputs, strict=True), counters, x, ids, pointers, routing)


def test_check_counts_ids_out_of_range() -> None:
    eps = ranks_of(params_of(CASE.setup, 2))
    ids = [CASE.data(rank).topk_ids.clone() for rank in range(2)]
    ids[1][0, 0], ids[1][1, 0] = 7, -2
    dispatch_ids(eps, ids)
    eps[0].check()
    eps[1].raise_error()  # it waits for nothing, so it does not know
    with pytest.raises(RoutingError) as raised:
        eps[1].check()
    assert str(raised.value) == str(RoutingError(1, 2, 7))
    eps[1].check()  # told once


def test_check_counts_rows_that_did_not_fit() -> None:
    eps = ranks_of(params_of(CASE.setup, 2))
    buffers = [Buffers.allocate(ep, rows=9) for ep in eps]
    dispatch_all(eps, buffers, CASE)
    lost = [int(b.routing.overflow) for b in buffers]
    assert any(lost)
    for ep, count in zip(eps, lost, strict=True):
        ep.raise_error()
        if count:
            with pytest.raises(CapacityError, match="capacity 9: .*; allocate more rows for output_tokens") as raised:
                ep.check()
            assert (raised.value.rank, raised.value.dropped, raised.value.capacity) == (ep.my_rank, count, 9)
        ep.check()


def test_check_names_the_rank_that_sent_malformed_data() -> None:
    ep = ranks_of(params_of(CASE.setup, 3))[1]
    ep.check()
    ep.atomic_counters[0][MALFORMED] = 1 << 2
    ep.raise_error()
    with pytest.raises(ProtocolError, match="rank 1: rank 2 sent malformed data") as raised:
        ep.check()
    assert raised.value.peer == 2


def test_a_network_that_stopped_is_told() -> None:
    (ep,) = ranks_of(params_of(CASE.setup, 1))
    stopped = dataclasses.replace(ep, network=SimpleNamespace(failure=MoelinkError("the network stopped")))
    for call in (stopped.check, stopped.raise_error):
        with pytest.raises(MoelinkError, match="the network stopped"):
            call()


def test_a_rank_with_other_options_is_named_on_every_rank() -> None:
    case = dataclasses.replace(CASE, setup=setup("bf16", pre_reduce=True))
    eps = ranks_of(params_of(case.setup, 3))
    weighted = [ep.my_rank == 1 for ep in eps]
    buffers = [Buffers.allocate(ep, weighted=given) for ep, given in zip(eps, weighted, strict=True)]
    for ep, own, given in zip(eps, buffers, weighted, strict=True):
        data = case.data(ep.my_rank)
        contract.ep_dispatch_async(
            ep, ep.atomic_counters[0], data.x, data.topk_ids, ep.pointers[0], own.routing,
            router_weights=data.topk_weights if given else None,
        )  # fmt: skip
    for ep, own in zip(eps, buffers, strict=True):
        contract.ep_dispatch_wait(
            ep, own.handler, own.row_offsets, own.expert_ids, own.src_info, ep.pointers[0], ep.atomic_counters[0],
            own.routing, num_input_tokens=len(case.data(ep.my_rank).x),
        )  # fmt: skip
    words = "rank 1 calls dispatch .* with other options .* expected no topk_weights, .* got topk_weights, no routing;"
    for ep in eps:
        for call in (ep.raise_error, ep.check):
            with pytest.raises(ProtocolError, match=f"rank {ep.my_rank}: {words}"):
                call()
    dispatch_all(eps, [Buffers.allocate(ep) for ep in eps], CASE)  # returns at once
    for ep in eps:
        with pytest.raises(ProtocolError, match=f"rank {ep.my_rank}: {words}"):
            ep.check()


def test_no_error_names_a_rank_that_there_is_not() -> None:
    _, ep, other = ranks_of(params_of(CASE.setup, 3))
    other.record[ABORT_RECORD : ABORT_RECORD + 5] = torch.tensor([CODE_OPTIONS, 2, 4, 0, 1])
    with pytest.raises(ProtocolError) as refused:
        other.raise_error()
    ep.record[:7] = torch.tensor([1, 0, 77, 9, -3, -1, -1])
    with pytest.raises(PeerTimeoutError, match="reported by rank 0") as late:
        ep.check()
    assert (refused.value.peer, late.value.peer, late.value.phase) == (2, 0, "combine")
    with pytest.raises(PeerTimeoutError):  # poisoned for good
        ep.raise_error()


def test_a_communicator_counts_as_the_launchers_do() -> None:
    case = dataclasses.replace(CASE, setup=setup("bf16", capacity=2))
    (ep,) = ranks_of(params_of(case.setup, 1))
    own = Buffers.allocate(ep, rows=2)
    dispatch_all([ep], [own], case)
    with pytest.raises(CapacityError) as launchers:
        ep.check()
    with moelink.init_devices(["cpu"], transport="symmetric", **case.setup.fields) as communicator:
        communicator.dispatch([case.data(0).x], [case.data(0).topk_ids])
        with pytest.raises(CapacityError) as calls:
            communicator.check()
    lost = {"rank": 0, "dropped": int(own.routing.overflow), "capacity": 2}
    assert lost["dropped"] > 0
    for error in (launchers, calls):
        assert {name: value for name, value in vars(error.value).items() if not name.startswith("_")} == lost
