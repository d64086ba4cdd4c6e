"""One rank's problem, known to all: nobody is left waiting for a rank that gave up."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from moelink.integrations.transformers.errors import CheckpointError


def agreed(problem: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Raise ``problem`` here, and a CheckpointError that repeats it on ranks without one. Collective.

    ``group`` is None for one rank.
    """
    if group is not None:
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, None if problem is None else str(problem), group=group)
        if problem is None:
            for rank, text in enumerate(told):
                if text is not None:
                    raise CheckpointError(f"rank {rank}: {text}")
    if problem is not None:
        raise problem
