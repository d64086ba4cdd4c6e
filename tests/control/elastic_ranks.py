"""Ranks that mask and admit in the tests of both: with bad arguments, and with deaths in the middle of a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moelink
from moelink.communicator import open_communicator
from moelink.control import handshake, recovery
from moelink.control.group import meet
from moelink.memory.cuda_blocks import CudaMemory
from moelink.transports import build as set_up
from tests.memory.played_driver import PlayedDriver
from tests.support.fault_ranks import FIELDS, check_round_trip, data, die
from tests.support.patience import ROOMY, be_patient, until


def opened(rank: int, world_size: int, port: int, **options: Any) -> tuple[moelink.Communicator, Any]:
    """Return the communicator of ranks that no launcher's store keeps together, and the store that the test hosts."""
    be_patient()
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if rank >= world_size:  # a process for later
        return None, store  # type: ignore[return-value]
    world = meet(dist.PrefixStore("init", store), rank, world_size, ROOMY)
    config = moelink.EPConfig(**FIELDS, timeout=ROOMY, world_size=world_size, rank=rank, **options)
    return open_communicator(config, torch.device("cpu"), world), store


def over_devices(rank: int, processes: int, port: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn(rank, processes, port, *args)`` with blocks as those of CUDA devices in place of CPU ranks' own."""

    class Played:
        @staticmethod
        def create(
            nbytes: int,
            *,
            rank: int,
            world_size: int,
            exchange: Any,
            members: Any = None,
            fill: Any = lambda block: None,
        ) -> CudaMemory:
            driver, ranks = PlayedDriver(), range(world_size) if members is None else members
            memory = CudaMemory.create_with(
                nbytes,
                driver=lambda: driver,
                rank=rank,
                world_size=world_size,
                members=ranks,
                exchange=exchange,
                fill=fill,
            )
            if members is not None:
                return memory
            # Like torch's: mapped by another library, which unmaps its blocks in the end.
            return CudaMemory(rank, [memory.peer(r) for r in range(world_size)], lambda: driver)

    set_up.PosixMemory = Played  # type: ignore[assignment, misc]
    return fn(rank, processes, port, *args)


def gathered(store: Any, what: str, ranks: Any, rank: int) -> None:
    """Wait for ``ranks``."""
    store.set(f"{what} {rank}", "1")
    until(lambda: store.check([f"{what} {peer}" for peer in ranks]))


BAD_MASKS = ([], [0], [0, 1, 2], [3], [-1], [1, 1], [True], 1, None)
"""For rank 0."""


def bad_input(rank: int, processes: int, port: int) -> bool:
    """Of 3 ranks and a newcomer: what cannot be masked or admitted is refused by name, and nothing has changed."""
    ep, store = opened(rank, 3, port, transport="collective")
    if rank == 3:
        return bad_newcomer(store)
    check_round_trip(ep, rank)
    if rank == 0:
        for ranks in BAD_MASKS:
            with pytest.raises(moelink.ArgumentError, match="ranks: expected"):
                ep.mask(ranks)
        with pytest.raises(moelink.ArgumentError, match=r"last copies of experts \[5, 6\]"):
            ep.mask([2], experts=range(7))
        with pytest.raises(moelink.ArgumentError, match="experts: expected the expert of each of 7 slots"):
            ep.mask([2], experts=[0])
    with pytest.raises(moelink.ArgumentError, match="ranks: expected some of .*, the ranks that are masked"):
        ep.admit([(rank + 1) % 3], store)
    with pytest.raises(moelink.ArgumentError, match="expected ranks that are masked, not this one"):
        ep.admit([rank], store)
    check_round_trip(ep, rank)
    assert ep.present == (0, 1, 2)
    recv = ep.dispatch(data(rank).x, data(rank).topk_ids)
    gathered(store, "about to mask", range(3), rank)
    if rank == 2:
        with pytest.raises(moelink.RankMaskedError, match="rank 2: rank 2 itself is masked"):
            check_round_trip(ep, rank)
        ep.close()
        return True
    assert ep.mask([2], experts=(0, 1, 2, 0, 1, 0, 1)).present == (0, 1)
    with pytest.raises(moelink.ForeignHandleError):
        ep.combine(recv.tokens, recv)
    check_left(ep, rank)
    with pytest.raises(moelink.ArgumentError if rank == 0 else moelink.PeerAbortedError):
        ep.admit([1] if rank == 0 else [2], store)  # rank 1 takes part
    check_left(ep, rank)
    for field in ("hidden_size", "moelink"):
        store.set(f"admit with another {field}", "1")
        with pytest.raises(moelink.ConfigMismatchError, match=field) as caught:
            ep.admit([2], store)
        assert "2" in str(caught.value)
        assert ep.present == (0, 1)
        check_left(ep, rank)
    store.set("admit", "1")
    assert ep.admit([2], store).present == (0, 1, 2)
    check_round_trip(ep, rank)
    ep.close()
    return True


def bad_newcomer(store: Any) -> bool:
    """Join with other sizes, as another version, and as the others."""
    fields = {**FIELDS, "timeout": ROOMY, "transport": "collective"}
    until(lambda: store.check(["admit with another hidden_size"]))
    with pytest.raises(moelink.ConfigMismatchError, match="hidden_size"):
        moelink.join(store, 2, 3, **{**fields, "hidden_size": 32})
    until(lambda: store.check(["admit with another moelink"]))
    version, handshake.__version__ = handshake.__version__, "0.0"
    with pytest.raises(moelink.ConfigMismatchError, match="version"):
        moelink.join(store, 2, 3, **fields)
    handshake.__version__ = version
    until(lambda: store.check(["admit"]))
    ep = moelink.join(store, 2, 3, **fields)
    check_round_trip(ep, 2)
    ep.close()
    return True


def check_left(ep: moelink.Communicator, rank: int) -> None:
    """Make a pair without the experts of masked ranks."""
    d = data(rank)
    recv = ep.dispatch(d.x, d.topk_ids)
    out = ep.combine(recv.tokens, recv)
    there = (d.topk_ids >= 0) & ~ep.absent_experts[d.topk_ids.clamp(min=0).long()]
    torch.testing.assert_close(out, d.x * there.sum(1, keepdim=True), rtol=0, atol=0)
    assert int(recv.masked) == int(((d.topk_ids >= 0) & ~there).sum())


def death_in_mask(rank: int, processes: int, port: int, moment: str) -> tuple[str, int] | None:
    """Of 4 ranks that mask rank 3, rank 0 dies: before it proposes, when it would meet, or when it sets up."""
    ep, store = opened(rank, 4, port, transport="collective")
    check_round_trip(ep, rank)
    gathered(store, "about to mask", range(4), rank)
    if rank == 3:
        die()
    if rank == 0:
        if moment == "meeting":
            recovery.meet = lambda *_, **__: die()
        elif moment == "building":
            set_up._agreed = lambda *_: die()
        else:
            die()
    with pytest.raises(moelink.PeerTimeoutError, match="in mask") as told:
        ep.mask([3])
    assert ep.present == (0, 1, 2, 3)
    assert ep.mask([0, 3]).present == (1, 2)
    check_left(ep, rank)
    assert ep.mask([1 if rank == 2 else 2]).present == (rank,) if rank == 2 else True
    if rank == 2:
        check_left(ep, rank)
    ep.close()
    return type(told.value).__name__, told.value.peer


def death_in_admit(rank: int, processes: int, port: int, transport: str) -> tuple[str, int] | None:
    """A newcomer dies while it sets up. The members name it, go on as before, and admit another one."""
    ep, store = opened(rank, 3, port, transport=transport)
    fields = {**FIELDS, "timeout": ROOMY, "transport": transport}
    if rank == 3:
        set_up.build_in_group = lambda *_: die()  # type: ignore[assignment]
    if rank >= 3:
        until(lambda: store.check([f"admit {rank}"]))
        ep = moelink.join(store, 1, 3, **fields)
        check_round_trip(ep, 1)
        ep.close()
        return None
    check_round_trip(ep, rank)
    gathered(store, "about to mask", range(3), rank)
    if rank == 1:
        with pytest.raises(moelink.RankMaskedError):
            check_round_trip(ep, rank)
        ep.close()
        return None
    ep.mask([1])
    check_left(ep, rank)
    store.set("admit 3", "1")
    with pytest.raises(moelink.PeerTimeoutError, match="in admit") as told:
        ep.admit([1], store)
    assert ep.present == (0, 2)
    check_left(ep, rank)
    store.set("admit 4", "1")
    until(lambda: ep.applicants(store) == (1,))
    gathered(store, "about to admit", (0, 2), rank)
    assert ep.admit([1], store).masked == ()
    check_round_trip(ep, rank)
    ep.close()
    return type(told.value).__name__, told.value.peer


def bound_calls_stay(rank: int, processes: int, port: int) -> list[int]:
    """Calls that were bound before a mask go on after it, at the same addresses, as a captured graph would. An output
    of before is refused, also when eager calls of its kind have been made since."""
    ep, store = opened(rank, 3, port, transport="symmetric")
    d = data(rank)
    before = ep.dispatch(d.x, d.topk_ids)
    ep.combine(before.tokens, before)
    dispatch = ep.bind(d.x, d.topk_ids)
    recv = dispatch()
    y = torch.empty_like(recv.tokens)
    combine = dispatch.combine(y)
    table = ep._session.transport.ranks[0].table.tolist()  # type: ignore[attr-defined]
    sums = []
    for step in range(4):
        if step == 2:
            gathered(store, "about to mask", range(3), rank)
            if rank == 1:
                break
            assert ep.mask([1]).call == 7  # the pair and the call of recv above, and four
        recv = dispatch()
        y.copy_(recv.tokens)
        there = (d.topk_ids >= 0) & ~ep.absent_experts[d.topk_ids.clamp(min=0).long()]
        out = combine()
        torch.testing.assert_close(out, d.x * there.sum(1, keepdim=True), rtol=0, atol=0)
        sums.append(int(recv.masked))
    assert ep._session.transport.ranks[0].table.tolist() == table  # type: ignore[attr-defined]
    if rank != 1:
        check_left(ep, rank)
        check_left(ep, rank)
        with pytest.raises(moelink.ForeignHandleError):
            ep.combine(before.tokens, before)
    ep.close()
    return sums


def backwards_of_before(rank: int, processes: int, port: int) -> list[str]:
    """After a mask, backwards over forwards of before it are refused, with operators and without. A step that is
    repeated has its gradients."""
    ep, store = opened(rank, 3, port, transport="symmetric")
    d, before, refused = data(rank), [], []
    x = d.x.clone().requires_grad_()
    for has_nodes in (False, True):
        ep._context.has_nodes = has_nodes
        recv = ep.dispatch(x, d.topk_ids)
        before += [ep.combine(recv.tokens.detach().requires_grad_(), recv), recv.tokens]
    gathered(store, "about to mask", range(3), rank)
    if rank != 1:
        ep.mask([1])
        for result in before:
            with pytest.raises(moelink.ForeignHandleError) as caught:
                result.sum().backward()
            refused.append(str(caught.value).split(":")[0])
        recv = ep.dispatch(x, d.topk_ids)
        ep.combine(recv.tokens, recv).sum().backward()
        there = (d.topk_ids >= 0) & ~ep.absent_experts[d.topk_ids.clamp(min=0).long()]
        torch.testing.assert_close(x.grad, there.sum(1, keepdim=True).expand_as(x).to(x.dtype), rtol=0, atol=0)
    ep.close()
    return refused


def grown(process: int, processes: int, port: int, transport: str, began: int) -> list[int]:
    """``began`` ranks of 4 make a communicator. The others, spare ones at first, join one after the other; rank 0
    leaves, and comes back."""
    be_patient()
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    fields = {**FIELDS, "timeout": ROOMY, "transport": transport, "device": "cpu"}
    seen = []
    if process < began:
        group = dist.PrefixStore("group", store)
        dist.init_process_group("gloo", store=group, rank=process, world_size=began)
        ep = moelink.init(**fields, spare_ranks=4 - began)
        assert ep.config.world_size == 4
        check_left(ep, process)
        seen.append(len(ep.present))
    else:
        until(lambda: store.check([f"admit {process}"]))
        ep = moelink.join(store, process, 4, **fields)
    for newcomer in range(max(began, process), 4):
        if process != newcomer:
            store.set(f"admit {newcomer}", "1")
            until(lambda: ep.applicants(store) == (newcomer,))  # noqa: B023
            gathered(store, f"about to admit {newcomer}", range(newcomer), process)
            assert ep.admit([newcomer], store).present == tuple(range(newcomer + 1))
        check_left(ep, process)
        seen.append(len(ep.present))
    check_round_trip(ep, process)
    gathered(store, "about to mask", range(4), process)
    if process == 0:
        with pytest.raises(moelink.RankMaskedError):
            check_round_trip(ep, process)
    else:
        ep.mask([0])
        check_left(ep, process)
        until(lambda: ep.applicants(store) == (0,))
        gathered(store, "about to admit 0", range(1, 4), process)
    assert ep.admit([0], store).masked == ()
    check_round_trip(ep, process)
    ep.close()
    return seen


def other_spare_ranks(rank: int, world_size: int) -> tuple[str, list[str]]:
    """Ranks that pass another number of spare ranks refuse it, and so does each a number that is none."""
    fields = {**FIELDS, "timeout": ROOMY, "transport": "collective", "device": "cpu"}
    refused = []
    for wrong in (-1, True, 1.0):
        with pytest.raises(moelink.ConfigError) as caught:
            moelink.init(**fields, spare_ranks=wrong)  # type: ignore[arg-type]
        refused.append(str(caught.value))
    with pytest.raises(moelink.ConfigMismatchError) as told:
        moelink.init(**fields, spare_ranks=1 + rank)
    with pytest.raises(moelink.UnsupportedError, match="spare_ranks: expected ranks of one node"):
        moelink.init(**{**fields, "transport": "symmetric"}, spare_ranks=2, ranks_per_node=2)
    return str(told.value), refused
