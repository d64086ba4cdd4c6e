"""Random schedules of ranks that are killed, stopped, masked, drained and admitted under traffic, functions of a seed.

Every process knows the whole schedule, so each says by itself what a call must return or raise. Processes wait for one
another through a store that the test hosts, never for a number of seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moelink
from moelink import reference
from moelink.communicator import open_communicator
from moelink.control.group import meet, with_spare
from moelink.memory.layout import as_bytes
from moelink.nn import Balancer, Placement
from moelink.reference.dispatch import expert_owners
from moelink.testing import assert_bitwise_equal, rank_data
from tests.control.elastic_layers import LOGICAL, Multiplying, first_placement
from tests.support.patience import ROOMY, be_patient, hurry, until

EXPERTS, TOPK, HIDDEN, TOKENS = 7, 2, 16, 3
EXPIRY = {"collective": 2.5, "symmetric": 2.5, "nodes": 8.0}
"""Seconds after which a call gives up on the rank that is killed or stopped, when all others are in it. Between nodes a
rank that dies in a call takes longer to get there."""
LONGEST = 140
"""Seconds that a newcomer waits for its turn: a whole schedule."""
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"pre_reduce": False},
    {"layout": "rank"},
    {"layout": "masked"},
    {"dispatch_format": "fp8_block128_e8m0", "hidden_size": 128},
    {"fused_shared_expert": True, "lanes": 2},
)
"""Those with rows by expert in the type that a layer computes in have a layer as well, which can be drained."""
NODES: tuple[dict[str, Any], ...] = (
    {"ranks_per_node": 2},
    {"ranks_per_node": 2, "two_level": True},
    {"ranks_per_node": 2, "two_level": True, "layout": "rank"},
    {"ranks_per_node": 2, "pre_reduce": False},
    {"ranks_per_node": 2, "two_level": True, "lanes": 2},
    {"ranks_per_node": 1, "layout": "masked"},
)
"""Of four ranks, where ``transport`` is "nodes": the symmetric one between nodes. There nobody is admitted."""


@dataclass(frozen=True)
class Event:
    """An event of ``rank`` before step ``step``. ``fresh``: a new process takes the rank's place (of an admission),
    or the rank dies in the middle of a call (of a kill)."""

    step: int
    kind: str
    rank: int
    fresh: bool = False


@dataclass(frozen=True)
class Schedule:
    """The schedule of a seed, on ``transport``."""

    seed: int
    transport: str

    @cached_property
    def settings(self) -> dict[str, Any]:
        choice = random.Random(self.seed)
        fields = {"num_experts": EXPERTS, "topk": TOPK, "hidden_size": HIDDEN, "max_tokens_per_rank": TOKENS}
        fields |= choice.choice(NODES if self.between_nodes else FORMS)
        transport = "symmetric" if self.between_nodes else self.transport
        fields |= {"transport": transport, "timeout": ROOMY, "on_failure": choice.choice(("raise", "mask"))}
        return fields

    @property
    def between_nodes(self) -> bool:
        return self.transport == "nodes"

    @cached_property
    def world_size(self) -> int:
        if self.between_nodes:
            return 4
        return random.Random(self.seed + 1).choice((2, 2, 3, 3, 4))

    @cached_property
    def began(self) -> int:
        """Ranks that there are at first. The others are spare ones."""
        if self.between_nodes:
            return self.world_size
        return self.world_size - random.Random(self.seed + 4).choice((0, 0, 0, 1)) * (self.world_size > 2)

    @property
    def has_layer(self) -> bool:
        """Whether a layer with replicas takes part in the traffic. Between nodes calls take long enough without."""
        return not self.between_nodes and not {"layout", "dispatch_format"} & set(self.settings)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Two to four events that make sense one after the other."""
        choice, present = random.Random(self.seed + 3), set(range(self.began))
        alive = dict.fromkeys(range(self.began, self.world_size), False)
        events: list[Event] = []
        for step in range(choice.choice((1, 2, 3) if self.between_nodes else (2, 3, 4))):
            masked = sorted(set(range(self.world_size)) - present)
            if masked and not self.between_nodes and (len(present) == 1 or choice.random() < 0.6):
                rank = choice.choice(masked)
                fresh = not alive[rank] or choice.random() < 0.3
                events.append(Event(step, "admit", rank, fresh))
                present.add(rank)
                continue
            kinds = ["kill", "kill", "stop", "mask"]
            if self.has_layer and not masked:  # experts move over connections of all ranks
                kinds += ["drain"] * 4
            kind, rank = choice.choice(kinds), choice.choice(sorted(present))
            events.append(Event(step, kind, rank, kind == "kill" and choice.random() < 0.5))
            alive[rank] = kind != "kill"
            present.remove(rank)
        return tuple(events)

    @property
    def newcomers(self) -> list[Event]:
        """Admissions of new processes. Process ``began + i`` is the i-th."""
        return [event for event in self.events if event.kind == "admit" and event.fresh]

    @property
    def processes(self) -> int:
        return self.began + len(self.newcomers)

    @property
    def mortal(self) -> set[int]:
        """Processes that are killed."""
        dying, of = set(), {rank: rank for rank in range(self.began)}
        fresh = iter(range(self.began, self.processes))
        for event in self.events:
            if event.kind == "kill":
                dying.add(of[event.rank])
            elif event.kind == "admit" and event.fresh:
                of[event.rank] = next(fresh)
        return dying

    def next_admission(self, rank: int, step: int) -> Event | None:
        """Return the admission of ``rank`` after ``step``."""
        return next((e for e in self.events if e.step > step and e.kind == "admit" and e.rank == rank), None)


