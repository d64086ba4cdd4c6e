"""Ranks that walk at random over right, refused, wrong and interrupted calls, and compare every result.

All ranks draw from the same seed, so that each knows what every rank does in a step. What a rank gets it compares with
the oracle, which it runs over what all ranks sent.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import moelink
from moelink import reference
from moelink.testing import RankData, assert_bitwise_equal, rank_data
from tests.control.interrupted_ranks import KINDS, SECONDS, Countdown, attempt, everyone, make, trial
from tests.support.cases import FIELDS as OUTPUT_FIELDS
from tests.support.cases import check_rows
from tests.support.fault_ranks import FIELDS
from tests.support.mismatches import same_again

STEPS = 14
KEPT = 4
"""Outputs that later steps may combine again, or take the routing or the memory of."""

MOST_LINES = 250
"""Lines of the host path of a call, more or less: where it is interrupted is drawn from so many."""


OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "collective": ({}, {"pre_reduce": False}),
    "symmetric": ({}, {"pre_reduce": False}, {"ranks_per_node": 1}),
}
"""Of the communicators that a transport's walks go over in turn."""


@dataclass(frozen=True)
class Sent:
    """What all ranks sent in one dispatch, and by the oracle what each received."""

    data: list[RankData]
    weighted: bool
    rows: list[reference.ReferenceRows]

    @property
    def ids(self) -> list[torch.Tensor]:
        return [each.topk_ids for each in self.data]


