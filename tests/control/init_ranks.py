"""What ranks do in the tests of ``init``: come late, mistype, die or stop on the way, and begin again."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import moelink
from moelink import contract
from moelink.control import group, meeting
from moelink.testing import _rank_main
from tests.support.fault_ranks import FIELDS, check_round_trip, die
from tests.support.patience import ROOMY, SHORT, Mark, be_patient, gather, join, meet, stop_until

LONG = 8.0
"""Seconds of a timeout that expires in ``init``, which other ranks have to get through for the most part."""


@dataclass(frozen=True)
class Tried:
    """What one ``init`` gave: the error's class (empty: a communicator), whom it named, its text, the seconds that it
    took and those that it had."""

    kind: str
    peer: int
    text: str
    took: float
    timeout: float


def attempt(timeout: float = ROOMY, **fields: Any) -> tuple[Tried, moelink.Communicator | None]:
    """Call ``init`` once."""
    be_patient()
    start = time.monotonic()
    try:
        ep = moelink.init(**FIELDS | fields, timeout=timeout)
    except moelink.MoelinkError as error:
        took, peer = time.monotonic() - start, getattr(error, "peer", -1)
        return Tried(type(error).__name__, peer, str(error), took, timeout), None
    return Tried("", -1, "", time.monotonic() - start, timeout), ep


def until_it_works(rank: int, tried: list[Tried], **fields: Any) -> None:
    """Repeat ``init`` until there is a communicator, and use it."""
    for _ in range(4):
        told, ep = attempt(**fields)
        tried.append(told)
        if ep is not None:
            check_round_trip(ep, rank)
            meet()  # nobody ends, and takes the store away, while another calls
            ep.close()
            return
    raise AssertionError(f"rank {rank}: {tried}")


def memory_made(rank: int, world_size: int) -> tuple[str, str, list[str]]:
    """Ask for the memory of too many ranks, then of these; return the errors, and moelink's threads then."""
    told = []
    for ranks in (world_size + 1, world_size):
        params = contract.EPParams(
            dispatch_fmt_str="BF16", hidden_size=64, top_k=2, n_experts=2 * ranks, max_token_per_rank=4,
            n_gpus_per_node=ranks, timeout=60,
        )  # fmt: skip
        try:
            memory = contract.create_memory(params, device="cpu")
        except moelink.MoelinkError as error:
            told.append(type(error).__name__)
        else:
            told.append("")
            memory.close()
    return told[0], told[1], [thread.name for thread in threading.enumerate() if "moelink" in thread.name]


def memory_of_its_own(rank: int, world_size: int) -> int:
    """Make a block that no peer maps, while the thread of rank 0 that connects its mesh is slow to say so."""
    connect = group._connect_gloo

    def connect_slowly(*arguments: Any) -> Any:
        mesh = connect(*arguments)
        time.sleep(1.0)  # rank 0 looks at the others' entries meanwhile
        return mesh

    if rank == 0:
        group._connect_gloo = connect_slowly
    params = contract.EPParams(
        dispatch_fmt_str="BF16", hidden_size=64, top_k=2, n_experts=4, max_token_per_rank=4, n_gpus_per_node=1,
        skip_a2a=True, allreduce_world_size=world_size, timeout=20,
    )  # fmt: skip
    dist.init_process_group("gloo")
    memory = contract.create_memory(params, device="cpu")
    memory.close()
    dist.barrier()  # rank 0 serves the store
    return memory.world_size


LATE_SECONDS = 8.0
"""How long two ranks wait for the third in :func:`repeated`. On a busy machine they do not enter ``init`` together: one
of them that is late by this much would be named in place of the third."""


def repeated(rank: int, world_size: int, transport: str, fault: str, given: bool, folder: str) -> list[Tried]:
    """Rank 1 is late, or mistypes an argument, or passes another value; then all repeat ``init``."""
    if given:
        dist.init_process_group("gloo")
    tried = []
    fields: dict[str, Any] = {"transport": transport}
    gather(folder, "begin", rank, range(world_size))
    if fault != "late":
        wrong = {"typo": {"topk": 0}, "mismatch": {"topk": 1}}.get(fault, {}) if rank == 1 else {}
        tried.append(attempt(**fields | wrong)[0])
    elif rank != 1:
        tried.append(attempt(LATE_SECONDS, **fields)[0])
        Mark(folder, rank).set()
    else:
        for peer in (0, 2):
            Mark(folder, peer).wait()
    until_it_works(rank, tried, **fields)
    return tried


