"""Load statistics: counting on the device, JSON, files of several ranks, and ``moelink plot``."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import moelink
from moelink.nn import LoadMeter, MoE, load_report, save_load
from moelink.nn.load import combine_reports

FIELDS: dict[str, Any] = {
    "num_experts": 5, "topk": 2, "hidden_size": 8, "max_tokens_per_rank": 16, "dispatch_format": "fp32",
    "combine_dtype": torch.float32,
}  # fmt: skip


def test_counting_by_step() -> None:
    meter = LoadMeter(4, steps=2, world_size=3)
    for ids in ([[0, 1], [3, -1]], [[2, 2], [0, -1]], [[1, 3]]):
        meter.record(torch.tensor(ids, dtype=torch.int32))
        stats = meter.stats()
        meter.next_step()
    assert stats.tokens_per_expert == (2, 2, 2, 2)
    assert stats.steps == ((1, 0, 2, 0), (0, 1, 0, 1))
    assert stats.first_step == 1
    assert stats.expert_bounds == (0, 2, 3, 4)
    assert stats.tokens_per_rank == (4, 2, 2)
    assert stats.imbalance == 1.5
    assert meter.stats().steps == ((0, 1, 0, 1), (0, 0, 0, 0))
    meter.reset()
    assert meter.stats() == LoadMeter(4, steps=2, world_size=3).stats()
    assert meter.stats().imbalance == 1.0
    assert not meter.state_dict()


def test_counting_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    meter, ids = LoadMeter(4, steps=3), torch.tensor([[0, 1], [3, -1]])

    def step(ids: torch.Tensor) -> None:
        meter.record(ids)
        meter.next_step()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        compiled(ids)
    assert meter.stats().tokens_per_expert == (4, 4, 0, 4)
    assert meter.stats().steps == ((1, 1, 0, 1), (1, 1, 0, 1), (0, 0, 0, 0))


def test_a_meter_keeps_a_step_at_least() -> None:
    for steps in (0, "x", True, 1.0):
        with pytest.raises(moelink.ConfigError, match="^load_steps: expected an integer >= 1"):
            LoadMeter(4, steps=steps)  # type: ignore[arg-type]


class Model(torch.nn.Module):
    def __init__(self, ep: moelink.Communicator, layers: int) -> None:
        super().__init__()
        made = [MoE(ep, intermediate_size=4, seed=seed, load_steps=3) for seed in range(layers)]
        self.layers = torch.nn.ModuleList(made)


def reports(folder: Path, *, layers: int = 1, ranks: int = 2) -> list[Path]:
    """What ``ranks`` ranks would save after four steps (each in turn as one rank, then given its number)."""
    paths = []
    for rank in range(ranks):
        torch.manual_seed(rank)
        with moelink.init(**FIELDS) as ep:
            model = Model(ep, layers)
            for step in range(4):
                for layer in model.layers:
                    if step:
                        layer.load.next_step()
                    layer(torch.randn(6 + rank, 8))
            paths.append(folder / f"load-{rank}.json")
            save_load(model, paths[-1])
        document = json.loads(paths[-1].read_text())
        assert document == json.loads(json.dumps(load_report(model)))
        for layer in document["layers"]:
            layer |= {"rank": rank, "world_size": ranks}
        paths[-1].write_text(json.dumps(document))
    return paths


def test_reports_of_ranks_add_up(tmp_path: Path) -> None:
    documents = [json.loads(path.read_text()) for path in reports(tmp_path, layers=2)]
    both = combine_reports(documents)
    assert [layer.name for layer in both] == ["layers.0", "layers.1"]
    assert [layer.ranks for layer in both] == [(0, 1)] * 2
    for index, layer in enumerate(both):
        parts = [document["layers"][index] for document in documents]
        assert sum(layer.stats.tokens_per_expert) == 4 * 2 * (6 + 7)
        for expert in range(5):
            assert layer.stats.tokens_per_expert[expert] == sum(part["tokens_per_expert"][expert] for part in parts)
        assert [sum(step) for step in layer.stats.steps] == [2 * (6 + 7)] * 3
        assert layer.stats.first_step == 1
    for document in documents:
        document["layers"][0]["replicated"] = True
    assert combine_reports(documents)[0].stats.tokens_per_expert == tuple(
        documents[0]["layers"][0]["tokens_per_expert"]
    )


def broken(documents: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    twice, other, steps, kind, short = (copy.deepcopy(documents) for _ in range(5))
    twice[1]["layers"][0]["rank"] = 0
    other[1]["layers"][0]["name"] = "elsewhere"
    steps[1]["layers"][0]["first_step"] = 7
    kind[1]["kind"] = "bench"
    del short[1]["layers"][0]["steps"][1][0]
    wrong = {"each rank once": twice, "same layers": other, "same steps": steps, "save_load": kind}
    return {**wrong, "steps of 5 experts": short}


def test_reports_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    documents = [json.loads(path.read_text()) for path in reports(tmp_path)]
    for words, wrong in broken(documents).items():
        with pytest.raises(moelink.ArgumentError, match=words):
            combine_reports(wrong)
    with pytest.raises(moelink.ArgumentError, match="same layers"):
        combine_reports([{**documents[0], "layers": []}])


def drawn(arguments: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Exit status of ``moelink plot``, and what it said."""
    from moelink.tools.cli.app import run

    monkeypatch.setattr("sys.argv", ["moelink", "plot", *map(str, arguments)])
    try:
        status = run()
    except SystemExit as end:
        status = int(end.code or 0)
    return status, capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_command_draws(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("matplotlib")
    one = reports(tmp_path)
    picture = tmp_path / "new" / f"load.{suffix}"
    assert drawn([*one, "--out", picture], capsys, monkeypatch) == (0, "")
    text = picture.read_bytes()
    assert len(text) > 10_000
    if suffix == "svg":
        assert b"<!-- step -->" in text, "one layer with several steps is drawn by step"
        assert b"all ranks' tokens" in text
    assert drawn([one[0], "--along", "layers", "--out", picture], capsys, monkeypatch) == (0, "")
    if suffix == "svg":
        assert b"<!-- layer -->" in picture.read_bytes()
        assert b"only the tokens of rank 0" in picture.read_bytes()


def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("matplotlib")
    paths, out = reports(tmp_path, layers=2), tmp_path / "load.png"
    noise = tmp_path / "noise.json"
    noise.write_text("[1, 2")
    list_of = tmp_path / "list.json"
    list_of.write_text("[1, 2]")
    for arguments, status, words in (
        ([*paths, "--layer", "nope"], 2, "layers.0, layers.1, got nope"),
        ([*paths, "--along", "steps"], 2, "to draw its steps"),
        ([paths[0], paths[0]], 2, "each rank once"),
        ([noise], 2, "JSON files of moelink.nn.save_load"),
        ([list_of], 2, "save_load"),
    ):
        code, said = drawn([*arguments, "--out", out], capsys, monkeypatch)
        assert code == status
        assert words in " ".join(said.replace("│", " ").split())
        assert not out.exists()
    code, said = drawn([*paths, "--out", tmp_path / "load.xyz"], capsys, monkeypatch)
    assert code == 2
    assert "xyz" in said
    assert drawn([*paths, "--along", "steps", "--layer", "layers.1", "--out", out], capsys, monkeypatch) == (0, "")
    assert out.exists()
