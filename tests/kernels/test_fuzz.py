"""Nonsense from peers: corrupted counts, ids, positions, flags and headers end in errors, never outside of memory.

Symmetric transport: the bytes that a peer stored are overwritten between the two halves of a call, and the receiving
kernels run under ``memory.bounds``, which stops every access outside the regions and the caller's tensors. Collective
transport: rows and headers are changed on their way. Beacons and records of set-up: changed bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct

import pytest
import torch

import moelink
from moelink import reference
from moelink.control import responder
from moelink.control.failure_detector import FailureDetector
from moelink.control.group import World
from moelink.control.handshake import Hello
from moelink.control.probe import GONE, NO_ANSWER, Address, ProbeServer, probe, read_proposal
from moelink.control.recovery import Proposal
from moelink.errors import ProtocolError
from moelink.kernels.launch.device import is_interpreted
from moelink.memory import create_all
from moelink.memory.protocol import COUNT_HEADER
from moelink.memory.workspace import Workspace
from moelink.transports.collective import CollectiveTransport
from moelink.transports.collective.group_wire import GroupWire
from moelink.transports.collective.lockstep import LockstepWire
from moelink.transports.symmetric import SymmetricTransport
from tests.support.cases import Case, Setup, check_rows
from tests.support.patience import HANG
from tests.support.symmetric_ranks import combine_requests, dispatch_requests, over
from tests.tiers import seeds

WORLD = 2
TRIES = 6
READ = ("ids", "positions", "token", "counts")
ERRORS = (moelink.PeerError, moelink.CapacityError)
"""What nonsense may end in; that an access was stopped is none of these."""

EXTREMES = (-(2**31), -1000, -2, 1 << 20, 2**31 - 1)
SETUPS = (
    Setup("bf16"),
    Setup("mxfp8", (("expert_alignment", 4),)),
    Setup("nvfp4", (("capacity", 9),)),
    Setup("bf16", (("layout", "rank"),)),
    Setup("bf16", (("fused_shared_expert", True), ("pre_reduce", False))),
)


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELINK_DEBUG", "1")


class Victim:
    """Rank 0 of two in this process, between its peers' stores and its own reading."""

    def __init__(self, setup: Setup, seed: int, *, cached: bool = False) -> None:
        if not is_interpreted():
            pytest.skip("bounds are checked in the interpreter, and kernels are compiled here")
        configs = [setup.config(WORLD, rank) for rank in range(WORLD)]
        self.workspace = Workspace(configs[0])
        self.memories = create_all(["cpu"] * WORLD, self.workspace.nbytes)
        self.ranks = [SymmetricTransport([c], [m], "test") for c, m in zip(configs, self.memories, strict=True)]
        for transport in self.ranks:
            transport.ranks[0].limit = 20_000_000  # 20 ms
        self.case = Case(setup, "uniform", seed=seed, small=True)
        requests = [dispatch_requests(self.case, [r]) for r in range(WORLD)]
        if cached:  # over the routing of a call in which all was well
            first = [t.dispatch(request) for t, request in zip(self.ranks, requests, strict=True)]
            requests = [over(pending.wait(), request) for pending, request in zip(first, requests, strict=True)]
        self.pending = [t.dispatch(request) for t, request in zip(self.ranks, requests, strict=True)]

    def region(self, name: str) -> torch.Tensor:
        """The victim's region, as its peers may write it."""
        return self.workspace.regions[name].view(self.memories[0].local)

    def field(self, name: str) -> torch.Tensor:
        """A field of all messages that may lie in the victim's block: [W, T, ...]."""
        part = self.workspace.message[name]
        raw = self.region("messages")[:, :, part.offset : part.end]
        return raw.view(part.dtype)

    def receive(self) -> moelink.DispatchOutput:
        (recv,) = self.pending[0].wait()
        return recv

    def combine(self, recv: moelink.DispatchOutput) -> torch.Tensor:
        """As if the corruption had gone unnoticed; the peers take part in it."""
        others = [pending.wait()[0] for pending in self.pending[1:]]
        started = [
            t.combine(combine_requests(self.case, [r], [out]))
            for r, (t, out) in enumerate(zip(self.ranks, [recv, *others], strict=True))
        ]
        return started[0].wait()[0]

    def is_whole(self, recv: moelink.DispatchOutput) -> bool:
        """What was received is what was sent."""
        config, ranks = self.case.setup.config(WORLD), range(WORLD)
        datas = [self.case.data(rank) for rank in ranks]
        rows = reference.reference_dispatch(
            config, [d.x for d in datas], [d.topk_ids for d in datas], [d.topk_weights for d in datas]
        )
        fields = {name: getattr(recv, name) for name in recv.__dataclass_fields__}
        try:
            check_rows("rank 0", rows[0], fields)
        except AssertionError:
            return False
        return True


