"""Ranks that load, save and run a model in virtual time (:mod:`tests.support.simulated_groups`), one of which a fault
hits at any place: while it reads files, in an exchange over the caller's group, or in a forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import moelink
from moelink.integrations.transformers import CheckpointError, ParallelModel, from_pretrained, parallel
from tests.integrations.transformers.transformers_models import tensors_of
from tests.support.simulated_groups import KINDS as OF_ALL
from tests.support.simulated_groups import PATIENCE, TIMEOUT, Fault, OddError, Rank, Ranks
from tests.support.simulated_ranks import here

WORLD, EXPERTS, VOCABULARY, LENGTH = 3, 4, 16, 4
SPAN = 80
"""Places that a rank passes, about."""
SLOW = "slow"
KINDS = (*OF_ALL, SLOW)
"""As of all schedules; and a rank that lives reads files for many times the timeout."""


def build(seed: int) -> MixtralForCausalLM:
    """A tiny model."""
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=2, max_position_embeddings=16,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    ))  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, and what its model says of each rank's tokens, unsharded."""

    folder: Path
    expected: Sequence[Tensor]

    @classmethod
    def make(cls, folder: Path, seed: int) -> Checkpoint:
        """Save a model."""
        model = build(seed)
        model.save_pretrained(folder)
        with torch.no_grad():
            return cls(folder, [model(tokens(rank)).logits for rank in range(WORLD)])


def tokens(rank: int) -> Tensor:
    """What rank ``rank`` passes: a sequence, of other lengths."""
    return torch.arange(1 + rank, 1 + rank + LENGTH - rank)[None]


@dataclass
class Said:
    """What happened to one rank.

    Attributes:
        error: what ended its program.
        gone: ranks whose programs had ended before, by their own errors.
        finished: it got to the end.
        wrong: what was not as it should be.
        longest: seconds of its longest call.
    """

    error: BaseException | None = None
    gone: frozenset[int] = frozenset()
    finished: bool = False
    wrong: str = ""
    longest: float = 0.0


def run(seed: int, fault: Fault, first: Checkpoint, second: Checkpoint, folder: Path) -> tuple[Ranks, list[Said]]:
    """A schedule: load ``first``, compute, save to ``folder``, load ``second``, compute. An error ends the program."""
    ranks, said = Ranks(seed, fault, WORLD), [Said() for _ in range(WORLD)]

    def init(*, group: Any, device: Any, transport: str, timeout: float, **fields: Any) -> moelink.Communicator:
        return ranks.communicator(**fields)

    def main(process: Rank) -> None:
        mine = said[process.rank]
        process.arm()
        try:
            with torch.no_grad():
                _run(process, mine, ranks.group.members[process.rank], first, second, folder)
        except (moelink.MoelinkError, OddError) as error:
            mine.error = error
            mine.gone = frozenset(rank for rank, each in enumerate(said) if each.error is not None) - {process.rank}
            process.exit()

    with mock.patch.object(moelink, "init", init), mock.patch.object(parallel, "fill", _reading(fault, parallel.fill)):
        ranks.run(main)
    return ranks, said


def _reading(fault: Fault, fill: Callable[..., Any]) -> Callable[..., Any]:
    """``fill``, which takes time and has places before and after it."""

    def fill_slowly(*arguments: Any) -> Any:
        process: Any = here()
        process.come_by()
        process.sleep(process.choice.uniform(0, 0.5))
        if fault.kind == SLOW and fault.victim == process.rank:
            process.sleep(8 * TIMEOUT + fault.seconds)
        result = fill(*arguments)
        process.come_by()
        return result

    return fill_slowly


def _run(process: Rank, said: Said, group: Any, first: Checkpoint, second: Checkpoint, folder: Path) -> None:
    def timed(call: Callable[[], Any]) -> Any:
        begin = process.now()
        try:
            return call()
        finally:
            said.longest = max(said.longest, process.now() - begin)

    def computes(model: ParallelModel, checkpoint: Checkpoint) -> None:
        got = timed(lambda: model.model(tokens(process.rank)).logits)
        if not torch.allclose(got, checkpoint.expected[process.rank], rtol=1e-4, atol=1e-5):
            said.wrong += f"other logits than of {checkpoint.folder.name}; "

    load = functools.partial(from_pretrained, max_tokens_per_rank=LENGTH, group=group, device="cpu", timeout=TIMEOUT)
    model = timed(lambda: load(first.folder))
    computes(model, first)
    timed(lambda: model.save_pretrained(folder))
    whole, again = (tensors_of(each) for each in (first.folder, folder))
    if whole.keys() != again.keys() or not all(torch.equal(whole[name], again[name]) for name in whole):
        said.wrong += "another checkpoint was written; "
    timed(lambda: model.load_pretrained(second.folder))
    computes(model, second)
    computes(model, second)
    said.finished = True


def check(ranks: Ranks, said: Sequence[Said]) -> str:
    """Check what is promised; return how the schedule ended: "finished" or "ended"."""
    fault, victim = ranks.fault, ranks.fault.victim
    missing = ranks.hit and fault.kind in ("killed", "stopped")
    living = [rank for rank in range(WORLD) if not (missing and rank == victim)]
    for rank in living:
        each = said[rank]
        where = f"{fault}: rank {rank}: {each}"
        assert not each.wrong, where
        assert each.finished != (each.error is not None), where
        held = 8 * TIMEOUT + fault.seconds if fault.kind == SLOW or rank == victim else 0.0
        assert each.longest <= PATIENCE + held, where
        if isinstance(each.error, CheckpointError):
            assert str(each.error).startswith(f"rank {victim}: "), where
            assert fault.kind == "raises", where
        elif isinstance(each.error, OddError):
            assert (rank, fault.kind) == (victim, "raises"), where
        elif each.error is not None:
            assert isinstance(each.error, moelink.PeerTimeoutError), where
            nobody = {-1} if fault.kind == "late" else set()
            assert each.error.peer in {victim, *nobody, *each.gone}, where
    ended = [rank for rank in living if said[rank].error is not None]
    harmless = fault.is_harmless or fault.kind == SLOW
    assert not ended or (ranks.hit and not harmless), f"{fault}: nothing happened, but {said}"
    return "ended" if ended else "finished"
