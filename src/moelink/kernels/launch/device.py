"""Describe a device's abilities, and how kernels are compiled and launched for them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from moelink.config import EPConfig
from moelink.memory.protocol import MOST_THREADS


def host_clock() -> int:
    """Return nanoseconds, for interpreted waits. First yields the processor, because the awaited rank may need it."""
    os.sched_yield()
    return time.monotonic_ns()


def is_interpreted() -> bool:
    """Return True when Triton runs kernels in its interpreter (TRITON_INTERPRET=1 before triton was imported)."""
    return not isinstance(tl.sum, triton.JITFunction)


@cache
def has_native_casts(device: torch.device) -> bool:
    """Return True where the hardware's 8-bit float casts agree with the formats' arithmetic: NVIDIA, sm_89 and
    newer."""
    if is_interpreted() or torch.version.hip:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)


def has_dependent_launches(device: torch.device) -> bool:
    """Return True where kernels on ``device`` may start before the launch before them has ended
    (``kernels.sync.dependent_launch``): NVIDIA, sm_90 and newer."""
    if is_interpreted() or torch.version.hip:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (9, 0)


def launches_overlap(devices: Sequence[torch.device]) -> bool:
    """Return True where launches of the ranks of one process on ``devices`` may wait for one another.

    That is where each rank has a GPU of its own, or there is only one. On a CPU launches run one after the other. On a
    GPU that ranks share, streams start them in any order: receivers of some ranks could fill it and wait for ever for
    the sender of another, which finds no room.
    """
    return len(devices) == 1 or (devices[0].type == "cuda" and len(set(devices)) == len(devices))


def clock_of(device: torch.device) -> Any:
    """Return the CLOCK of kernels on ``device``; see ``signals.clock``."""
    if device.type == "cpu":
        return host_clock
    return "gcn" if torch.version.hip else "ptx"


def sm_limit_of(config: EPConfig, device: torch.device) -> int:
    """Return the SM limit of a launch, 0 for none.

    Only NVIDIA devices have one. Elsewhere a launch has as many CTAs as that many SMs hold, wherever they run.
    """
    if config.num_sms is None or device.type == "cpu" or torch.version.hip:
        return 0
    return config.num_sms


def threads_of(device: torch.device) -> int:
    """Return the most threads of a CTA on ``device``; 1 on a CPU."""
    return 1 if device.type == "cpu" else MOST_THREADS if torch.version.hip else MOST_THREADS // 2


def clock_ticks(seconds: float, device: torch.device) -> int:
    """Return the ticks of that clock in ``seconds``."""
    return int(seconds * (1e8 if device.type != "cpu" and torch.version.hip else 1e9))
