"""What calls within an SM limit do otherwise, under seeded schedules: one number after the other, present rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

import moelink.memory.workspace as workspaces
from moelink.kernels.combine.present_rows import nth_row, present_of
from moelink.kernels.launch import grid
from moelink.kernels.launch.constants import combine_spec, dispatch_spec
from moelink.kernels.launch.grid import Launch
from moelink.kernels.launch.own_rows import with_own_rows
from moelink.transports.symmetric import combine as combining
from moelink.transports.symmetric import plans as dispatching
from moelink.transports.symmetric import rank as ranks
from tests.support.cases import Setup
from tests.support.protocol_runs import Many, run, scenarios
from tests.tiers import seeds

SIZES = (("max_tokens_per_rank", 7), ("hidden_size", 8), ("num_sms", 2))
KINDS = {
    "two ranks": Setup("bf16", SIZES, num_experts=4, topk=3),
    "odd": Setup("bf16", (*SIZES, ("hidden_size", 7)), num_experts=4, topk=2),
    "fp32": Setup("bf16", (*SIZES, ("combine_dtype", torch.float32)), num_experts=4, topk=2),
    "encoded": Setup("fp8_block128", (*SIZES, ("hidden_size", 256)), num_experts=4, topk=3),
    "shared expert": Setup("bf16", (*SIZES, ("fused_shared_expert", True)), num_experts=3, topk=2),
}
NAMES = ("fused_pair", "split_pair", "combines_in_a_row", "two_calls_other_token_counts", "a_rank_with_nothing")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two of three SMs, each of which holds two CTAs; more numbers than CTAs; sums with flags, as many tokens on a GPU
    have them."""
    monkeypatch.setattr(workspaces, "LAMPORT_BYTES", 0)
    monkeypatch.setattr(workspaces, "FEW_TOKENS", 2)
    monkeypatch.setattr(ranks, "sm_limit_of", lambda config, device: 2)
    monkeypatch.setattr(ranks, "sm_count", lambda device: 3)
    monkeypatch.setattr(dispatching, "dispatch_launch", lambda *args, **options: Launch(3, 4, resident=2))
    monkeypatch.setattr(dispatching, "layout_launch", lambda *args: Launch(0, 4, resident=2))
    monkeypatch.setattr(combining, "combine_launch", lambda *args, **options: Launch(3, 4, resident=2))
    for module, name in ((dispatching, "dispatch_spec"), (combining, "combine_spec")):
        make = getattr(module, name)

        def limited(*args: Any, make: Any = make, **options: Any) -> Any:
            spec = make(*args, **options)
            return dataclasses.replace(
                spec, NUM_SMS=2, NUMBERS_IN_TURN=True, SM_ID=lambda: interpreter_builder.grid_idx[0] % 3
            )

        monkeypatch.setattr(module, name, limited)
    for spec in (dispatch_spec, combine_spec, with_own_rows):
        spec.cache_clear()
    yield
    for spec in (dispatch_spec, combine_spec, with_own_rows):
        spec.cache_clear()


@pytest.mark.usefixtures("few")
@seeds(1, 5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_scenario_on_few_sms(kind: str, name: str, seeds: Any) -> None:
    for seed in seeds:
        run(seed, **scenarios(KINDS[kind])[name])


@pytest.mark.usefixtures("few")
@seeds(1, 5)
def test_three_ranks_on_few_sms(seeds: Any) -> None:
    for seed in seeds:
        case = dict(scenarios(KINDS["two ranks"])["fused_pair"])
        case["cases"] = [dataclasses.replace(one, tokens=(3, 2, 3)) for one in case["cases"]]
        run(seed, world=3, **case)


@pytest.mark.usefixtures("few")
def test_the_form_of_few_sms_is_what_these_tests_run() -> None:
    workspace = workspaces.Workspace(KINDS["two ranks"].config(2))
    assert grid.sums_present_rows(workspace, torch.device("cpu"), sums=True)


@pytest.mark.quick("one schedule in some shows a fault, and these take seconds")
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("seed", [2, 10])
def test_flags_follow_rows(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Two senders, which release flags of several messages together, and a home CTA that waits for both at a time."""
    monkeypatch.setattr(combining, "combine_launch", lambda *args, **options: Launch(2, 1, resident=2))
    run(seed, [Many(KINDS["two ranks"], "uniform", seed=9, tokens=(7, 6))])


@triton.jit  # type: ignore[untyped-decorator]
def _present(rows, out, y_rows, N: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.arange(0, N)
    given = tl.load(rows + n)
    nth, count = present_of(given, y_rows)
    tl.store(out + n, nth)
    tl.store(out + N, count)
    for i in range(N):
        tl.store(out + N + 1 + i, nth_row(given, nth, i))


def test_present_rows_by_example() -> None:
    """As the file says; and a row past the last one is not there."""
    out = torch.zeros(9, dtype=torch.int32)
    _present[(1,)](torch.tensor([4, -1, 9, -2], dtype=torch.int32), out, 10, N=4)
    assert out.tolist() == [0, -1, 1, -1, 2, 4, 9, -1, -1]
    _present[(1,)](torch.tensor([4, -1, 9, 2], dtype=torch.int32), out, 9, N=4)
    assert out.tolist() == [0, -1, -1, 1, 2, 4, 2, -1, -1]