def run(process: int, _: int, port: int, seed: int, transport: str) -> list[str]:
    """Run one process of a schedule. Return what it lived through."""
    be_patient()
    schedule = Schedule(seed, transport)
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store = dist.PrefixStore(f"{transport} {seed}", store)
    if process < schedule.began:
        config = moelink.EPConfig(**schedule.settings, world_size=schedule.world_size, rank=process)
        world = meet(dist.PrefixStore("init", store), process, schedule.began, ROOMY)
        world = with_spare(world, schedule.world_size - schedule.began)
        ep, begin = open_communicator(config, torch.device("cpu"), world), 0
    else:
        event = schedule.newcomers[process - schedule.began]
        until(lambda: store.check([f"admit {event.step}"]) or store.check(["over"]), seconds=LONGEST)
        if not store.check([f"admit {event.step}"]):
            return []
        ep = moelink.join(store, event.rank, schedule.world_size, device="cpu", **schedule.settings)
        begin = event.step + 1
    return Player(schedule, store, ep, begin).play()


class Player:
    """One process that takes part, from event ``begin`` on."""

    def __init__(self, schedule: Schedule, store: Any, ep: moelink.Communicator, begin: int) -> None:
        self.schedule, self.store, self.ep, self.step = schedule, store, ep, begin
        self.rank, self.told = ep.config.rank, ["joined"] if begin else []
        self.layer: Multiplying | None = None
        if schedule.has_layer:
            # A newcomer reads what a server would read from its checkpoint.
            placed = json.loads(store.get(f"placement {begin - 1}")) if begin else None
            self.layer = Multiplying(
                ep, Placement(tuple(placed)) if placed else first_placement(schedule.seed, EXPERTS)
            )

    def play(self) -> list[str]:
        """Live through the events, with traffic before and after each."""
        self.traffic()
        while self.step < len(self.schedule.events):
            event = self.schedule.events[self.step]
            self.told.append(f"{event.kind} {event.rank}")
            if not getattr(self, event.kind)(event):
                return self.told
            assert self.rank in self.ep.present
            self.step += 1
            self.traffic()
        self.ep.check()
        self.ep.close()
        self.store.set("over", "1")
        return self.told

    def traffic(self) -> None:
        """Make calls on all lanes and compare them with the reference over the ranks that are present."""
        for number in range(self.ep.config.lanes if self.schedule.between_nodes else 2):
            lane = number % self.ep.config.lanes
            check_step(self.ep, self.ep.lane(lane), 100 * self.step + number + self.schedule.seed)
        if self.layer is not None:
            self.layer.check(100 * self.step + self.schedule.seed, self.ep.present)

    def gathered(self, what: str, ranks: list[int]) -> None:
        """Wait for ``ranks``, this one among them."""
        self.store.set(f"{what}, step {self.step}, {self.rank}", "1")
        until(lambda: self.store.check([f"{what}, step {self.step}, {rank}" for rank in ranks]))

    def kill(self, event: Event) -> bool:
        """``event.rank`` dies, between two calls or in one."""
        if self.rank == event.rank:
            if event.fresh:
                start(self.ep, self.schedule.seed)
            os.kill(os.getpid(), signal.SIGKILL)
        self.lose(event, moelink.PeerLostError)
        return True

    def stop(self, event: Event) -> bool:
        """``event.rank`` is stopped, is masked, and goes on to find that out."""
        if self.rank == event.rank:
            self.store.set(f"stopped {self.step}", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            return self.be_masked()
        until(lambda: self.store.check([f"stopped {self.step}"]))
        self.lose(event, moelink.PeerTimeoutError)
        if self.rank == min(self.ep.present):
            os.kill(int(self.store.get(f"stopped {self.step}")), signal.SIGCONT)
        return True

    def lose(self, event: Event, kind: type[moelink.PeerTimeoutError]) -> None:
        """Call until it is found that ``event.rank`` is missing, and go on without it."""
        others = [rank for rank in self.ep.present if rank != event.rank]
        self.gathered("about to lose", others)
        hurry(self.ep, EXPIRY[self.schedule.transport])
        automatic = self.ep.config.on_failure == "mask"
        expected: type[Exception] = moelink.MembershipError if automatic else kind
        before = self.ep.present
        error = raised(self.ep, self.schedule.seed, expected)
        if automatic:
            assert isinstance(error.__cause__, kind)
            assert error.masked == (event.rank,), error
        else:
            assert error.peer == event.rank, error
            made = self.ep.mask([event.rank])
            assert made.present == self.ep.present
            assert 0 < made.seconds < ROOMY
        assert self.ep.present == tuple(rank for rank in before if rank != event.rank)
        hurry(self.ep, ROOMY)

    def mask(self, event: Event, experts: tuple[int, ...] | None = None) -> bool:
        """``event.rank``, which has done nothing wrong, is masked."""
        self.gathered("about to mask", list(self.ep.present))  # else its last calls may already be told
        if self.rank == event.rank:
            return self.be_masked()
        self.ep.mask([event.rank], experts=experts)
        return True

    def drain(self, event: Event) -> bool:
        """``event.rank`` leaves once others have copies of all its experts: no sum will lack any."""
        assert self.layer is not None
        assert self.layer.placement is not None
        balancer = Balancer(self.layer, max_bytes=1)
        (report,) = balancer.drain([event.rank])
        for number in range(report.moves):
            balancer.step()
            self.layer.check(7 * number + self.schedule.seed, self.ep.present)
        assert balancer.steps_left == 0
        experts = self.layer.placement.placement.experts
        stays = {expert for expert, rank in zip(experts, self.layer.owners, strict=True) if rank != event.rank}
        assert stays == set(range(LOGICAL))
        return self.mask(event, experts)

    def be_masked(self) -> bool:
        """Find out that this rank is masked, and come back where the schedule says so. False if it does not."""
        error = raised(self.ep, self.schedule.seed, moelink.RankMaskedError)
        assert error.peer == self.rank
        assert error.by != self.rank
        event = self.schedule.next_admission(self.rank, self.step)
        if event is None or event.fresh:
            self.ep.close()
            return False
        made = self.ep.admit([self.rank], self.store)
        assert self.rank in made.present
        self.step = event.step
        self.told.append(f"back {self.rank}")
        return True

    def admit(self, event: Event) -> bool:
        """``event.rank`` takes part again."""
        self.store.set(f"admit {event.step}", "1")
        until(lambda: event.rank in self.ep.applicants(self.store))
        if self.layer is not None and self.layer.placement is not None:
            self.store.set(f"placement {event.step}", json.dumps(self.layer.placement.placement.experts))
        self.gathered("about to admit", list(self.ep.present))
        made = self.ep.admit([event.rank], self.store)
        assert event.rank in made.present
        assert 0 < made.seconds < ROOMY
        return True


def inputs(config: moelink.EPConfig, rank: int, seed: int) -> Any:
    """Return what ``rank`` sends: up to TOKENS tokens, sometimes none."""
    tokens = (seed + rank) % (TOKENS + 1)
    return rank_data(
        seed=seed, rank=rank, num_tokens=tokens, hidden_size=config.hidden_size, num_experts=EXPERTS, topk=TOPK,
        holes=0.2,
    )  # fmt: skip


def start(ep: moelink.Communicator, seed: int, *, whole: bool = False) -> None:
    """Make a dispatch and, if ``whole``, its combine, without a look at the results."""
    d = inputs(ep.config, ep.config.rank, seed)
    weights = d.topk_weights if ep.config.pre_reduce else None
    recv = ep.dispatch(d.x, d.topk_ids, weights)
    if whole:
        ep.combine(outputs_of(ep.config, recv, ep.config.rank), recv, None if weights is not None else d.topk_weights)


def raised(ep: moelink.Communicator, seed: int, kind: type[Exception]) -> Any:
    """Call until an error of ``kind`` comes, and return it."""
    with pytest.raises(kind) as caught:
        call_again_and_again(ep, seed)
    return caught.value


def call_again_and_again(ep: moelink.Communicator, seed: int) -> None:
    """Make six steps."""
    for _ in range(6):
        start(ep, seed, whole=True)


def outputs_of(config: moelink.EPConfig, rows: Any, rank: int) -> torch.Tensor:
    """Return what the experts of ``rank`` make of their rows, which the sums show: the bytes, times 1 + rank."""
    tokens = as_bytes(rows.tokens.contiguous())[..., : config.hidden_size].to(torch.bfloat16)
    if config.dispatch_format == "bf16":
        tokens = rows.tokens
    return tokens * (1 + rank)


def check_step(whole: moelink.Communicator, ep: moelink.Communicator, seed: int) -> None:
    """Make a step, and compare with nested loops over the ranks and experts that are present."""
    config, me, present = ep.config, ep.config.rank, whole.present
    absent = reference_absent(config, present)
    every = [inputs(config, rank, seed) for rank in range(config.world_size)]
    routed = [torch.where(absent[d.topk_ids.clamp(min=0).long()], -1, d.topk_ids) for d in every]
    count = [len(d.x) if rank in present else 0 for rank, d in enumerate(every)]
    xs = [d.x[:n] for d, n in zip(every, count, strict=True)]
    ids = [each[:n] for each, n in zip(routed, count, strict=True)]
    weights = [d.topk_weights[:n] for d, n in zip(every, count, strict=True)]
    travel, d = config.pre_reduce, every[me]
    recv = ep.dispatch(d.x, d.topk_ids, d.topk_weights if travel else None)
    rows = reference.reference_dispatch(config, xs, ids, weights if travel else None)
    assert int(recv.num_recv_tokens) == int(rows[me].num_recv_tokens)
    if config.layout == "expert":
        total = int(recv.row_offsets[-1])
        for name in ("tokens", "src_info", "row_offsets"):
            end = len(rows[me].row_offsets) if name == "row_offsets" else total
            assert_bitwise_equal(getattr(recv, name)[:end], getattr(rows[me], name)[:end], name)
    dropped = int(((d.topk_ids >= 0) & (routed[me] < 0)).sum())
    assert int(recv.masked) == dropped, (int(recv.masked), dropped)
    out = ep.combine(outputs_of(config, recv, me), recv, None if travel else d.topk_weights)
    ys = [outputs_of(config, each, rank) for rank, each in enumerate(rows)]
    expected = reference.reference_combine(config, ys, rows, ids, None if travel else weights)
    assert_bitwise_equal(out, expected[me], f"sums of ranks {present}")
    kept = (d.topk_weights * (routed[me] >= 0)).sum(1) / (d.topk_weights * (d.topk_ids >= 0)).sum(1)
    if travel:
        torch.testing.assert_close(recv.weight_share(), torch.nan_to_num(kept, nan=1.0))


def reference_absent(config: moelink.EPConfig, present: tuple[int, ...]) -> torch.Tensor:
    """Return which experts are not there: [num_experts] bool."""
    owners = torch.tensor(expert_owners(config))
    return ~torch.isin(owners, torch.tensor(present))
