"""Say which ranks of a communicator take part, and check what ``mask`` and ``admit`` are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moelink.config import EPConfig
from moelink.errors import ArgumentError
from moelink.routing import ExpertMap


@dataclass(frozen=True)
class Membership:
    """The ranks of a communicator after a change, as each rank that goes on gets it.

    Attributes:
        present: ranks that take part in calls, ascending.
        masked: the others.
        call: the last call of this rank before the change. Dispatches and combines count together, from 1, and anew
            after a change.
        seconds: how long the change took on this rank. No call is made meanwhile.
    """

    present: tuple[int, ...]
    masked: tuple[int, ...]
    call: int
    seconds: float


def check_masked(
    ranks: Iterable[int], config: EPConfig, masked: Sequence[int], experts: Sequence[int] | None
) -> tuple[int, ...]:
    """Return ``ranks``, which are to be masked beside ``masked``, ascending.

    ``experts``: as of :meth:`moelink.Communicator.mask`.

    Raises:
        ArgumentError: they are not distinct ranks that take part, or this rank is among them, or an expert would be
            left without a copy.
    """
    given = _numbers(ranks, f"distinct ranks that take part, without this rank, {config.rank}")
    present = [rank for rank in range(config.world_size) if rank not in masked]
    wrong = [rank for rank in given if rank not in present or rank == config.rank]
    if wrong or not given:
        others = [rank for rank in present if rank != config.rank]
        raise ArgumentError("ranks", f"some of {others}, the ranks that take part beside this one", given)
    if experts is not None:
        _keep_copies(experts, config, [rank for rank in present if rank not in given])
    return tuple(sorted(given))


def _keep_copies(experts: Sequence[int], config: EPConfig, present: Sequence[int]) -> None:
    """Refuse to leave an expert of a placement without a slot on the ranks ``present``."""
    if len(experts) != config.num_experts:
        raise ArgumentError("experts", f"the expert of each of {config.num_experts} slots", f"{len(experts)} entries")
    slots = ExpertMap(config.num_experts, config.world_size)
    kept = {expert for rank in present for expert in experts[slots.first(rank) : slots.first(rank + 1)]}
    lost = sorted(set(experts) - kept)
    if lost:
        raise ArgumentError(
            "ranks", "ranks without the last copy of an expert (leave experts out, and its tokens are dropped)",
            f"ranks that have the last copies of experts {lost[:8]}",
        )  # fmt: skip


def check_admitted(ranks: Iterable[int], config: EPConfig, masked: Sequence[int]) -> tuple[int, ...]:
    """Return ``ranks``, which are to take part again, ascending.

    Raises:
        ArgumentError: they are not distinct ranks among ``masked``: others take part already.
    """
    given = _numbers(ranks, f"distinct ranks among the masked ones, {list(masked)}")
    if not given or any(rank not in masked for rank in given):
        raise ArgumentError("ranks", f"some of {list(masked)}, the ranks that are masked", given)
    return tuple(sorted(given))


def _numbers(ranks: Iterable[int], expected: str) -> list[int]:
    try:
        given = list(ranks)
    except TypeError:
        raise ArgumentError("ranks", expected, repr(ranks)) from None
    whole = all(isinstance(rank, int) and not isinstance(rank, bool) for rank in given)
    if not whole or len(set(given)) != len(given):
        raise ArgumentError("ranks", expected, given)
    return given
