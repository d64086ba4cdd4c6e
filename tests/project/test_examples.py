"""The examples run as their first lines say, alone and under torchrun, in Triton's own interpreter, and do what they
claim."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.commands import run_python
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
NOT_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TRITON_INTERPRET")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in NOT_SET},
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def run(*command: str | Path, ranks: int = 0) -> str:
    """What an example printed; ``ranks`` for torchrun."""
    done = run_python(*command, ranks=ranks, environment=ENVIRONMENT, folder=EXAMPLES)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_a_test_and_a_line_in_the_list() -> None:
    listed = set(re.findall(r"\[`([\w/]+\.py)`\]", (EXAMPLES / "README.md").read_text()))
    there = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")}
    assert listed == there
    tested = Path(__file__).read_text()
    other = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in there - {"port_from_max/layer.py"}:  # the two programs beside it use it
        assert f'"{name}"' in tested + other, f"{name} is run by no test"


def test_one_rank() -> None:
    said = run("one_rank.py")
    assert "expert 0 gets tokens [0, 2, 3]" in said
    assert "multiplied by [2.25, 1.0, 2.0]" in said


@pytest.mark.parametrize("name", ["bf16", "fp8_block128"])
def test_round_trip(name: str) -> None:
    said = run("torchrun_round_trip.py", "--format", name, "--tokens", "32", ranks=2)
    rows = {int(rank): int(count) for rank, count in re.findall(r"rank (\d) of 2: (\d+) rows came", said)}
    assert rows.keys() == {0, 1}
    assert sum(rows.values()) == 2 * 32 * 4


def test_round_trip_alone() -> None:
    assert "rank 0 of 1: 256 rows came, 0 bytes left" in run("torchrun_round_trip.py")


@pytest.mark.parametrize("ranks", [0, 2])
def test_overlap(ranks: int) -> None:
    said = run("moe_overlap.py", ranks=ranks)
    (numbers,) = re.findall(r"by expert: \[(.*?)\]", said)
    assert sum(int(number) for number in numbers.split(",")) == 64


def test_balance_experts() -> None:
    said = run("balance_experts.py")
    before, planned, measured = map(float, re.findall(r"mean: ([\d.]+), planned ([\d.]+), measured ([\d.]+)", said)[0])
    assert before > 1.3
    assert max(planned, measured) < 1.2
    assert re.search(r"\d experts moved, \d+ bytes, in [2-9] steps", said)


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_on_several_ranks_is_training_on_one(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("matplotlib")
    said = run("train_bytes.py", "--ranks", str(ranks), "--steps", "16", "--out", tmp_path)
    document = json.loads((tmp_path / "loss.json").read_text())
    one, several = document["curves"]["1 rank"], document["curves"][f"{ranks} ranks"]
    assert len(one) == len(several) == 16
    assert max(abs(a - b) for a, b in zip(one, several, strict=True)) == document["largest_difference"]
    assert document["largest_difference"] <= 1e-4
    assert one[0] > 5.4, "256 bytes, nothing learned"
    assert one[-1] < 3.5, "it learns"
    assert "largest difference" in said
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    loads = [json.loads((tmp_path / f"load-{rank}.json").read_text()) for rank in range(ranks)]
    for load in loads:
        assert [len(layer["steps"]) for layer in load["layers"]] == [16, 16]
    assert sum(sum(load["layers"][0]["tokens_per_expert"]) for load in loads) == 16 * 8 * 48 * 2
    from moelink.nn.load import combine_reports
    from moelink.tools.plots.maps import draw_load

    draw_load(combine_reports(loads), tmp_path / "load.png", layer="blocks.0.moe")
    assert (tmp_path / "load.png").stat().st_size > 10_000


@pytest.mark.parametrize("ranks", [0, 2])
def test_what_vllm_asks(ranks: int) -> None:
    said = run("vllm_layer.py", ranks=ranks)
    for rank in range(max(1, ranks)):
        for step, room in (("prefill", 64), ("decode", 4)):
            rows = max(1, ranks) * room
            assert f"rank {rank} of {max(1, ranks)}: {step} in fp8_block128, room for {rows} rows" in said


@pytest.mark.parametrize("ranks", [0, 2])
def test_what_sglang_asks(ranks: int) -> None:
    said = run("sglang_layer.py", ranks=ranks)
    groups = re.findall(r"rank (\d) of \d: rows of its experts, in groups of 128: (.*)", said)
    assert sorted(rank for rank, _ in groups) == [str(rank) for rank in range(max(1, ranks))]
    ends = [part.split("-") for _, line in groups for part in line.split(", ")]
    assert sum(int(end) - int(start) for start, end in ends) == max(1, ranks) * 12 * 2
    assert all(int(start) % 128 == 0 for start, _ in ends)


@pytest.mark.full("control/test_faults.py kills ranks in the quick tier")
def test_survive_a_death() -> None:
    said = run("survive_a_death.py")
    assert "3 of 4 ranks came to the end, 1 was killed" in said
    words = r"rank (\d): rank 0 did not arrive .*\n -> now rank (\d) of 3, repeating step \d, (\d) experts restored"
    assert sorted(re.findall(words, said)) == [("1", "0", "2"), ("2", "1", "2"), ("3", "2", "2")]


@pytest.mark.full("control/test_elastic.py lets ranks die and come back in the quick tier")
def test_lose_and_return() -> None:
    said = run("lose_and_return.py")
    lost = re.findall(r"rank (\d): lost \[1\], repeats step 4, pause \d+ ms", said)
    back = re.findall(r"rank (\d): ranks \[0, 1, 2\] again, pause \d+ ms", said)
    assert sorted(lost) == sorted(back) == ["0", "2"]
    steps = re.findall(r"rank (\d), step (\d+): token \d+, (\d+)% of the router's weight", said)
    assert sorted({int(step) for rank, step, _ in steps if rank == "1"}) == [0, 1, 2, 3, *range(7, 12)]
    whole = {int(step) for _, step, share in steps if share == "100"}
    assert {*range(4), *range(7, 12)} <= whole


@pytest.mark.parametrize("ranks", [2, 0, 3])
def test_a_port_from_max_with_a_process_per_device(ranks: int) -> None:
    said = run("port_from_max/processes.py", ranks=ranks)
    lines = re.findall(r"rank (\d) of (\d): 3 steps, 1 id refused, then allreduce mode: both as without", said)
    assert sorted(lines) == [(str(rank), str(max(1, ranks))) for rank in range(max(1, ranks))]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_port_from_max_in_one_process(ranks: int) -> None:
    said = run("port_from_max/one_process.py", "--ranks", str(ranks))
    assert f"NVFP4 on {ranks} ranks: {ranks * 6 * 2} rows in one call" in said
    assert "two batches of 3 tokens a rank, overlapped over two ep_init: as without moelink" in said