def overwrite(words: torch.Tensor, place: int, value: int) -> None:
    """Another value in a word that is its own signal (``kernels.sync.ll_words``), of the same call."""
    words[place] = (words[place] >> 32 << 32) | (value & 0xFFFFFFFF)


def spoil(victim: Victim, what: str, choice: random.Random) -> None:
    """Overwrite one or two values of ``what`` that peer 1 sent to the victim."""
    for _ in range(choice.choice((1, 2))):
        value = choice.choice(EXTREMES)
        if what in ("header", "counts"):
            words = victim.region("counts")[1]
            place = (
                choice.randrange(5) if what == "header" else COUNT_HEADER + choice.randrange(len(words) - COUNT_HEADER)
            )
            overwrite(words, place, value)
        elif what == "origin":
            overwrite(victim.region("counts")[1], 6, value)
        elif what in ("ids", "positions", "token"):
            field = victim.field(what)[1]
            field[choice.randrange(2)].view(-1)[choice.randrange(field.shape[-1])] = value
        elif what == "firsts":
            words = victim.region("counts")[1]  # with few tokens nothing reads them, so say that there are many
            overwrite(words, 3, 2)
            overwrite(words, 4, 3)
            victim.region("firsts")[1, choice.randrange(3)] = value
        elif what == "poison":
            victim.region("poison")[0] = value
            victim.region("poisons")[1] = torch.tensor([choice.choice(EXTREMES) for _ in range(8)])
        else:
            flags = victim.region("message_flag")
            flags[1, choice.randrange(flags.shape[1])] = value


@pytest.mark.parametrize("what", ["header", "counts", "ids", "positions", "token", "firsts", "flags", "poison"])
def test_corrupted_dispatches_are_errors_and_stay_in_bounds(what: str) -> None:
    corrupted_dispatches(what)


def corrupted_dispatches(what: str, whole: tuple[str, ...] = READ, *, cached: bool = False) -> None:
    """``whole``: of these what is not noticed did no harm, as nothing reads it in this routing, or it may be."""
    noticed = 0
    for seed in range(TRIES):
        victim = Victim(SETUPS[seed % len(SETUPS)], seed, cached=cached)
        spoil(victim, what, random.Random(seed))
        try:
            recv = victim.receive()
            victim.ranks[0].check()
        except ERRORS as error:
            noticed += not isinstance(error, moelink.CapacityError)
            continue
        assert what not in whole or victim.is_whole(recv), f"{what} {seed}: rows are missing, and nobody was told"
        victim.combine(recv)
    assert noticed >= TRIES // 3, f"{what}: {noticed} of {TRIES} were noticed"


@pytest.mark.parametrize("what", ["header", "origin", "token", "flags", "poison"])
def test_corrupted_dispatches_over_a_routing_are_errors_and_stay_in_bounds(what: str) -> None:
    corrupted_dispatches(what, ("token",), cached=True)


@pytest.mark.parametrize("cached", [False, True], ids=["counted", "over a routing"])
@pytest.mark.quick("over a routing a header is compared with that of the earlier call")
def test_words_of_a_header_that_nothing_else_would_notice_are_checked(cached: bool) -> None:
    """The number of the source's tokens, and the most messages of one of its programs: rows arrive all the same."""
    for word in (2, 4):
        victim = Victim(SETUPS[0], 0, cached=cached)
        overwrite(victim.region("counts")[1], word, 1 << 20)
        assert victim.is_whole(victim.receive())
        with pytest.raises(ProtocolError) as caught:
            victim.ranks[0].check()
        assert caught.value.peer == 1


