"""The grouped fp8 product in Gluon without a GPU: its source under many schedules, and what is compiled from it."""

from __future__ import annotations

import pytest

from tests.rows.grouped_fp8_cases import problem
from tests.rows.grouped_gluon_cases import MANY, Recorder, assert_forms_are_compiled

SHAPES = {
    "groups end inside tiles": ((4, 0, 257, 63), 40, 384, 328),
    "one group has all": ((0, 0, 300, 0), 0, 256, 256),
    "no rows": ((0, 0), 40, 256, 256),
    "one block of K, one column block": ((130, 1), 3, 128, 128),
    "more blocks than stages": ((129,), 0, 768, 256),
    "more blocks than stages, an odd number": ((129, 3), 0, 640, 256),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.quick("a CTA without a tile")] if name == "no rows" else [])
    for name in SHAPES
])  # fmt: skip
def test_the_source_keeps_the_bound_under_all_schedules(name: str) -> None:
    MANY.assert_schedules_keep_the_bound(problem(*SHAPES[name]))


def test_the_example_of_the_module() -> None:
    """Blocks 0 to 3 are loaded at once; block 4, in stage 0 again, waits for both consumers. The end of the tiles, in
    stage 2, waits as block 6 would."""
    language = Recorder(0, 1, 0)
    MANY.product(problem((128,), 0, 256, 768), language=language)
    _, empty = language.arrays
    assert [barrier.phase for barrier in empty] == [2, 2, 1, 1]
    assert language.waits_for_empty_stages() == [(0, 1), (1, 1), (2, 1), (3, 1), (0, 0), (1, 0), (2, 0)]


def test_the_kernel_compiles_for_sm_90() -> None:
    """Two consumers with two products of 128 columns and four instructions, and two waits for each: for the product,
    and to hold its sums back from moving behind the next one. The code has two blocks of K, and the odd last one."""
    forms = ((2, 0), (2, 0), (3, 0), (1, 0), (3, 192))
    assert_forms_are_compiled("many", forms, wgmma=8, waits=4)
