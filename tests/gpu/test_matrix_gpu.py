"""Every format x layout x mode x reduction at real sizes, on as many GPUs as there are, up to 8.

Run by hand: ``-m gpu``. The other tests here need no GPU: what the matrix covers, and a small run of its ranks.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import moelink
from moelink.memory.workspace import Workspace
from tests.gpu import gpu_matrix
from tests.kernels.matrix_configs import AXES, CONFIGS, MOST, QUANTISED_HOME, SIZES, Config, Form, meetings
from tests.support.cases import FORMATS

WORLD = min(8, torch.cuda.device_count())


def of_format(fmt: str) -> list[Config]:
    """The configurations of a format."""
    return [config for config in CONFIGS if config.form.dispatch_format == fmt]


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda fmt: gpu_matrix.kernels(of_format(fmt), WORLD))
@pytest.mark.skipif(WORLD < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("fmt", FORMATS)
def test_transports_and_oracle_are_equal(fmt):
    jobs = gpu_matrix.jobs_of(of_format(fmt), WORLD)
    found = gpu_matrix.differences_of(jobs, WORLD)
    assert not found, "\n".join(found)


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda: gpu_matrix.kernels(QUANTISED_HOME, WORLD))
@pytest.mark.skipif(WORLD < 2, reason="needs two CUDA devices")
def test_rows_in_a_format_on_the_way_home():
    found = gpu_matrix.differences_of(gpu_matrix.jobs_of(QUANTISED_HOME, WORLD), WORLD)
    assert not found, "\n".join(found)


def accepted(world_size: int = 4, **fields) -> bool:
    """EPConfig takes these values."""
    sizes = {"num_experts": 8, "topk": 1, "hidden_size": 128, "max_tokens_per_rank": 1}
    try:
        moelink.EPConfig(**{**sizes, **fields}, world_size=world_size)
    except moelink.ConfigError:
        return False
    return True


def test_every_legal_form_is_there_once():
    names = ("dispatch_format", "layout", "mode", "pre_reduce", "fused_shared_expert")
    values = (FORMATS, ("expert", "rank", "masked"), ("alltoall", "allreduce"), (True, False), (True, False))
    legal = [form for form in itertools.product(*values) if accepted(**dict(zip(names, form, strict=True)))]
    assert len(legal) == len(FORMATS) * (2 * 4 + 2 + 2 * 2)
    assert set(FORMATS) == set(moelink.format_names())
    assert sorted(map(str, (config.form for config in CONFIGS))) == sorted(str(Form(*form)) for form in legal)


@pytest.mark.parametrize("axis", AXES)
def test_every_value_meets_every_format_and_place(axis):
    """Where the pair is legal; but fp64 sums only with fp32 and fp64 rows, which can carry them."""
    by_format, by_place = meetings(axis, "format"), meetings(axis, "place")
    for value, fmt in itertools.product(AXES[axis], FORMATS):
        possible = not (value == torch.float64 and fmt not in ("fp32", "fp64"))
        if axis == "hidden_size":
            possible = accepted(dispatch_format=fmt, hidden_size=value)
        elif axis == "input_dtype":
            possible = value in moelink.get_format(fmt).input_dtypes
        assert bool(by_format[value, fmt]) == possible, (axis, value, fmt)
    layouts = ("expert", "rank", "masked")
    for value, place in itertools.product(AXES[axis], itertools.product(layouts, ("alltoall", "allreduce"))):
        possible = place[0] == "expert" or axis != "expert_alignment" or value == 1
        possible = possible and (place[0] != "rank" or value != "combine")
        assert bool(by_place[value, place]) == possible, (axis, value, place)


@pytest.mark.parametrize("axis, other", list(itertools.combinations(SIZES, 2)))
def test_every_pair_of_sizes_meets(axis, other):
    count = meetings(axis, other)
    assert all(count[pair] for pair in itertools.product(AXES[axis], AXES[other]))


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_configurations_are_legal_and_fit_a_device(world_size):
    for config in (*CONFIGS, *QUANTISED_HOME):
        made = config.config(world_size)
        y = made.total_rows * made.combine_row_bytes
        assert Workspace(made).nbytes + made.memory_report().total + 3 * y < 32 * 2**30, config.name
    assert sum(config.max_tokens_per_rank == MOST for config in CONFIGS) <= 12


def test_token_counts_reach_from_none_to_all():
    for most in AXES["max_tokens_per_rank"]:
        for world_size in (2, 4, 8):
            counts = {
                name: [gpu_matrix.round_tokens(name, most, rank) for rank in range(world_size)]
                for name in gpu_matrix.ROUNDS
            }
            assert set(counts["full"]) == {most}
            assert set(counts["nothing"]) == {0}
            assert sum(counts["one_token"]) == 1
            assert all(0 <= count <= most for row in counts.values() for count in row)
            for name in ("holes", "skewed", "one_expert"):
                assert len(set(counts[name])) == min(world_size, 4)
                assert counts[name][0] > 0  # in allreduce mode every rank has rank 0's tokens


def test_names_tell_configurations_apart():
    assert len({config.name for config in (*CONFIGS, *QUANTISED_HOME)}) == len(CONFIGS) + len(QUANTISED_HOME)


SMALL = (
    Config(
        Form("nvfp4", "expert", "alltoall", pre_reduce=False, fused_shared_expert=True), 4, 48, 2, 5,
        weights="combine", input_dtype=torch.float32, expert_alignment=6, id_dtype=torch.int64,
    ),
    Config(Form("fp8_block128", "rank", "alltoall"), 4, 128, 2, 3, combine_dtype=torch.float32),
    Config(Form("fp8_block128", "masked", "alltoall"), 4, 128, 2, 3),
    Config(Form("bf16", "expert", "alltoall"), 4, 128, 2, 3, combine_format="mxfp8"),
    Config(Form("fp64", "expert", "allreduce"), 4, 20, 10, 8, input_dtype=torch.float64, weights="none"),
)  # fmt: skip


def test_ranks_on_cpus():
    """The entry point of the GPU ranks, with interpreted kernels."""
    jobs = gpu_matrix.jobs_of(SMALL, 2, rounds=("skewed",), few=1, small=True)
    found = gpu_matrix.differences_of(jobs, 2, "cpu")
    assert not found, "\n".join(found)


def test_differences_are_found_and_named(monkeypatch):
    """An oracle that expects something else: the difference names the configuration and the seed."""
    jobs = gpu_matrix.jobs_of(SMALL[-1:], 1, rounds=(), few=1, small=True)
    rows = gpu_matrix.FewTokens.expert_rows
    monkeypatch.setattr(gpu_matrix.FewTokens, "expert_rows", lambda case, rank, *count: rows(case, rank, *count) + 1)
    (found,) = gpu_matrix.differences_of(jobs, 1, "cpu")
    assert SMALL[-1].name in found
    assert f"seed {jobs[0].few[0].seed} " in found