def test_what_is_noted_and_what_is_counted_may_be_nonsense_over_a_routing() -> None:
    """Notes are the caller's; what an earlier call's peers spoilt there stays in bounds as well. Rows per expert and
    ids that come over the wire are not read."""
    for seed in range(TRIES):
        choice = random.Random(seed)
        victim = Victim(SETUPS[seed % len(SETUPS)], seed, cached=True)
        spoil(victim, "counts", choice)
        spoil(victim, "positions", choice)
        assert victim.is_whole(victim.receive())
        victim = Victim(SETUPS[seed % len(SETUPS)], seed, cached=True)
        plan = victim.pending[0]._finish.__closure__[0].cell_contents[0].output.handle.routing.parts
        for notes in (plan.rows_of_message, plan.message_token):
            for _ in range(4):
                notes.view(-1)[choice.randrange(notes.numel())] = choice.choice((*EXTREMES, 3))
        try:
            victim.receive()
            victim.ranks[0].check()
        except ERRORS:
            continue


def test_random_bytes_in_every_region_that_peers_write() -> None:
    regions = ("counts", "firsts", "messages", "message_flag", "poisons", "combine_head", "combine_flag",
               "combine_status", "combine_kept", "credit", "rows", "lamport_slots")  # fmt: skip
    for seed in range(12):
        choice = random.Random(seed)
        victim = Victim(SETUPS[seed % len(SETUPS)], seed)
        try:
            recv = victim.receive() if seed % 2 else None
            there = [region.name for region in victim.workspace.regions if region.name in regions]
            for name in choice.sample(there, 3):
                raw = victim.region(name).view(torch.uint8).view(-1)
                for _ in range(1 + len(raw) // 16):
                    raw[choice.randrange(len(raw))] = choice.randrange(256)
            victim.combine(recv or victim.receive())
            victim.ranks[0].check()
        except ERRORS:
            continue


class SpoilingWire(LockstepWire):
    """Ranks of one process; some bytes of what rank 1 sends to rank 0 change on the way."""

    def __init__(self, choice: random.Random, phase: str) -> None:
        super().__init__()
        self._choice, self._phase = choice, phase

    def _move(self, phase, requests):
        replies = super()._move(phase, requests)
        counts = requests[0].recv_counts
        if phase == self._phase and counts[1]:
            row = replies[0][counts[0] + self._choice.randrange(counts[1])]
            for _ in range(4):
                word = self._choice.randrange(len(row) // 4)
                row[: len(row) // 4 * 4].view(torch.int32)[word] = self._choice.choice(EXTREMES)
        return replies


@pytest.mark.quick("rows of the two phases are checked in different places")
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_corrupted_rows_of_the_collective_transport(phase: str) -> None:
    noticed = []
    for seed in range(60):
        setup = SETUPS[seed % len(SETUPS)]
        case = Case(setup, "uniform", seed=seed, small=True)
        configs = [setup.config(WORLD, rank) for rank in range(WORLD)]
        transport = CollectiveTransport(configs, SpoilingWire(random.Random(seed), phase), identity="test")
        ranks = list(range(WORLD))
        try:
            recvs = transport.dispatch(dispatch_requests(case, ranks)).wait()
            transport.combine(combine_requests(case, ranks, recvs)).wait()
        except ProtocolError as error:
            noticed.append(error.peer)
    assert set(noticed) == {1}
    assert len(noticed) >= (10 if phase == "dispatch" else 5), f"{len(noticed)} of 60 were noticed"


class SpoilingGroup:
    """Stands for the control group: every peer sends what this rank sends, and one of them something else."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice

    def alltoall_base(self, received, sent, *_):
        received.copy_(sent)
        words = sent.shape[1]
        for place in self._choice.sample(range(words), self._choice.choice((1, 1, 1, 2, words))):
            received[1, place] = self._other(int(sent[1, place]), near=place < words - 1)
        return self

    def _other(self, value: int, *, near: bool) -> int:
        """Another int64 than ``value``; not ``near``: one that is no count of rows either."""
        others = [*EXTREMES, -(2**63), 2**63 - 1, value ^ 1 << self._choice.randrange(20, 63)]
        others += [self._choice.randrange(-(2**63), 0), self._choice.randrange(1 << 20, 2**63)]
        others += [value - 1, value + 1, value ^ 1 << self._choice.randrange(20)] if near else []
        return self._choice.choice([other for other in others if other != value])

    def wait(self, _):
        return True


@seeds(60, 50_000)
def test_corrupted_headers_of_the_collective_transport(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupWire, "_exchange_rows", lambda *_: pytest.fail("a bad count came as far as the rows"))
    probe_server = ProbeServer()
    detector = FailureDetector(rank=0, probe_server=probe_server, addresses=[probe_server.address] * 3)
    request = dispatch_requests(Case(SETUPS[0], "uniform", small=True), [0])
    for seed in seeds:
        world = World(rank=0, world_size=3, control=SpoilingGroup(random.Random(seed)))
        wire = GroupWire(world, device=torch.device("cpu"), identity="test", timeout=5.0, detector=detector)
        transport = CollectiveTransport([SETUPS[0].config(3)], wire, identity="test")
        with pytest.raises(moelink.PeerError) as caught:
            transport.dispatch(request).wait()
        assert caught.value.peer == 1, seed
        transport.close()
    detector.close()


def mutations(good: bytes, choice: random.Random, count: int) -> list[bytes]:
    """``good`` with bytes changed, cut, doubled or inserted."""
    results = []
    for _ in range(count):
        data = bytearray(good)
        for _ in range(choice.randrange(1, 4)):
            kind, at = choice.randrange(4), choice.randrange(len(data)) if data else 0
            if kind == 0 and data:
                data[at] = choice.randrange(256)
            elif kind == 1:
                del data[at : at + choice.randrange(1, 9)]
            elif kind == 2:
                data[at:at] = data[at : at + choice.randrange(1, 9)]
            else:
                data[at:at] = choice.randbytes(4)
        results.append(bytes(data))
    return results


@seeds(400, 50_000)
def test_corrupted_handshakes_are_refused_by_name(seeds: range) -> None:
    hello, good = greeting()
    assert Hello.decode(good, rank=0, peer=1) == hello
    refused = []
    for seed in seeds:
        (data,) = mutations(good, random.Random(seed), 1)
        try:
            Hello.decode(data, rank=0, peer=1)
        except ProtocolError as error:
            refused.append(error.peer)
    assert set(refused) == {1}
    assert len(refused) > len(seeds) // 2


def greeting() -> tuple[Hello, bytes]:
    address = Address("127.0.0.1", 1234, bytes(16))
    fields = {"num_experts": "7", "topk": "2"}
    hello = Hello(fields, address, machine="m", identity="i", version="1", layout="2")
    return hello, hello.encode()


def test_handshakes_of_another_form_are_refused_by_name() -> None:
    _, good = greeting()
    said = json.loads(good)
    for data in (
        b"",
        b"[" * (1 << 20),
        b"7",
        *(json.dumps({**said, name: value}) for name in said for value in (None, 7, [], [said["address"]])),
        *(json.dumps({key: value for key, value in said.items() if key != name}) for name in said),
        json.dumps({**said, "more": ""}),
        json.dumps({**said, "fields": {"topk": 2}}),
    ):
        with pytest.raises(ProtocolError, match="handshake of this moelink version from rank 1"):
            Hello.decode(data, rank=0, peer=1)


@pytest.mark.usefixtures("patient")
def test_a_probe_server_survives_nonsense_and_tells_nothing_without_its_token() -> None:
    probe_server = ProbeServer()
    probe_server.progress = 5, "dispatch"
    address, choice = probe_server.address, random.Random(2)
    probe_server.proposal = Proposal((0, 1), bytes(16), 7).encode()
    stranger = Address(address.host, address.port, bytes(16))
    assert probe(stranger).call is None
    assert read_proposal(stranger) in (GONE, NO_ANSWER)
    for kind in (responder.ASK, responder.READ):
        with socket.create_connection((address.host, address.port), timeout=HANG) as connection:
            connection.sendall(stranger.token + kind)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b"", "a stranger is told something"
    for data in mutations(address.token + b"!" + bytes(40), choice, 40):
        with socket.create_connection((address.host, address.port)) as connection:
            connection.sendall(data)
    assert probe(address).call == 5
    assert Proposal.decode(read_proposal(address)).ranks == (0, 1)
    told = probe_server.failure
    assert told is None or told.peer >= 0
    probe_server.close()
    assert probe(address).lost
    assert read_proposal(address) == GONE


def test_a_proposal_that_is_none_is_refused() -> None:
    good = Proposal((0, 2, 3), os.urandom(16), 4711, os.urandom(16))
    assert Proposal.decode(good.encode()) == good
    for data in mutations(good.encode(), random.Random(3), 300):
        try:
            Proposal.decode(data)
        except (ValueError, struct.error):
            continue