def numbered_apart(rank: int, world_size: int) -> list[Tried]:
    """Rank 1 fails before it makes the default group, which the others have begun to make; then all repeat ``init``."""
    make = group._DefaultGroup.make

    def fail(*_: Any) -> None:
        group._DefaultGroup.make = make  # type: ignore[method-assign]
        raise RuntimeError("no group this time")

    begun = threading.Event()

    def begin(*arguments: Any) -> None:
        begun.set()
        make(*arguments)

    group._DefaultGroup.make = fail if rank == 1 else begin  # type: ignore[method-assign]
    tried = [attempt()[0]]
    assert rank == 1 or begun.wait(ROOMY)
    until_it_works(rank, tried)
    return tried


def struck(rank: int, world_size: int, place: str, blow: str, victim: int, folder: str) -> Tried | None:
    """Rank ``victim`` dies, or stops, at ``place``."""
    others = [Mark(folder, peer) for peer in range(world_size) if peer != victim]

    def strike() -> None:
        die() if blow == "die" else stop_until(lambda: all(other.is_set() for other in others))

    if rank == victim:
        if place == "entered":
            meeting.Meeting._publish = meeting.Meeting._find = lambda _self: strike()  # type: ignore[method-assign]
        elif place == "connecting":
            group._connect_gloo = lambda *_: strike()
        else:
            group.gather_bytes.__globals__["_await"] = lambda *_: strike()
    gather(folder, "begin", rank, range(world_size))
    at_once = blow == "die" and victim != 0 and place != "entered"  # before that a launcher may be starting it anew
    told, _ = attempt(ROOMY if at_once else LONG)
    Mark(folder, rank).set()
    for other in others:  # rank 0 hosts the store
        other.wait()
    return told


def without_the_store(rank: int, world_size: int) -> Tried:
    """Rank 0, which hosts the store of the default group, dies; the others recover, and then call ``init``."""
    ep = join(**FIELDS)
    check_round_trip(ep, rank)
    meet()
    if rank == 0:
        die()
    try:
        check_round_trip(ep, rank)
    except moelink.PeerLostError:
        ep = ep.recover([1, 2])
    told, _ = attempt(SHORT)
    check_round_trip(ep, rank - 1)
    return told


def regrouped(rank: int, world_size: int) -> list[Tried]:
    """The caller destroys the default group, and calls ``init`` again, three times."""
    tried: list[Tried] = []
    for _ in range(3):
        until_it_works(rank, tried)
        dist.destroy_process_group()
    return tried


def counted_keys(rank: int, world_size: int, transport: str) -> list[int]:
    """How many keys the store has after each of three communicators with gradients."""
    dist.init_process_group("gloo")
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    counts = []
    for _ in range(3):
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
        with join(**FIELDS, transport=transport) as ep:
            x = torch.ones(3, 16, dtype=torch.bfloat16, requires_grad=True)
            weights = torch.ones(3, 2, requires_grad=True)
            recv = ep.dispatch(x, torch.tensor([[0, 5]] * 3), weights)
            ep.combine(recv.tokens, recv).sum().backward()
    dist.barrier()
    counts.append(store.num_keys())
    dist.barrier()
    return counts


WORLD = 3
SPAN = 0.5
"""Seconds in which faults begin; an undisturbed ``init`` of a process takes about half of that."""
END = 3.0
"""Seconds after which every fault is over."""
LAST = 200.0
"""Seconds after which a schedule counts as hanging."""
SPANS = ((15.0, 1.5), (60.0, 5.0), (LAST, 15.0))
"""Until when an attempt that begins has how many seconds: no machine is too busy for all of them. Ranks have to agree
on the timeout, so it depends on the time alone; two of them that do not will agree in the next attempt."""


@dataclass(frozen=True)
class Fault:
    """Of one rank: ``kind`` is kill, stop, late or typo; it begins at ``when`` and lasts ``seconds``."""

    rank: int
    kind: str
    when: float
    seconds: float


def faults_of(seed: int) -> list[Fault]:
    """One to three faults, of different ranks."""
    choice = random.Random(seed)
    ranks = choice.sample(range(WORLD), choice.choice((1, 1, 2, 3)))
    kinds = ("kill", "kill", "stop", "stop", "late", "typo")
    return [Fault(rank, choice.choice(kinds), choice.uniform(0, SPAN), choice.uniform(0.05, 2.0)) for rank in ranks]


