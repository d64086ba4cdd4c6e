"""The grouped fp8 product in Gluon without a GPU: its source under many schedules, and what is compiled from it."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moelink.rows import grouped_gluon
from tests.kernels.test_kernels_aot import output_of
from tests.rows.gluon_model import Descriptor, Language, Pointer, rebuilt
from tests.rows.grouped_fp8_cases import FP32_SUMS, POISON, Problem, error_over_bound, problem


def plain(weight: torch.Size) -> SimpleNamespace:
    """Launch constants as numbers."""
    given = grouped_gluon.constants_of(weight)
    return SimpleNamespace(**{
        field.name: getattr(value := getattr(given, field.name), "value", value) for field in dataclasses.fields(given)
    })  # fmt: skip


def run(
    given: Problem, out: torch.Tensor, *, programs: int = 2, seed: int = 0, language: Language | None = None,
) -> None:  # fmt: skip
    """Do what the kernel's source does with ``given``, one CTA after the other."""
    weight = given.weight.codes
    for program in range(programs):
        kernel = rebuilt(grouped_gluon, "grouped_gluon_kernel", language or Language(program, programs, seed + program))
        kernel(
            Descriptor(given.codes, (64, 128)), Pointer(given.scales), Pointer(given.offsets),
            Descriptor(weight.view(-1, weight.shape[2]), (128, 128)), Pointer(given.weight.scales), Pointer(out),
            len(given.codes), plain(weight.shape),
        )  # fmt: skip


def product(given: Problem, dtype: torch.dtype = torch.float32, **how: Any) -> torch.Tensor:
    """Return the output that the kernel's source computes for ``given``."""
    out = torch.full((given.codes.shape[0], given.weight.codes.shape[1]), POISON, dtype=dtype)
    run(given, out, **how)
    return out


SHAPES = {
    "groups end inside tiles": ((4, 0, 260, 64), 40, 384, 328),
    "one group has all": ((0, 0, 300, 0), 0, 256, 256),
    "no rows": ((0, 0), 40, 256, 256),
    "one block of K, one column block": ((130, 1), 3, 128, 128),
    "more blocks than stages": ((129,), 0, 768, 256),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_source_keeps_the_bound_under_all_schedules(name: str) -> None:
    given = problem(*SHAPES[name])
    for seed in range(3):
        out = product(given, programs=1 + seed, seed=10 * seed)
        assert (out[given.rows :] == POISON).all(), "rows that do not exist are not written"
        assert error_over_bound(out, given, FP32_SUMS) <= 1


class Recorder(Language):
    """Notes what is waited for, of which array of barriers, in the order in which the kernel makes them."""

    def __init__(self, *given: int) -> None:
        super().__init__(*given)
        self.arrays: list[Any] = []
        self.waits: list[tuple[int, int, int]] = []

    def allocate_shared_memory(self, *given: Any) -> Any:
        made = super().allocate_shared_memory(*given)
        if given[2] == "barriers":
            self.arrays.append(made.each)
        return made

    def wait(self, barrier: Any, phase: Any) -> None:
        place = [(a, s) for a, array in enumerate(self.arrays) for s, each in enumerate(array) if each is barrier]
        self.waits.append((*place[0], int(phase)))
        super().wait(barrier, phase)


def test_the_example_of_the_module() -> None:
    """Blocks 0 to 3 are loaded at once; block 4, in stage 0 again, waits for both consumers."""
    language = Recorder(0, 1, 0)
    product(problem((128,), 0, 256, 768), programs=1, language=language)
    _, empty = language.arrays
    assert [barrier.phase for barrier in empty] == [2, 2, 1, 1]
    waits = [(stage, phase) for array, stage, phase in language.waits if array == 1]
    assert waits == [(0, 1), (1, 1), (2, 1), (3, 1), (0, 0), (1, 0)]


def test_the_kernel_compiles_for_sm_90() -> None:
    found = [json.loads(line) for line in output_of("rows.grouped_gluon_aot")]
    assert len(found) == 4
    for each in found:
        assert not each["local"], f"{each} spills"
        assert each["shared"] <= 227 << 10, f"{each} overflows an SM"
        assert each["wgmma"] == 16, f"{each}: two consumers with two products of 128 columns and four instructions"
        assert not each["narrow_stores"], f"{each}: expected stores of 16 bytes"
        assert each["given_back"] == 2, f"{each}: expected all warps of a consumer to meet before a stage is given back"
        assert {"232", "40"} <= set(each["registers"]), each
