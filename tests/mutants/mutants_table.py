"""The faults of ``make mutants``: what is wrong and in which file, the text and what replaces it, and the test.

``mutants_of_kernels`` has those of what runs on the device, ``mutants_of_levels`` those of two levels between nodes,
``mutants_of_own_rows`` those of own rows in combine, ``mutants_of_counting`` those of counting messages alone,
``mutants_of_dependent_launches`` those of launches that start early, ``mutants_of_memberships`` those of masks and
admissions, ``mutants_of_bench`` those of comparisons in benchmarks, ``mutants_of_control`` those of handshakes, probes
and recovery, ``mutants_of_training`` those of losses, biases, padding, batch_invariant and metrics, ``mutants_of_host``
those of the rest. To add a row, copy three lines and change them. Choose a fault that
leaves a program which runs, and the narrowest test that must fail;
``python tests/mutants/mutants.py -k WORD`` tries the rows in which a word occurs.
"""

from __future__ import annotations

from tests.mutants.mutants_of_bench import OF_BENCH
from tests.mutants.mutants_of_contract import OF_CONTRACT
from tests.mutants.mutants_of_control import OF_CONTROL
from tests.mutants.mutants_of_counting import OF_COUNTING
from tests.mutants.mutants_of_dependent_launches import OF_DEPENDENT_LAUNCHES
from tests.mutants.mutants_of_gluon import OF_GLUON
from tests.mutants.mutants_of_host import OF_HOST
from tests.mutants.mutants_of_kernels import OF_KERNELS
from tests.mutants.mutants_of_levels import OF_LEVELS
from tests.mutants.mutants_of_memberships import OF_MEMBERSHIPS
from tests.mutants.mutants_of_own_rows import OF_OWN_ROWS
from tests.mutants.mutants_of_training import OF_TRAINING

MUTANTS = (
    *OF_KERNELS,
    *OF_CONTRACT,
    *OF_LEVELS,
    *OF_OWN_ROWS,
    *OF_COUNTING,
    *OF_DEPENDENT_LAUNCHES,
    *OF_BENCH,
    *OF_MEMBERSHIPS,
    *OF_CONTROL,
    *OF_TRAINING,
    *OF_HOST,
    *OF_GLUON,
)
