"""The collective transport against the oracle, bit for bit: one spawn per world runs all its cases."""

import pytest

from moelink.testing import run_ranks
from tests.support.cases import FORMATS, Case, check_case, features, matrix, real_shapes, run_cases, some


def check_all(cases: list[Case], world_size: int) -> None:
    results = run_ranks(run_cases, world_size, cases, {"transport": "collective"}, timeout=240)
    for index, case in enumerate(cases):
        check_case(case, world_size, [result[index] for result in results])


@pytest.mark.full("test_property.py draws formats, layouts and reductions")
@pytest.mark.parametrize("world_size", [2, 1, 3, 4, 8])
def test_matrix_equals_oracle(world_size):
    check_all(some(matrix(FORMATS), 4) if world_size == 3 else matrix(), world_size)


@pytest.mark.parametrize("world_size, keep", [(2, 3), (1, 1), (2, 1), (3, 1)])
def test_features_equal_oracle(world_size, keep):
    check_all(some(features(), keep), world_size)


def test_real_shapes_equal_oracle():
    check_all(real_shapes(), 2)
