"""The benchmark of frameworks' own dispatchers against moelink: on CPU ranks where the framework is installed."""

from __future__ import annotations

import doctest
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moelink.testing import run_ranks
from moelink_bench import ranks as ranks_of
from moelink_bench.frameworks import __main__ as command
from moelink_bench.frameworks import dispatchers, engines
from moelink_bench.frameworks.dispatchers import PASSES, Amount, Case, differences
from moelink_bench.timing import Clock, Turns, WallClock
from tests.bench import frameworks_ranks as ranks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", [name for name in command.PACKAGES if name not in command.ENGINES])
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
        assert fields["case"]["tokens"] == 24
        assert fields["framework"]["release"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", command.ENGINES)
def test_both_dispatchers_of_an_engine_agree_and_are_timed(framework: str) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed here: run by make test-engines")
    for fields in run_ranks(ranks.measured_engine, 2, framework, timeout=560):
        gate, names = fields["gate"], [row["contender"] for row in fields["rows"]]
        assert gate["passed"], gate
        assert names == [names[0], "moelink"] * len(ranks.SIZES)
        assert set(gate["differences"]) == {f"{name}, {size} tokens" for name in set(names) for size in ranks.SIZES}
        assert all(off > 0 for off in gate["differences"].values()), "torch sums in another order and in fp32"
        assert [row["tokens"] for row in fields["rows"][::2]] == list(ranks.SIZES)
        assert all(row[what]["median"] > 0 for row in fields["rows"] for what in (engines.LAYER, engines.EXCHANGE))
        assert [ratio["tokens"] for ratio in fields["times_as_fast"]] == list(ranks.SIZES)
        assert not fields["graphs"]["captured"]
        assert fields["framework"]["release"]


@pytest.mark.parametrize(("framework", "package"), command.PACKAGES.items())
def test_what_is_not_installed_is_refused_with_its_command(
    framework: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib.metadata import PackageNotFoundError

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("moelink.integrations.versions.version", absent)
    assert command.main(["--framework", framework]) == 1
    assert f"run pip install '{package}>=" in capsys.readouterr().err


def test_differences_are_of_a_part_s_length() -> None:
    assert doctest.testmod(dispatchers).failed == 0
    theirs = {"out": torch.ones(4), "x.grad": torch.zeros(2), "gone": torch.ones(1), "nan": torch.ones(1)}
    ours = {"out": torch.full((4,), 1.5), "x.grad": torch.zeros(2), "nan": torch.full((1,), float("nan"))}
    assert differences(theirs, ours) == {"out": 0.5, "x.grad": 0.0, "gone": float("inf"), "nan": float("inf")}


def test_experts_here_are_those_of_a_plain_loop() -> None:
    """Those of two ranks together make the layer in fp32, and a row without experts here is zero."""
    assert doctest.testmod(dispatchers).failed == 0
    case = Case(tokens=(5,), hidden_size=64, intermediate_size=32, num_experts=4, topk=2, device="cpu")
    halves = [engines.Inputs(case, rank, 2) for rank in range(2)]
    batch, total = halves[0].batches[5], torch.zeros(5, 64)
    assert batch.topk_weights.sum(1).tolist() == pytest.approx([1.0] * 5)
    for rank, half in enumerate(halves):
        assert len(half.own.down) == 2
        local = torch.where(batch.topk_ids // 2 == rank, batch.topk_ids - 2 * rank, -1)
        made = engines.weighed_experts(batch.x, half.own, local, batch.topk_weights)
        assert not made[(local < 0).all(1)].any()
        total += made.float()
    assert differences(halves[0].expected(5), {"out": total})["out"] < dispatchers.TOLERANCE
    assert differences(halves[1].expected(5), {"out": total})["out"] > 0.5, "another rank has another batch"
    nowhere = torch.full_like(batch.topk_ids, -1)
    assert not engines.weighed_experts(batch.x, halves[0].own, nowhere, batch.topk_weights).any()


def test_a_contender_that_is_off_is_named() -> None:
    case = Case(tokens=(3,), hidden_size=64, intermediate_size=32, num_experts=4, topk=2, device="cpu")
    found = run_ranks(ranks.compared, 1, case)[0]
    assert found["right, 3 tokens"] < 1e-6
    assert found["off, 3 tokens"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.quick("no time, and each is another option")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["vllm", "--room", "1"], "room: expected none with vllm"),
        (["sglang", "--calls", "2"], "calls: expected none with sglang"),
        (["torchtitan", "--tokens", "8", "16"], "tokens: expected one number with torchtitan"),
    ],
)
def test_options_of_another_framework_are_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--framework", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_the_command_writes_a_result_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = []

    def measured(framework: str, case: Case, clock: Clock, how: Amount) -> dict[str, Any]:
        cases.append((framework, case, how))
        rows = [
            {"contender": name, "tokens": tokens, engines.LAYER: {"median": median}}
            for tokens in case.tokens
            for name, median in (("theirs", 30.0), ("moelink", 20.0))
        ]
        gate = {"passed": True, "fault": ""}
        return {"gate": gate, "rows": rows, "times_as_fast": dispatchers.times_as_fast(rows)}

    start = dist.init_process_group
    monkeypatch.setattr(command, "measure", measured)
    monkeypatch.setattr(command, "require", lambda package: "1.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ranks_of, "make_clock", lambda device, **_: WallClock())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backends, timeout: start("gloo", store=dist.HashStore(), rank=0, world_size=1),
    )
    out = tmp_path / "vllm.json"
    options = ["--tokens", "1", "64", "--samples", "6", "--commit", "abc", "--out", str(out)]
    assert command.main(["--framework", "vllm", *options]) == 0
    case = Case(
        tokens=(1, 64), hidden_size=2048, intermediate_size=768, num_experts=128, topk=8, device="cuda", room=None
    )
    assert cases == [("vllm", case, Amount(1, Turns(turns=3, samples=2, warmup=2)))]
    document = json.loads(out.read_text())
    assert (document["benchmark"], document["commit"], document["devices"]) == ("frameworks", "abc", ["a GPU"])
    assert document["times_as_fast"] == [{"tokens": 1, "layer": 1.5}, {"tokens": 64, "layer": 1.5}]
    said = capsys.readouterr().out
    assert "moelink, 64 tokens, layer: 20 us" in said
    assert "{'tokens': 64, 'layer': 1.5}" in said


def test_capacity_is_room_over_what_is_expected() -> None:
    sizes = {"tokens": (100,), "hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "topk": 2, "device": "cpu"}
    assert Case(**sizes, room=1.25).capacity == 250
    assert Case(**sizes, room=None).capacity is None