def scheduled(rank: int, world_size: int, start: float, late: float, typo: bool, content: str) -> list[Tried]:
    """Call ``init`` until all ranks have a communicator that still works when every fault is over.

    A rank whose last call succeeded stays, because a peer's may have failed, which begins again then. It leaves a file
    in the folder ``content`` meanwhile. All files are there only when every rank succeeded in the same communicator: a
    new one needs all ranks, and each removes its file first. Nobody ends before all have seen that.
    """
    time.sleep(max(start + late - time.monotonic(), 0.0))
    mark = Path(content) / str(rank)
    marks = [Mark(content, peer) for peer in range(world_size)]
    tried: list[Tried] = []
    while time.monotonic() < start + LAST:
        timeout = next(seconds for end, seconds in SPANS if time.monotonic() < start + end or end == LAST)
        told, ep = attempt(timeout, **({"topk": 0} if typo and not tried else {}))
        tried.append(told)
        try:
            if ep is None:
                continue
            while time.monotonic() < start + END:
                check_round_trip(ep, rank)
                time.sleep(0.05)
            check_round_trip(ep, rank)
            mark.touch()
            while time.monotonic() < start + LAST:
                if all(each.is_set() for each in marks):
                    gather(content, "seen", rank, range(world_size))
                    return tried
                ep.check()
                time.sleep(0.05)
        except moelink.PeerError:
            mark.unlink(missing_ok=True)
            ep.close()
            if dist.is_initialized():
                dist.destroy_process_group()
    raise AssertionError(f"rank {rank} came to no end after {len(tried)} attempts, the last ones: {tried[-3:]}")


def run_schedule(seed: int) -> list[list[Tried] | None]:
    """Run three ranks under the faults of ``seed``; a launcher starts anew who was killed. Returns results by rank."""
    with TemporaryDirectory() as content:
        return _run_schedule(seed, content)


def _run_schedule(seed: int, content: str) -> list[list[Tried] | None]:
    context = get_context("forkserver")
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_kept_port()), "WORLD_SIZE": str(WORLD)}
    faults = {fault.rank: fault for fault in faults_of(seed)}
    start = time.monotonic() + 0.3
    pipes: list[Any] = [None] * WORLD
    processes: list[Any] = [None] * WORLD

    def launch(rank: int, fault: Fault | None) -> None:
        late = fault.seconds if fault is not None and fault.kind == "late" else 0.0
        call = pickle.dumps((scheduled, (start, late, fault is not None and fault.kind == "typo", content)))
        pipes[rank], theirs = context.Pipe(duplex=False)
        ranked = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes[rank] = context.Process(target=_rank_main, args=(theirs, ranked, call, rank, WORLD), daemon=True)
        processes[rank].start()
        theirs.close()

    for rank in range(WORLD):
        launch(rank, faults.get(rank))
    due: list[tuple[float, Callable[[], None]]] = []
    for fault in faults.values():
        pid, at, rank = processes[fault.rank].pid, start + fault.when, fault.rank
        if fault.kind == "kill":
            due.append((at, lambda pid=pid: os.kill(pid, signal.SIGKILL)))
            due.append((at + fault.seconds, lambda rank=rank: launch(rank, None)))
        elif fault.kind == "stop":
            due.append((at, lambda pid=pid: os.kill(pid, signal.SIGSTOP)))
            due.append((at + fault.seconds, lambda pid=pid: os.kill(pid, signal.SIGCONT)))
    for at, act in sorted(due, key=lambda pair: pair[0]):
        time.sleep(max(at - time.monotonic(), 0.0))
        act()
    results: list[list[Tried] | None] = []
    for rank in range(WORLD):
        results.append(None)
        if pipes[rank].poll(max(start + LAST + 20 - time.monotonic(), 0.1)):
            ok, value = _received(pipes[rank])
            assert ok, f"seed {seed}, rank {rank}: {value}"
            results[rank] = value
    for process in processes:
        process.join(5)
        process.kill()
    return results


def _kept_port() -> int:
    """A free port that the system gives to nobody who asks for any: rank 0 may listen on it for the first time late."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _received(pipe: Any) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())  # type: ignore[no-any-return]
    except EOFError:
        return False, "it ended without an answer"
