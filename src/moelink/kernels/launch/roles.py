"""Run the roles of a launch: low numbers send, high numbers receive.

Without an SM limit the number of a CTA is its id. With one it takes a number, or several in turn
(``kernels.launch.sm_limit``).

Example: 3 senders and 5 numbers: CTAs with numbers 0 to 2 send, as CTAs 0 to 2 of 3, and those with numbers 3 and 4
receive, as CTAs 0 and 1 of 2.
"""

import triton
import triton.language as tl

from moelink.kernels.launch.sm_limit import run_numbers, words_of
from moelink.kernels.sync.dependent_launch import allow_next_launch, wait_for_previous_launch


@triton.jit
def _run_one(number, work, arguments, programs, S: tl.constexpr):
    work(number, programs, *arguments, S)


@triton.jit
def run_role(work, arguments, control, kind, programs, S: tl.constexpr):
    """Do the work of all numbers [0, ``programs``): ``work(number, programs, *arguments, S)`` by one CTA each."""
    wait_for_previous_launch(S)
    if S.NUM_SMS == 0:
        work(tl.program_id(0), programs, *arguments, S)
    else:
        run_numbers(_run_one, (work, arguments, programs), words_of(control, kind, S), programs, S)
    allow_next_launch(S)


@triton.jit
def run_roles(sends, sending, receives, receiving, control, kind, numbers, S: tl.constexpr):
    """Run both roles in one launch.

    Numbers [0, ``numbers.senders``) do ``sends(number, senders, *sending, S)``, the others of ``numbers.programs`` do
    ``receives``.
    """
    wait_for_previous_launch(S)
    if S.NUM_SMS == 0:
        _run_either(tl.program_id(0), sends, sending, receives, receiving, numbers, S)
    else:
        run_numbers(
            _run_either, (sends, sending, receives, receiving, numbers), words_of(control, kind, S), numbers.programs, S
        )
    allow_next_launch(S)


@triton.jit
def _run_either(number, sends, sending, receives, receiving, numbers, S: tl.constexpr):
    if number < numbers.senders:
        sends(number, numbers.senders, *sending, S)
    else:
        receives(number - numbers.senders, numbers.programs - numbers.senders, *receiving, S)
