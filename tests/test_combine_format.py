"""Rows that travel home in a format: every transport against the oracle, the error bound, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moelink
from cases import Case, Setup, by_setup, check_case, run_cases
from moelink.config import COMBINE_FORMATS
from moelink.formats import get_format
from moelink.memory.workspace import Workspace
from moelink.testing import run_ranks
from symmetric_ranks import one_process, run_case

FIELDS = {"num_experts": 4, "topk": 2, "hidden_size": 256, "max_tokens_per_rank": 3}


def cases_of(fmt: str, **more: object) -> list[Case]:
    """Each way in which rows go home: sums, rows, unreduced, one a rank, with a shared expert, of masked groups."""

    def case(scenario: str, options: dict[str, object], **kind: object) -> Case:
        setup = Setup("mxfp8" if fmt == "mxfp8" else "fp8_block128", (("combine_format", fmt), *options.items()))
        return Case(dataclasses.replace(setup, options=(*setup.options, *more.items())), scenario, **kind)  # type: ignore[arg-type]

    return [
        case("uniform", {}),
        case("holes", {}, weights="none", shared=True),
        case("repeats", {}, weights="none", reduce=False),
        case("repeats", {"pre_reduce": False}, weights="combine"),
        case("one_rank_empty", {"layout": "rank"}),
        case("uniform", {"fused_shared_expert": True}),
        case("skewed", {"capacity": 9}),
        case("uniform", {"layout": "masked"}),
        case("uniform", {"layout": "masked", "pre_reduce": False}, weights="left"),
        case("uniform", {"combine_dtype": torch.float32}),
        case("uniform", {"combine_dtype": torch.float16}, reduce=False, weights="none"),
    ]


KINDS = {case.id: case for fmt in reversed(COMBINE_FORMATS) for case in cases_of(fmt)}


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_oracle(kind: str) -> None:
    case = dataclasses.replace(KINDS[kind], small=True)
    transport = one_process(case.setup.fields, 2)
    check_case(case, 2, run_case(transport, case, [0, 1]))
    transport.close()


@pytest.mark.parametrize("transport, ranks_per_node", [("collective", None), ("symmetric", None), ("symmetric", 1)])
def test_ranks_as_processes_equal_oracle(transport: str, ranks_per_node: int | None) -> None:
    kept = slice(0, None, 1 if transport == "collective" else 3)
    cases = [case for fmt in COMBINE_FORMATS for case in cases_of(fmt)][kept]
    if ranks_per_node is not None:
        options = ("ranks_per_node", ranks_per_node)
        setups = [dataclasses.replace(case.setup, options=(*case.setup.options, options)) for case in cases]
        cases = [dataclasses.replace(case, setup=setup, small=True) for case, setup in zip(cases, setups, strict=True)]
    results = run_ranks(run_cases, 2, cases, {"transport": transport}, timeout=200)
    for index, case in enumerate(cases):
        check_case(case, 2, [result[index] for result in results])
