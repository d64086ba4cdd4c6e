"""Ranks that balance a layer's experts in virtual time (:mod:`tests.support.simulated_groups`), one of which a fault
hits at any place of a step or of the forward passes between steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import moelink
from moelink.nn import Balancer, MoE, Placement
from moelink.nn.placed_experts import Experts
from moelink.nn.router import Router
from tests.support.simulated_groups import AT_ONCE, PATIENCE, Fault, OddError, Rank, Ranks
from tests.support.simulated_ranks import here

T = TypeVar("T")

EXPERTS, PHYSICAL, HIDDEN, INNER, TOKENS, TOPK = 5, 7, 16, 8, 6, 2
WORLD, SEED = 3, 1
SPAN = 150
"""Places that a rank passes from its first step to its last forward pass, about."""
FIELDS = {
    "num_experts": PHYSICAL, "topk": TOPK, "hidden_size": HIDDEN, "max_tokens_per_rank": TOKENS,
    "dispatch_format": "fp32", "combine_dtype": torch.float32,
}  # fmt: skip
LOAD = (1, 1, 9, 9, 1, 1, 1)
"""Tokens of each physical expert, as if counted."""


class PassingBalancer(Balancer):
    """A balancer whose own work has places as well: between exchanges, and amid the change of the model."""

    def _pack(self, *arguments: Any) -> Any:
        return _between_places(lambda: super(PassingBalancer, self)._pack(*arguments))

    def _exchange(self, *arguments: Any) -> Any:
        return _between_places(lambda: super(PassingBalancer, self)._exchange(*arguments))

    def _unpack(self, *arguments: Any) -> Any:
        return _between_places(lambda: super(PassingBalancer, self)._unpack(*arguments))

    def _use(self, *arguments: Any) -> Any:
        return _between_places(lambda: super(PassingBalancer, self)._use(*arguments))


def _between_places(call: Callable[[], T]) -> T:
    process: Any = here()
    process.come_by()
    result = call()
    process.come_by()
    return result


def tokens(rank: int, turn: int) -> Tensor:
    """What rank ``rank`` passes in its forward ``turn``, of other sizes each time."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(1 + (rank + turn) % TOKENS, HIDDEN, generator=generator)