@dataclass
class Walk:
    """One rank of a walk.

    Attributes:
        words: what the steps were and how they ended, for the message of a failure.
        outputs: of earlier dispatches, newest last, with what was sent.
        number: of the step, from which its data follow.
    """

    rank: int
    world_size: int
    transport: str
    options: dict[str, Any]
    seed: int
    ep: Any
    tracer: Countdown
    words: list[str] = field(default_factory=list)
    outputs: list[tuple[Any, Sent]] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self) -> None:
        """Walk. A right dispatch comes first, so that there is an output."""
        steps: dict[Callable[[], str], int] = {
            self.dispatch: 3, self.combine: 4, self.overlapped: 2, self.dropped: 1, self.refused: 3,
            self.other_options: 1, self.other_dispatch: 1, self.interrupted: 2, self.checked: 1, self.trained: 2,
        }  # fmt: skip
        if self.transport == "collective":  # symmetric ranks wait for a call that never comes until the timeout
            steps[self.other_phase] = 1
        while self.number < STEPS:
            self.number += 1
            again = not self.outputs
            step = self.dispatch if again else self.random.choices(list(steps), list(steps.values()))[0]
            self.words.append(step.__name__)
            self.words[-1] += f": {step()}"
        self.checked()

    def sent(self, *, weighted: bool, routing: Sent | None = None) -> Sent:
        """Draw what all ranks send: other rows, with ids of their own or of an earlier dispatch."""
        data = []
        for rank in range(self.world_size):
            tokens = self.random.randrange(4) if routing is None else len(routing.data[rank].x)
            one = rank_data(
                seed=1000 * self.seed + self.number, rank=rank, num_tokens=tokens, hidden_size=FIELDS["hidden_size"],
                num_experts=FIELDS["num_experts"], topk=FIELDS["topk"], holes=0.2,
            )  # fmt: skip
            data.append(one if routing is None else RankData(one.x, routing.data[rank].topk_ids, one.topk_weights))
        rows = reference.reference_dispatch(
            self.ep.config, [d.x for d in data], [d.topk_ids for d in data],
            [d.topk_weights for d in data] if weighted else None,
        )  # fmt: skip
        return Sent(data, weighted, rows)

    def arguments(self, sent: Sent) -> tuple[Any, ...]:
        mine = sent.data[self.rank]
        return (mine.x, mine.topk_ids, mine.topk_weights) if sent.weighted else (mine.x, mine.topk_ids)

    def received(self, recv: Any, sent: Sent) -> None:
        """Compare an output of this step with the oracle's, and keep it."""
        got = {name: getattr(recv, name) for name in OUTPUT_FIELDS}
        check_rows(f"step {self.number} rank {self.rank}", sent.rows[self.rank], got)
        self.outputs = [*self.outputs, (recv, sent)][-KEPT:]

    def expert_rows(self, sent: Sent, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100_000 + self.number * 100 + rank)
        shape = (sent.rows[rank].tokens.shape[0], FIELDS["hidden_size"])
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    def combined(self, out: torch.Tensor, sent: Sent, **how: Any) -> None:
        """Compare a result of this step with the oracle's."""
        ys = [self.expert_rows(sent, rank) for rank in range(self.world_size)]
        expected = reference.reference_combine(self.ep.config, ys, sent.rows, sent.ids, **how)
        assert_bitwise_equal(out, expected[self.rank], f"step {self.number} rank {self.rank}: combine")

    def victims(self) -> set[int]:
        """Draw one rank, or several, which may be all."""
        return set(self.random.sample(range(self.world_size), self.random.choice([1, 1, 2, self.world_size])))

    def dispatch(self) -> str:
        """Dispatch, by ids or an earlier routing, into new memory or that of an earlier output."""
        form = self.random.choice(["ids", "ids", "routing", "out"]) if self.outputs else "ids"
        earlier, before = self.random.choice(self.outputs) if self.outputs else (None, None)
        if form == "routing" and before is not None:
            sent = self.sent(weighted=self.random.random() < 0.5, routing=before)
            x, _, *weights = self.arguments(sent)
            self.received(self.ep.dispatch(x, None, *weights, routing=earlier), sent)
        elif form == "out" and before is not None:
            sent = self.sent(weighted=before.weighted)
            self.outputs = [each for each in self.outputs if each[0] is not earlier]
            self.received(self.ep.dispatch(*self.arguments(sent), out=earlier), sent)
        else:
            sent = self.sent(weighted=self.random.random() < 0.5)
            self.received(self.ep.dispatch(*self.arguments(sent)), sent)
        return form

    def combine(self) -> str:
        """Combine an output, the newest or an older one, and compare."""
        recv, sent = self.random.choice(self.outputs)
        y, home = self.expert_rows(sent, self.rank), not (sent.weighted or self.ep.config.pre_reduce)
        form = self.random.choice(["sums", "rows", "weights"] if home else ["sums"])
        if form == "rows":
            self.combined(self.ep.combine(y, recv, reduce=False), sent, reduce=False)
        elif form == "weights":
            weights = [each.topk_weights for each in sent.data]
            self.combined(self.ep.combine(y, recv, weights[self.rank]), sent, topk_weights_home=weights)
        else:
            self.combined(self.ep.combine(y, recv), sent)
        return form

    def overlapped(self) -> str:
        """Start a dispatch and a combine, and wait in either order, another one on each rank."""
        recv, sent = self.random.choice(self.outputs)
        new = self.sent(weighted=self.random.random() < 0.5)
        order = [self.random.random() < 0.5 for _ in range(self.world_size)][self.rank]
        arriving = self.ep.dispatch_async(*self.arguments(new))
        leaving = self.ep.combine_async(self.expert_rows(sent, self.rank), recv)
        if order:
            arriving.wait()
        self.combined(leaving.wait(), sent)
        self.received(arriving.wait(), new)
        return "done"

    def dropped(self) -> str:
        """Drop a call that was started, on some ranks. The next dispatch finishes it."""
        victims, new = self.victims(), self.sent(weighted=False)
        pending = self.ep.dispatch_async(*self.arguments(new))
        if self.rank not in victims:
            check_rows("kept", new.rows[self.rank], {name: getattr(pending.wait(), name) for name in OUTPUT_FIELDS})
        del pending
        self.dispatch()
        return f"on {victims}"

    def trained(self) -> str:
        """Dispatch and combine through operators, and send gradients back: each element's is how often it went out."""
        sent = self.sent(weighted=False)
        x, ids = self.arguments(sent)
        x = x.clone().requires_grad_()
        recv = self.ep.dispatch(x, ids)
        out = self.ep.combine(recv.tokens, recv)
        out.sum().backward()
        assert x.grad is not None
        routed = (ids >= 0).sum(1, keepdim=True)
        assert_bitwise_equal(x.grad, routed.to(x.dtype).expand_as(x), f"step {self.number} rank {self.rank}: gradient")
        self.received(dataclasses.replace(recv, tokens=recv.tokens.detach()), sent)
        return "done"

    def refused(self) -> str:
        """Some ranks pass what is refused: they hear what, the others who."""
        victims = self.victims()
        recv, sent = self.random.choice(self.outputs)
        x, ids, *weights = self.arguments(new := self.sent(weighted=False))
        y, wide = self.expert_rows(sent, self.rank), torch.ones(2, 17, dtype=torch.bfloat16)
        wrong: list[Callable[[], Any]] = [
            lambda: self.ep.dispatch(wide, ids), lambda: self.ep.dispatch(x, ids.float()),
            lambda: self.ep.dispatch(x.int(), ids), lambda: self.ep.dispatch(x, torch.ones(9, 2, dtype=torch.int32)),
            lambda: self.ep.dispatch(x, ids, routing=y), lambda: self.ep.dispatch_async(x, ids, host_counts=7).wait(),
            lambda: self.ep.dispatch(wide, None, routing=recv),
            lambda: self.ep.combine(y.double(), recv), lambda: self.ep.combine(y[:-1], recv),
            lambda: self.ep.combine(y, None), lambda: self.ep.combine(y, recv, reduce=3),
            lambda: self.ep.combine_async(y, recv, shared=wide).wait(),
        ]  # fmt: skip
        case = self.random.randrange(len(wrong))
        self.words[-1] += f" case {case} on {victims}"
        if self.rank in victims:
            call = wrong[case]
        elif case < 7:
            call = lambda: self.ep.dispatch(*self.arguments(new))  # noqa: E731
        else:
            call = lambda: self.ep.combine(y, recv)  # noqa: E731
        _, error, seconds = attempt(call)
        if self.rank in victims:
            assert isinstance(error, moelink.MoelinkError), repr(error)
            assert not isinstance(error, moelink.PeerError), repr(error)
        else:
            assert isinstance(error, moelink.PeerAbortedError), repr(error)
            assert error.peer in victims, repr(error)
        assert seconds < SECONDS, f"{error!r} after {seconds:.1f} s"
        return "refused"

    def mismatched(self, mine: Callable[[], Any], others: Callable[[], Any]) -> str:
        """One rank makes another call than the rest: all raise ProtocolError, which names the same rank, also in later
        calls, and go on with another communicator."""
        victim = self.random.randrange(self.world_size)
        _, error, seconds = attempt(mine if self.rank == victim else others)
        assert isinstance(error, moelink.ProtocolError), f"victim {victim}: {error!r}"
        assert seconds < SECONDS, f"{error!r} after {seconds:.1f} s"
        named = everyone(error.peer, self.world_size)
        assert set(named) == {victim} or self.world_size < 3, f"victim {victim}, named {named}"
        same_again(self.ep, error)
        if self.ep.config.ranks_per_node is None:
            self.tracer.ep = self.ep = self.ep.recover(range(self.world_size))
        else:
            self.ep.close()
            self.ep = make(self.transport, self.tracer, **self.options)
        self.outputs = []
        return f"rank {victim}"

    def other_options(self) -> str:
        """One rank dispatches without weights."""
        new = self.sent(weighted=True)
        x, ids, weights = self.arguments(new)
        return self.mismatched(lambda: self.ep.dispatch(x, ids), lambda: self.ep.dispatch(x, ids, weights))

    def other_dispatch(self) -> str:
        """One rank combines the rows, or reuses the routing, of another dispatch than the rest."""
        if len(self.outputs) < 2:
            return self.dispatch()
        (one, sent), (other, more) = self.random.sample(self.outputs, 2)
        same = sent.ids[0] is more.ids[0]  # one reused the routing of the other, which is as good
        if self.random.random() < 0.5 and not same:
            x, y = sent.data[self.rank].x, more.data[self.rank].x
            return self.mismatched(
                lambda: self.ep.dispatch(y, None, routing=other), lambda: self.ep.dispatch(x, None, routing=one)
            )
        y, z = self.expert_rows(sent, self.rank), self.expert_rows(more, self.rank)
        return self.mismatched(lambda: self.ep.combine(z, other), lambda: self.ep.combine(y, one))

    def other_phase(self) -> str:
        """One rank combines while the rest dispatch."""
        recv, sent = self.random.choice(self.outputs)
        new, y = self.sent(weighted=False), self.expert_rows(sent, self.rank)
        return self.mismatched(lambda: self.ep.combine(y, recv), lambda: self.ep.dispatch(*self.arguments(new)))

    def interrupted(self) -> str:
        """An exception enters a call of one rank. All go on in step, or all hear that there is no other call."""
        victim, phase = self.random.randrange(self.world_size), self.random.choice(["dispatch", "combine"])
        self.tracer.left, self.tracer.kind = self.random.randrange(1, MOST_LINES), self.random.choice(KINDS)
        self.tracer.target = None
        goes_on, words = trial(self.ep, self.tracer, self.rank, self.world_size, phase, self.number, victim)
        if not goes_on:
            self.ep.close()
            self.ep, self.outputs = make(self.transport, self.tracer, **self.options), []
        return f"rank {victim}, {words}"

    def checked(self) -> str:
        """Nothing was lost."""
        self.ep.check()
        return "nothing lost"


def walks(rank: int, world_size: int, transport: str, seeds: list[int]) -> list[str]:
    """One walk for each seed, over one communicator of each kind for as long as it lives; return what was done."""
    tracer = Countdown()
    threading.settrace(tracer)
    said = []
    kinds = OPTIONS[transport]
    for number, options in enumerate(kinds):
        if chosen := [seed for seed in seeds if seed % len(kinds) == number]:
            ep = make(transport, tracer, **options)
            for seed in chosen:
                ep, words = _walked(Walk(rank, world_size, transport, options, seed, ep, tracer))
                said += [f"{seed}: {line}" for line in words]
            ep.close()
    return said


def _walked(walk: Walk) -> tuple[Any, list[str]]:
    """Walk, and return the communicator that is left and what was done."""
    try:
        walk.run()
    except BaseException as error:
        lines = "\n".join(walk.words)
        where = f"walk {walk.seed} over {walk.transport} {walk.options}, rank {walk.rank}"
        raise AssertionError(f"{where}: {error!r} after\n{lines}") from error
    return walk.ep, walk.words
