"""Who works in a launch with an SM limit, as ``kernels.launch.sm_limit`` decides it, noted."""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl

from moelink.kernels.launch import sm_limit as turns


@dataclasses.dataclass(frozen=True)
class Budget:
    """What ``kernels.launch.sm_limit`` reads of a spec."""

    NUM_SMS: object
    SM_ID: object
    NUMBERS_IN_TURN: bool = False


@triton.jit
def note(words, times, places, programs, S: tl.constexpr):
    """Count how often each number is taken, and on which sm_id."""
    turns.run_numbers(note_number, (times, places), words, programs, S)


@triton.jit
def note_number(number, times, places, S: tl.constexpr):
    """Note that ``number`` is taken, and where."""
    tl.atomic_add(times + number, 1)
    tl.store(places + number, turns.sm_id(S.SM_ID))