@functools.cache
def expected(rank: int, turn: int) -> Tensor:
    """What the layer makes of these tokens wherever its experts are, by plain torch."""
    x = tokens(rank, turn)
    gate_up, down, router = _weights()
    routing, out = router(x), torch.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(routing.topk_ids.tolist(), routing.topk_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@functools.cache
def _weights() -> tuple[Tensor, Tensor, Router]:
    config = moelink.EPConfig(**{**FIELDS, "num_experts": EXPERTS}, world_size=1, rank=0)
    experts = Experts(config, intermediate_size=INNER, seed=SEED, dtype=torch.float32)
    router = Router(HIDDEN, EXPERTS, topk=TOPK, config=None, seed=SEED, dtype=torch.float32, device="cpu")
    return experts.gate_up_proj.detach(), experts.down_proj.detach(), router


@dataclass
class Said:
    """What happened to one rank.

    Attributes:
        error: the first error that ended its communicator.
        aborted: peers that a step was called off for.
        odd: whether its own handler's exception came out of a call.
        maps: which experts it uses: after each step.
        outputs: by turn, whether the layer's output was right.
        finished: it balanced all and computed until the end.
        waits: the longest that it waited in one call, and in one after the error.
    """

    error: moelink.PeerTimeoutError | None = None
    aborted: list[int] = field(default_factory=list)
    odd: bool = False
    maps: list[tuple[int, ...]] = field(default_factory=list)
    outputs: dict[int, bool] = field(default_factory=dict)
    finished: bool = False
    waits: tuple[float, float] = 0.0, 0.0


def run(seed: int, fault: Fault) -> tuple[Ranks, list[Said]]:
    """A schedule: plan, move in several steps with a forward pass after each, and some more forward passes."""
    ranks, said = Ranks(seed, fault, WORLD), [Said() for _ in range(WORLD)]

    def main(process: Rank) -> None:
        with torch.no_grad():
            _Program(ranks, process, said[process.rank]).run()

    ranks.run(main)
    return ranks, said


class _Program:
    """What one rank does."""

    def __init__(self, ranks: Ranks, process: Rank, said: Said) -> None:
        self._process, self._said = process, said
        self._ep = ranks.communicator(**FIELDS)
        placement = Placement(tuple(place % EXPERTS for place in range(PHYSICAL)))
        self._layer = MoE(self._ep, intermediate_size=INNER, seed=SEED, placement=placement)
        assert self._layer.load is not None
        self._layer.load.total.copy_(torch.tensor(LOAD))
        self._balancer = PassingBalancer(self._layer, max_bytes=1, group=ranks.group.members[process.rank])  # type: ignore[arg-type]

    def run(self) -> None:
        """Go on until all is moved, or the communicator has ended; then use it once more."""
        self._balancer.plan()
        self._process.arm()
        turn = 0
        try:
            while self._balancer.steps_left and turn < 12:
                self._timed(self._balancer.step)
                self._said.maps.append(self._layer.experts.placement.experts)
                self._forward(turn)
                turn += 1
            for more in range(3):  # a program goes on calling, and so learns that a rank has failed
                self._forward(turn + more)
            self._said.finished = True
        except moelink.PeerTimeoutError as error:
            self._said.error = error
            self._ends_alike()

    def _forward(self, turn: int) -> None:
        out = self._timed(lambda: self._layer(tokens(self._process.rank, turn)))
        if out is not None:
            right = torch.allclose(out, expected(self._process.rank, turn), rtol=1e-4, atol=1e-5)
            self._said.outputs[turn] = right

    def _timed(self, call: Callable[[], T]) -> T | None:
        """Make a call, again where it was called off or a handler's exception came; None if it does not work out."""
        for _ in range(3):
            begin = self._process.now()
            try:
                return call()
            except moelink.PeerAbortedError as error:
                self._said.aborted.append(error.peer)
            except OddError:
                self._said.odd = True
            finally:
                longest, after = self._said.waits
                self._said.waits = max(longest, self._process.now() - begin), after
        return None

    def _ends_alike(self) -> None:
        """Every further use raises the same error at once."""
        for use in (lambda: self._layer(tokens(self._process.rank, 0)), self._balancer.step, self._ep.check):
            if use == self._balancer.step and not self._balancer.steps_left:
                continue
            begin = self._process.now()
            with pytest.raises(moelink.PeerTimeoutError) as again:
                use()
            assert str(again.value) == str(self._said.error)
            longest, after = self._said.waits
            self._said.waits = longest, max(after, self._process.now() - begin)


def check(ranks: Ranks, said: list[Said]) -> str:
    """Check what is promised; return how the schedule ended: "finished" or "ended"."""
    fault = ranks.fault
    victim = fault.victim
    living = [
        rank for rank in range(WORLD) if not (ranks.hit and rank == victim and fault.kind in ("killed", "stopped"))
    ]
    for rank in living:
        each = said[rank]
        assert all(each.outputs.values()), f"rank {rank}: wrong numbers, {each}"
        lasts = PATIENCE + (fault.seconds if rank == victim else 0.0)
        assert each.waits[0] <= lasts, f"rank {rank}: {each}"
        assert each.waits[1] <= AT_ONCE + (fault.seconds if rank == victim else 0.0), f"rank {rank}: {each}"
        assert each.finished != (each.error is not None), f"rank {rank}: {each}"
        assert set(each.aborted) <= ({victim} if ranks.hit else set()), f"rank {rank}: {each}"
        if each.error is not None:
            # A late rank that has come by the time the others agree is not known any more: then nobody is named.
            nobody = {-1} if fault.kind == "late" else set()
            assert each.error.peer in {victim, *nobody}, f"rank {rank} names {each.error.peer}: {each.error}"
            assert isinstance(each.error, moelink.PeerLostError) <= (fault.kind == "killed"), f"{each.error}"
    ended = {rank for rank in living if said[rank].error is not None}
    assert not ended or len(ended) == len(living), f"some go on: {said}"
    assert len({said[rank].error.peer for rank in ended}) <= 1, f"they name different ranks: {said}"  # type: ignore[union-attr]
    if ended:
        assert ranks.hit, f"nothing happened, but {said}"
        assert not fault.is_harmless, f"{fault}: {said}"
        return "ended"
    assert len({said[rank].maps[-1] for rank in living}) == 1, f"different maps: {said}"
    assert len(living) == WORLD or all(said[rank].maps for rank in living)
    return "finished"
