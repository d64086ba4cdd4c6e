"""What reads results of the bench: those with pairs, and those of before there were any."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from moelink.tools.cli.console import make_console
from moelink.tools.plan.fit import load_points
from moelink.tools.results import COLLECTIVE, SYMMETRIC
from moelink_bench import make_plan, render, run
from moelink_bench.ceiling import CeilingSamples
from moelink_bench.measure import PhaseSamples
from moelink_bench.report import RankReport, RankRow
from moelink_bench.view import method_rows, view

PEER = "FlashInfer + permute + sum"
ALONE = ("dispatch", "combine")


def with_pairs() -> dict[str, Any]:
    """A result of one case and one rank: ours by all methods, a peer whose calls must alternate, the baseline."""
    plan = make_plan("decode", ranks=1, device="cuda", tokens=(128,), layout="expert")
    eager = PhaseSamples(eager=(900.0,))
    every = PhaseSamples(graph=(20.0,), pairs=(22.0,), eager=(120.0,), kernel=(19.0,))
    turns = PhaseSamples(pairs=(25.0,), eager=(110.0,), note="alone only between events")
    both = PhaseSamples(graph=(41.0,), eager=(230.0,))
    rows = (
        RankRow(0, COLLECTIVE, phases=dict.fromkeys((*ALONE, "both"), eager)),
        RankRow(0, SYMMETRIC, phases={**dict.fromkeys(ALONE, every), "both": both}),
    )
    link = CeilingSamples(1_000_000, ((10.0,),))
    report = RankReport("Some GPU", "", link, ("ok",), (((1,),),), (16,), rows)
    peers = [[RankRow(0, PEER, phases={**dict.fromkeys(ALONE, turns), "both": both})]]
    document = run.make_document(plan, [report], peers, commit="abc1234", command="moelink bench")
    loaded: dict[str, Any] = json.loads(json.dumps(document))
    return loaded


def without_pairs() -> dict[str, Any]:
    """The same, written before there were pairs."""
    document = copy.deepcopy(with_pairs())
    for row in document["rows"]:
        for result in row["phases"].values():
            del result["pairs"]
    for verdict in document["verdicts"]:
        del verdict["kind"]
    del document["speed_gate"]
    return document


def row_of(document: dict[str, Any], contender: str) -> dict[str, Any]:
    (row,) = (row for row in document["rows"] if row["contender"] == contender)
    return row


def test_pairs_are_in_the_document() -> None:
    document = with_pairs()
    assert row_of(document, PEER)["phases"]["dispatch"]["pairs"]["median"] == 25.0
    assert row_of(document, PEER)["phases"]["both"]["pairs"] is None
    (verdict,) = (verdict for verdict in document["verdicts"] if verdict["phase"] == "dispatch")
    assert {duel["contender"]: duel["method"] for duel in verdict["duels"]} == {COLLECTIVE: "eager", PEER: "pairs"}
    assert "pairs: events inside" in document["method"]
    assert "else pairs" in document["rule"]


@pytest.mark.parametrize(("make", "method"), [(with_pairs, "pairs"), (without_pairs, "eager")])
def test_documents_become_text_and_tables(make: Any, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = make()
    row = row_of(document, PEER)
    by_method = {name: (cells[0], share) for name, cells, _, share in method_rows(row)}
    share = by_method.pop(method)[1]
    assert share.endswith("%"), "of the first method by which phases alone were measured"
    rest = {"graph": ("-", ""), "eager": ("110.0 (110.0-110.0)", "")}
    assert by_method == {name: line for name, line in rest.items() if name != method}
    console = make_console()
    console.print(view(console, document))
    assert ("25.0 (25.0-25.0)" in capsys.readouterr().out) == (method == "pairs")
    median = row["phases"]["dispatch"][method]["median"]
    assert render.cell(row["phases"]["dispatch"]) == f"{median:.1f} ({median:.1f} – {median:.1f}) {method}"
    page = " ".join(render.page([("x.json", document)]).split())
    assert render.PAIRS_ARE in page, "the page explains all marks"


@pytest.mark.parametrize(("make", "method"), [(with_pairs, "pairs"), (without_pairs, "eager")])
def test_documents_are_drawn_and_planned_with(make: Any, method: str, tmp_path: Path) -> None:
    from moelink_bench.picture import draw_bench, points_of

    document = make()
    points = {(point.contender, point.phase): point.method for point in points_of(document)}
    assert [points[PEER, phase] for phase in (*ALONE, "both")] == [method, method, "graph"]
    assert [points[SYMMETRIC, phase] for phase in (*ALONE, "both")] == ["graph"] * 3
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))
    for contender, by in ((SYMMETRIC, "graph"), (COLLECTIVE, "eager"), (PEER, method)):
        assert {point.method for point in load_points([path], contender=contender)} == {by}
    pytest.importorskip("matplotlib")
    draw_bench([document], tmp_path / "bench.svg")
    drawn = (tmp_path / "bench.svg").read_text()
    assert (f"{PEER}," in drawn and "between events" in drawn) == (method == "pairs")
    assert f"{PEER}, call by call" not in drawn, "its pair is replayed: a phase by the host's time is no match for that"
    assert f"{COLLECTIVE}, call by call" in drawn


def test_a_picture_of_several_commits_says_so() -> None:
    from moelink_bench.picture import commits

    made = [{"ranks": ranks, "commit": commit} for ranks, commit in ((4, "b" * 40), (2, "a" * 40), (2, "a" * 40))]
    assert commits(made) == "2: aaaaaaa, 4: bbbbbbb"
    assert commits(made[1:]) == ""
    assert commits([*made, {"ranks": 4, "commit": None}]) == "2: aaaaaaa, 4: bbbbbbb and unknown"
