"""``init`` fails in bounded time, names the rank at fault, and may be repeated, whatever went wrong before."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import moelink
from moelink.control import meeting as meetings
from moelink.control import probe
from moelink.control.meeting import Meeting
from moelink.control.probe import Address, ProbeServer
from moelink.control.roster import LEFT, WAITING, Entry, decode_roster, encode_end, encode_roster, news_for
from moelink.control.stores import BoundedError, LauncherStore, bounded, peek, reach, serve
from moelink.testing import run_ranks
from tests.control import init_ranks
from tests.control.init_ranks import faults_of, run_schedule
from tests.support.fault_ranks import FIELDS, check_round_trip
from tests.support.patience import HANG, ROOMY, SHORT, hurry, join, until
from tests.tiers import seeds

NOWHERE = "203.0.113.9"
"""An address of nobody's, kept for documentation."""


@pytest.fixture
def unhurried(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that gives up has time to ask the others, and to say its word."""
    monkeypatch.setattr(meetings, "_LAST_WORD_SECONDS", 20.0)


def test_why_there_is_no_roster_is_told_to_those_that_it_means() -> None:
    told = encode_end([b"a" * 16, b"b" * 16], b"why")
    assert [news_for(nonce * 16, told) for nonce in (b"a", b"b", b"c", b"y")] == [b"why", b"why", b"", b""]
    assert news_for(b"a" * 16, b"") == news_for(b"a" * 16, told[:13]) == b""
    assert decode_roster(told) == []


@pytest.mark.parametrize("given", [False, True], ids=["no_group", "group"])
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("fault", ["typo", "late", "mismatch"])
def test_init_works_again_after_ranks_failed_differently(
    fault: str, transport: str, given: bool, tmp_path: Path
) -> None:
    """Closes over: ranks that count their attempts apart, or read what an earlier attempt left in the store."""
    first, wrong, last = run_ranks(init_ranks.repeated, 3, transport, fault, given, str(tmp_path))
    for tried in (first, last):
        assert tried[0].kind == {"late": "PeerTimeoutError", "typo": "PeerAbortedError"}.get(
            fault, "ConfigMismatchError"
        )
        assert tried[0].peer == (1 if fault != "mismatch" else -1), tried
        assert tried[0].took < HANG
        assert [told.kind for told in tried[1:]] == [""], tried
    assert [told.kind for told in wrong] == {"late": [""], "typo": ["ConfigError", ""]}.get(
        fault, ["ConfigMismatchError", ""]
    )


@pytest.mark.parametrize("place", ["connecting", "entered", "handshake"])
@pytest.mark.parametrize("victim", [1, 0])
@pytest.mark.parametrize("blow", ["die", "stop"])
def test_a_rank_that_dies_or_stops_in_init_is_named_in_time(blow: str, victim: int, place: str, tmp_path: Path) -> None:
    mortal = {victim} if blow == "die" else ()
    results = run_ranks(init_ranks.struck, 4, place, blow, victim, str(tmp_path), mortal=mortal)
    for rank, told in enumerate(results):
        if rank == victim:
            continue
        assert told.kind == ("PeerLostError" if blow == "die" else "PeerTimeoutError") or victim == 0, told
        assert told.peer == victim, told
        assert told.took < HANG, told


def test_init_without_the_host_of_the_store_names_it_in_time() -> None:
    for told in run_ranks(init_ranks.without_the_store, 3, mortal={0})[1:]:
        assert (told.kind, told.peer) == ("PeerTimeoutError", 0), told
        assert told.took < HANG


def test_init_works_again_after_ranks_failed_on_two_sides_of_the_default_group() -> None:
    """Closes over: the number that torch gives a default group, which a group that was not connected uses up."""
    for tried in run_ranks(init_ranks.numbered_apart, 3):
        assert tried[0].kind == "PeerTimeoutError", tried
        assert tried[0].took < HANG, "they were told"
        assert tried[-1].kind == "", tried


def test_memory_for_the_launchers_leaves_no_thread_in_the_store() -> None:
    """Closes over: such a thread, which ends the process by a signal where it wakes while the interpreter exits."""
    for refused, made, threads in run_ranks(init_ranks.memory_made, 3):
        assert (refused, made, threads) == ("ArgumentError", "", [])


def test_memory_that_no_peer_maps_waits_for_all_ranks() -> None:
    """Closes over: a rank that leaves before rank 0 has seen that all have met, which waits for it in a new attempt."""
    assert run_ranks(init_ranks.memory_of_its_own, 2) == [1, 1]


def test_init_works_after_the_default_group_was_destroyed() -> None:
    for tried in run_ranks(init_ranks.regrouped, 3):
        assert [told.kind for told in tried] == [""] * 3


def test_a_group_that_torch_does_not_know_is_named() -> None:
    """A mesh of devices, for example."""
    with pytest.raises(moelink.ConfigError, match=r"^group: expected a process group of .*, got 'mesh'$"):
        moelink.init(**FIELDS, group="mesh")  # type: ignore[arg-type]
    with pytest.raises(moelink.UnsupportedError, match="^group: expected a group with this process in it"):
        moelink.init(**FIELDS, group=dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_a_communicator_leaves_no_key_in_the_store(transport: str) -> None:
    for counts in run_ranks(init_ranks.counted_keys, 3, transport):
        assert len(set(counts)) == 1, counts


def test_a_store_listens_on_one_interface() -> None:
    """Closes over: torch's own socket, which listens on every interface."""
    store = serve("127.0.0.1", ROOMY)
    with open("/proc/net/tcp") as table:
        listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    assert f"0100007F:{store.port:04X}" in listening
    assert not any(place.endswith(f":{store.port:04X}") and place.startswith("0000") for place in listening)
    reached = reach("127.0.0.1", store.port, time.monotonic() + ROOMY, ROOMY)
    reached.set("key", b"value")
    assert (peek(store, "key"), peek(reached, "none")) == (b"value", b"")


def without_an_address(rank: int, world_size: int) -> list[str]:
    """Rank 0 has no network: in ``recover``, where it opens the store, and then in another ``init``."""
    told = []
    dist.init_process_group("gloo")
    ep = join(**FIELDS)
    hurry(ep, 1.0, recover=True)
    detector = ep._session.detector
    assert detector is not None
    if rank == 0:
        detector.addresses = (replace(detector.addresses[0], host=NOWHERE), *detector.addresses[1:])
        os.environ["MOELINK_PROBE_HOST"] = NOWHERE
    dist.barrier()
    for call in (lambda: ep.recover(range(world_size)), lambda: moelink.init(**FIELDS, timeout=SHORT)):
        try:
            call()
            told.append("nothing")
        except moelink.MoelinkError as error:
            told.append(f"{type(error).__name__}: {error}")
        dist.barrier()  # rank 0 is refused at once, and must not be in the next call while rank 1 is still in this one
    os.environ.pop("MOELINK_PROBE_HOST", None)
    with moelink.init(**FIELDS, timeout=ROOMY) as again:
        check_round_trip(again, rank)
    return told


def test_an_address_that_is_not_here_is_refused_by_name() -> None:
    """Closes over: an OSError of Python's, and peers that cannot tell why."""
    first, second = run_ranks(without_an_address, 2)
    for words in first:
        assert words.startswith("UnsupportedError: MOELINK_PROBE_HOST: expected an address of this machine"), words
        assert f"got '{NOWHERE}'" in words
    assert second[0].startswith("PeerTimeoutError: rank 1: rank 0 did not arrive in recover"), second
    assert second[1].startswith("PeerTimeoutError: rank 1: rank 0 did not arrive in init"), second


def meeting_of(
    store: Any, rank: int, world_size: int, server: ProbeServer, connect: Any = lambda *_: None, kind: Any = Meeting
) -> Meeting:
    """That of one rank, once it has entered; it has time until :func:`expire`."""
    meeting: Meeting = kind(
        lambda: store, connect, rank=rank, world_size=world_size, address=server.address,
        deadline=time.monotonic() + ROOMY,
    )  # fmt: skip
    until(lambda: peek(store, f"entry/{rank}"))
    return meeting


def expire(meeting: Meeting) -> None:
    """Let its time be up."""
    meeting.deadline = time.monotonic()


def test_who_gave_up_first_is_not_named_for_who_never_came(unhurried: None) -> None:
    """Ranks 0 and 2 wait for rank 1. Rank 0's time is up earlier, and its entry says so."""
    store, servers = dist.HashStore(), [ProbeServer(), ProbeServer()]
    waiting = [meeting_of(store, rank, 3, server) for rank, server in zip((0, 2), servers, strict=True)]
    for meeting in waiting:
        expire(meeting)
        with pytest.raises(moelink.PeerTimeoutError, match="rank 1 did not arrive in init.*has not called init"):
            meeting.wait()
        meeting.abandon()
    for server in servers:
        server.close()


def test_who_gives_up_while_it_is_probed_is_not_named_for_who_never_came(unhurried: None) -> None:
    """Rank 2 has read the entry of rank 0. Before rank 2 probes it, rank 0 gives up, and its process ends."""
    store, servers = dist.HashStore(), [ProbeServer(), ProbeServer()]
    entry = Entry(WAITING, bytes(16), servers[0].address, has_group=True)
    store.set("entry/0", entry.encode())

    class Late(Meeting):
        def _probe(self, *arguments: Any) -> Any:
            store.set("entry/0", replace(entry, state=LEFT).encode())
            servers[0].close()
            return super()._probe(*arguments)

    meeting = meeting_of(store, 2, 3, servers[1], kind=Late)
    expire(meeting)
    with pytest.raises(moelink.PeerTimeoutError, match="rank 1 did not arrive in init.*has not called init"):
        meeting.wait()
    meeting.abandon()
    servers[1].close()


def test_who_gave_up_before_is_not_named_for_who_is_silent(unhurried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gave up a moment before rank 2, because rank 1 does not answer."""
    monkeypatch.setattr(probe, "_PROBE_SECONDS", 0.2)  # of one that never answers
    store, server = dist.HashStore(), ProbeServer()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1], server.address.token)
        for rank, state in enumerate((LEFT, WAITING)):
            store.set(f"entry/{rank}", Entry(state, bytes(16), address, has_group=True).encode())
        meeting = meeting_of(store, 2, 3, server)
        expire(meeting)
        with pytest.raises(moelink.PeerTimeoutError, match="rank 1 did not arrive in init.*does not answer"):
            meeting.wait()
        meeting.abandon()
    server.close()


def test_a_room_is_voided_when_a_member_left_before_it_came(unhurried: None) -> None:
    """Rank 0 had read the entry of rank 1, which has left since and saw no roster then: only rank 0 can notice."""
    store, servers = dist.HashStore(), [ProbeServer(), ProbeServer()]
    entry, never = Entry(WAITING, bytes(16), servers[1].address, has_group=True), threading.Event()
    store.set("entry/1", entry.encode())
    meeting = meeting_of(store, 0, 2, servers[0], connect=lambda *_: never.wait())
    until(lambda: peek(store, "roster"))
    attempt = peek(store, "entry/0")
    store.set("entry/1", replace(entry, state=LEFT).encode())
    until(lambda: peek(store, "entry/0") != attempt, 20.0)
    expire(meeting)
    with pytest.raises(moelink.PeerTimeoutError, match="rank 1 did not arrive in init.*it has not called init"):
        meeting.wait()
    meeting.abandon()
    never.set()
    for server in servers:
        server.close()


def test_a_rank_takes_no_roster_of_an_earlier_attempt(unhurried: None) -> None:
    """Nobody comes to the room of a roster that has this rank's entry of the attempt before."""
    store, server, never = dist.HashStore(), ProbeServer(), threading.Event()
    earlier = Entry(WAITING, bytes(16), server.address, has_group=dist.is_initialized())
    store.set("roster", encode_roster([earlier, earlier]))
    meeting = meeting_of(store, 1, 2, server, connect=lambda *_: never.wait())
    expire(meeting)
    with pytest.raises(moelink.PeerTimeoutError, match="rank 0 did not arrive in init.*has not called init"):
        meeting.wait()
    meeting.abandon()
    never.set()
    server.close()


def test_torchruns_variables_must_be_complete() -> None:
    complete = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}
    assert LauncherStore.is_named(complete)
    assert LauncherStore(complete).host_rank == 0
    assert LauncherStore(complete | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).host_rank == -1
    for name in complete:
        wrong = {key: value for key, value in complete.items() if key != name}
        assert not LauncherStore.is_named(wrong)
        with pytest.raises(moelink.ConfigError, match=f"{name}: expected"):
            LauncherStore(wrong)
    with pytest.raises(moelink.ConfigError, match="RANK: expected a number in"):
        LauncherStore(complete | {"RANK": "2"})


def test_a_call_that_does_not_return_is_left_behind() -> None:
    over = threading.Event()
    with pytest.raises(BoundedError):
        bounded(over.wait, time.monotonic() + 0.1)
    over.set()
    assert bounded(lambda: 3, time.monotonic() + ROOMY) == 3
    with pytest.raises(KeyError):
        bounded(lambda: {}[1], time.monotonic() + ROOMY)


@pytest.mark.timeout(1800)  # 296 schedules of some seconds, three at a time
@seeds(4, 300)
def test_random_schedules_of_init(seeds: Any) -> None:
    """Ranks are killed and started again, stopped, late, or mistype: all come to a communicator, and every failure on
    the way is an error of moelink, in its time and not one that hangs."""
    with ThreadPoolExecutor(max_workers=3) as pool:
        for seed, results in zip(seeds, pool.map(run_schedule, seeds), strict=True):
            attempts = [len(tried or ()) for tried in results]
            print(f"seed {seed}: {faults_of(seed)}: {attempts} attempts")
            for rank, tried in enumerate(results):
                assert tried is not None, f"seed {seed}: rank {rank} hangs"
                for told in tried:
                    assert told.took < told.timeout + HANG, f"seed {seed}, rank {rank}: {told}"
