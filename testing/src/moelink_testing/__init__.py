"""Test Triton kernels that signal one another, on a machine without a GPU.

:func:`run_ranks`            runs interpreted kernels of several ranks under one seeded schedule
:func:`explore_schedules`    runs many schedules, and names the seed of one that fails
:func:`lowered`              compiles a kernel for a GPU that is not there, to read its instructions
:func:`prints`               hashes compiled forms, to prove that a change moves code and does nothing else

:func:`moelink_testing.interpreter.speed_up` makes Triton's interpreter faster. :mod:`moelink_testing.network` draws
faults for simulated networks. :class:`Scheduler` is for schedules with a clock, or with ranks that stop.

The package reads what Triton reads as it is loaded, so set ``TRITON_INTERPRET`` before you import either.
"""

from moelink_testing.fingerprints import prints
from moelink_testing.lowering import Lowered, lowered
from moelink_testing.scheduler import Deadlock, FailedSchedule, Scheduler, explore_schedules, run_ranks

__all__ = [
    "Deadlock",
    "FailedSchedule",
    "Lowered",
    "Scheduler",
    "explore_schedules",
    "lowered",
    "prints",
    "run_ranks",
]
