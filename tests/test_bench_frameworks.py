"""The benchmark of frameworks' own dispatchers against moelink: on CPU ranks where the framework is installed."""

from __future__ import annotations

import doctest
from importlib.util import find_spec

import pytest
import torch

import frameworks_ranks as ranks
from moelink.testing import run_ranks
from moelink.tools.bench.frameworks import __main__ as command
from moelink.tools.bench.frameworks import steps
from moelink.tools.bench.frameworks.steps import PASSES, Case, differences


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", command.PACKAGES)
def test_both_dispatchers_agree_and_are_timed(framework: str) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed here: run by make test-frameworks")
    for fields in run_ranks(ranks.measured, 2, framework, timeout=300):
        assert fields["gate"]["passed"], fields["gate"]
        assert {"out", "x.grad"} < set(fields["gate"]["differences"])
        assert [set(row) for row in fields["rows"]] == [{"contender", *PASSES}] * 2
        assert fields["rows"][1]["contender"] == "moelink"
        for row in fields["rows"]:
            assert row[PASSES[1]]["median"] > 0
        assert set(fields["times_as_fast"]) == set(PASSES)
        assert fields["framework"]["release"]


@pytest.mark.parametrize(("framework", "extra"), [("torchtitan", "torchtitan"), ("megatron", "megatron")])
def test_what_is_not_installed_is_refused_with_its_command(
    framework: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib.metadata import PackageNotFoundError

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("moelink.integrations.versions.version", absent)
    assert command.main(["--framework", framework]) == 1
    assert f"pip install 'moelink[{extra}]'" in capsys.readouterr().err


def test_differences_are_of_a_part_s_length() -> None:
    assert doctest.testmod(steps).failed == 0
    theirs = {"out": torch.ones(4), "x.grad": torch.zeros(2), "gone": torch.ones(1), "nan": torch.ones(1)}
    ours = {"out": torch.full((4,), 1.5), "x.grad": torch.zeros(2), "nan": torch.full((1,), float("nan"))}
    assert differences(theirs, ours) == {"out": 0.5, "x.grad": 0.0, "gone": float("inf"), "nan": float("inf")}


def test_capacity_is_room_over_what_is_expected() -> None:
    case = Case(100, 64, 32, 8, 2, "cpu", 1.25)
    assert case.capacity == 250
    assert Case(100, 64, 32, 8, 2, "cpu", None).capacity is None
