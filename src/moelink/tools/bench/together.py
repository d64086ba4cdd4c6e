"""What ranks do together over the default process group, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moelink.errors import MoelinkError

T = TypeVar("T")


def host_barrier() -> None:
    """The hosts of all ranks wait for one another (a CPU tensor, so that no device takes part)."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def everyone(value: T) -> list[T]:
    """``value`` of every rank, by rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """The result of ``action``, or None and the first reason on every rank when it failed on any. Collective."""
    result, reason = None, ""
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - whatever a contender raises becomes the reason of its row
        reason = str(error) if isinstance(error, MoelinkError) else f"{type(error).__name__}: {error}".rstrip(": ")
    first = next((said for said in everyone(reason) if said), "")
    return (None, first.splitlines()[0][:300]) if first else (result, "")


def first_fault(fault: str) -> str:
    """The first rank's ``fault`` that is not empty, with its rank; or empty. Collective."""
    return next((f"rank {rank}: {said}" for rank, said in enumerate(everyone(fault)) if said), "")
