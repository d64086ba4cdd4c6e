"""One rank's problem, known to all: nobody is left waiting for a rank that gave up."""

from __future__ import annotations

from moelink.control.exchange import Peers
from moelink.control.values import gather_values
from moelink.integrations.transformers.errors import CheckpointError


def agreed(problem: BaseException | None, peers: Peers | None) -> None:
    """Raise ``problem`` here, and a CheckpointError that repeats it on ranks without one. Collective.

    ``peers`` is None for one rank.
    """
    if peers is not None:
        told = gather_values(None if problem is None else str(problem), peers)
        if problem is None:
            for rank, text in enumerate(told):
                if text is not None:
                    raise CheckpointError(f"rank {rank}: {text}")
    if problem is not None:
        raise problem
