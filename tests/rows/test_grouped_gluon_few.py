"""The grouped fp8 product of few rows in Gluon without a GPU, as in ``test_grouped_gluon``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.rows.grouped_fp8_cases import FP32_SUMS, POISON, error_over_bound, problem
from tests.rows.grouped_gluon_cases import FEW, Recorder, assert_forms_are_compiled

SHAPES = {
    "groups end inside tiles": ((4, 0, 70, 33), 40, 640, 328),
    "one group has all": ((0, 0, 100, 0), 0, 256, 256),
    "no rows": ((0, 0), 40, 256, 256),
    "one block of K, one column block": ((66, 1), 3, 128, 128),
    "more blocks than stages": ((17,), 0, 1792, 136),
    "full tiles": ((64, 128), 0, 512, 256),
}
QUICK = {"full tiles": "the ring is full when a tile ends", "no rows": "a CTA without a tile"}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.quick(QUICK[name])] if name in QUICK else []) for name in SHAPES
])  # fmt: skip
@pytest.mark.parametrize("tile_rows", FEW)
def test_the_source_keeps_the_bound_under_all_schedules(tile_rows: int, name: str) -> None:
    FEW[tile_rows].assert_schedules_keep_the_bound(problem(*SHAPES[name]))


@pytest.mark.parametrize("tile_rows", FEW)
def test_rows_behind_the_buffer_are_no_rows(tile_rows: int) -> None:
    """Offsets may name more rows than the buffer has, as if it ended with the last group that it reaches."""
    whole = problem((20, 5, 50), 0, 256, 256)
    part = replace(whole, codes=whole.codes[:43], scales=whole.scales[:, :43].contiguous())
    out = FEW[tile_rows].product(part)
    ends = torch.tensor([0, 20, 25, 43], dtype=torch.int32)
    assert error_over_bound(out, replace(part, offsets=ends), FP32_SUMS) <= 1


def test_the_example_of_the_module() -> None:
    """The tiles of CTA 0 of 4, and its producer's waits: for the stages of blocks 3 and 5, and then, before it says
    that there is no more tile, for that of block 4. It is the last CTA to end."""
    language = Recorder(0, 4, 0, numbers=(0, 5, 3))
    out = FEW[16].product(problem((5, 0, 20), 0, 256, 256), language=language)
    written = torch.zeros(25, 256, dtype=torch.bool)
    written[:5, :128] = written[5:21, 128:] = True
    assert torch.equal(out != POISON, written)
    assert language.waits_for_empty_stages() == [(3, 1), (5, 1), (4, 1)]


def test_the_kernel_compiles_for_sm_90() -> None:
    """Two consumers with a product of four instructions."""
    assert_forms_are_compiled("few", ((1, 0),) * 3, wgmma=4, waits=1)
