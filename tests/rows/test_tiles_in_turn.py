"""CTAs of the products in Gluon take tiles by a counter, and leave zeros in it: the sources under many schedules."""

from __future__ import annotations

import pytest
import torch

from moelink.rows import grouped_gluon
from tests.rows.gluon_model import Language, Pointer, rebuilt
from tests.rows.grouped_fp8_cases import FP32_SUMS, POISON, error_over_bound, problem
from tests.rows.grouped_gluon_cases import FEW, MANY, MXFP4, Source

KERNELS = pytest.mark.parametrize(
    ("kernel", "kind"), [(MANY, "fp8"), (FEW[16], "fp8"), (MXFP4[16], "mxfp4")], ids=["many", "few", "mxfp4"]
)


@pytest.mark.quick("a producer of each kernel, and an early launch")
@pytest.mark.parametrize("early", [False, True])
@KERNELS
def test_the_counter_is_zero_again_if_offsets_changed(kernel: Source, kind: str, early: bool) -> None:
    """Each CTA sees another number of tiles. ``run`` looks at the counter."""
    given = problem((11, 0, 130), 0, 128, 136, kind=kind)
    seen = [
        torch.tensor(each, dtype=torch.int32)
        for each in ((0, 130, 140, 141), (0, 0, 0, 0), (0, 0, 9, 9), (0, 1, 2, 141))
    ]
    for seed in range(4):
        kernel.run(given, torch.empty(141, 136), programs=4, seed=seed, early=early, seen=seen[seed:] + seen[:seed])


@pytest.mark.quick("a producer of each kernel, and an early launch")
@pytest.mark.parametrize("early", [False, True])
@KERNELS
def test_more_programs_than_tiles(kernel: Source, kind: str, early: bool) -> None:
    given = problem((3, 0), 5, 128, 136, kind=kind)
    for seed in range(3):
        out = kernel.product(given, programs=4, seed=seed, early=early)
        assert (out[3:] == POISON).all(), "rows that do not exist are not written"
        assert error_over_bound(out, given, FP32_SUMS) <= 1


def test_the_example_of_tile_counters() -> None:
    """2 programs, 5 tiles."""
    counter = torch.zeros(4, dtype=torch.int32)
    S = MANY.constants(problem((1,), 0, 128, 128).weight, early=False)
    take, end = [], []
    for program in range(2):
        cta = Language(program, 2, 0)
        cta.follow_previous_launch(S)
        take.append(rebuilt(grouped_gluon, "next_tile", cta))
        end.append(rebuilt(grouped_gluon, "end_tiles", cta))
    assert [take[program](Pointer(counter)) for program in (0, 1, 0, 1)] == [2, 3, 4, 5]
    end[1](Pointer(counter), S)
    assert counter.tolist() == [4, 1, 0, 0]
    assert take[0](Pointer(counter)) == 6
    end[0](Pointer(counter), S)
    assert counter.tolist() == [0, 0, 0, 0]
