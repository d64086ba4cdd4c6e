"""The three comparisons of a result, the speed gate, published figures and shares of the speed with SM limits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import moelink
from moelink.tools.cli import app
from moelink.tools.cli.console import make_console
from moelink.tools.results import COLLECTIVE, SYMMETRIC
from moelink_bench import Case, make_plan, render, run
from moelink_bench import ranks as ranks_of
from moelink_bench.ceiling import CeilingSamples
from moelink_bench.comparisons import (
    AS_ENGINES,
    COLUMNS,
    DEEPEP_V2,
    HEAD,
    beside,
    gate_line,
    published_lines,
    share_lines,
    summary,
    table_of,
)
from moelink_bench.measure import PhaseSamples
from moelink_bench.peers import FLASHINFER, FLASHINFER_MARKED, FLASHINFER_WHOLE, VDEV
from moelink_bench.presets import PRESETS
from moelink_bench.report import RankReport, RankRow
from moelink_bench.view import view

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")


def samples(both: float) -> dict[str, PhaseSamples]:
    alone = PhaseSamples(pairs=(both / 2,))
    return {"dispatch": alone, "combine": alone, "both": PhaseSamples(graph=(both,))}


def document_of(plan: Any, times: dict[str, list[float | str]]) -> dict[str, Any]:
    """A result of ``plan`` on one rank. ``times``: of each contender and case, microseconds of a pair or a reason."""
    rows = [
        RankRow(index, name, reason=time) if isinstance(time, str) else RankRow(index, name, phases=samples(time))
        for name, each in times.items()
        for index, time in enumerate(each)
        if time != ""
    ]
    own = tuple(row for row in rows if row.contender in (COLLECTIVE, SYMMETRIC))
    size = len(plan.cases)
    report = RankReport(
        "Some GPU", "", CeilingSamples(0, (), "none"), ("ok",) * size, (((1,),),) * size, (16,) * size, own
    )
    others = [[row for row in rows if row not in own]]
    document = run.make_document(plan, [report], others, commit="abc1234", command="moelink bench")
    loaded: dict[str, Any] = json.loads(json.dumps(document))
    return loaded


def decode(times: dict[str, list[float | str]]) -> dict[str, Any]:
    """One and 32 tokens, each with rows by expert and by rank."""
    return document_of(make_plan("decode", ranks=1, device="cuda", tokens=(1, 32)), times)


WON: dict[str, list[float | str]] = {
    SYMMETRIC: [10.0, 9.0, 20.0, 19.0], COLLECTIVE: [99.0] * 4, VDEV: [15.0, "", 30.0, ""],
    FLASHINFER: ["", 9.9, "", 20.9], FLASHINFER_WHOLE: [20.0, "", 30.0, ""],
}  # fmt: skip


WHOLE: dict[str, Any] = {"layout": "expert", "zero_copy": False, "quantised": False}
"""Fields of a case whose pair is the whole operation."""


def test_every_size_has_both_comparisons_that_count() -> None:
    for preset, sizes in (("decode", 5), ("prefill", 6), ("layouts", 3)):
        counted = [case for case in PRESETS[preset]() if case.layout == "expert" or case.like_for_like]
        assert [case.like_for_like for case in counted] == [False, True] * sizes
        assert [dataclasses.replace(case, **WHOLE) for case in counted[1::2]] == list(counted[::2])
    assert [case.quantised for case in PRESETS["prefill"]()[1::2]] == [True] * 5 + [False], "bf16 has nothing to make"


def test_the_layouts_have_every_form_by_rank() -> None:
    found = {(case.tokens, case.layout, case.zero_copy, case.quantised) for case in PRESETS["layouts"]()}
    forms = [("expert", False, False), ("rank", False, False), ("rank", True, False), ("rank", True, True)]
    assert found == {(tokens, *form) for tokens in (1, 128, 4096) for form in forms}


def test_like_for_like_is_the_contract_of_flashinfer() -> None:
    for fmt, fields, expected, label in (
        ("fp8_block128", {"zero_copy": True, "quantised": True}, True, "by rank, views, quantised"),
        ("fp8_block128", {"zero_copy": True}, False, "by rank, views"),
        ("fp8_block128", {"quantised": True}, False, "by rank, quantised"),
        ("bf16", {"zero_copy": True}, True, "by rank, views"),
        ("bf16", {}, False, "by rank"),
    ):
        case = Case(tokens=2, format=fmt, layout="rank", **fields)
        assert (case.like_for_like, case.label) == (expected, f"2 tokens, {fmt}, {label}")
    with pytest.raises(moelink.ConfigError, match="quantised: expected False with format='bf16', which has no scales"):
        Case(tokens=1, format="bf16", quantised=True)


def test_a_preset_of_another_format_or_layout_stays_like_for_like() -> None:
    plan = make_plan("decode", ranks=1, device="cuda", tokens=(1,), formats=("bf16", "nvfp4"))
    assert [(case.format, case.like_for_like, case.quantised) for case in plan.cases] == [
        ("bf16", False, False), ("bf16", True, False), ("nvfp4", False, False), ("nvfp4", True, True),
    ]  # fmt: skip
    by_expert = make_plan("decode", ranks=1, device="cuda", layout="expert").cases
    assert by_expert == PRESETS["decode"]()[::2]


def test_a_pair_counts_once_by_rank_and_once_by_expert() -> None:
    document = decode(WON)
    kinds = [
        (verdict["case"], verdict["phase"], verdict["kind"], verdict["counts"]) for verdict in document["verdicts"]
    ]
    assert [entry for entry in kinds if entry[3]] == [
        (0, "both", "whole operation", True), (1, "both", "like for like", True),
        (2, "both", "whole operation", True), (3, "both", "like for like", True),
    ]  # fmt: skip
    assert {entry[2] for entry in kinds if entry[1] != "both"} == {"phase"}
    assert document["speed_gate"]["passed"] is True
    assert document["faster_everywhere"] is True
    first, second = document["speed_gate"]["comparisons"]
    assert summary(first) == "like for like: faster in 2 of 2 cases against FlashInfer one-sided"
    assert summary(second) == "whole operation: faster in 2 of 2 cases against FlashInfer + permute + sum"
    label = "1 token, fp8_block128, by rank, views, quantised"
    assert f"{label}, like for like: faster (" in document["verdicts"][5]["text"]


@pytest.mark.parametrize(
    ("name", "case", "kind"),
    [(FLASHINFER, 3, "like for like"), (FLASHINFER_WHOLE, 2, "whole operation"), (VDEV, 2, "whole operation")],
)
def test_one_lost_case_is_a_lost_gate(name: str, case: int, kind: str) -> None:
    times = {**WON, name: [*WON[name][:case], 8.0, *WON[name][case + 1 :]]}
    document = decode(times)
    assert document["speed_gate"]["passed"] is False
    assert document["faster_everywhere"] is False
    found = {entry["kind"]: entry for entry in document["speed_gate"]["comparisons"]}
    assert found[kind]["lost"] == [document["cases"][case]["label"]]
    assert (found[kind]["won"], found[kind]["passed"]) == (1, False)
    assert [entry["passed"] for other, entry in found.items() if other != kind] == [True]
    assert f"not faster with {document['cases'][case]['label']}" in summary(found[kind])
    assert gate_line(document) == "speed gate: NOT passed"


def test_a_phase_that_is_slower_loses_nothing() -> None:
    document = decode(WON)
    row = next(row for row in document["rows"] if row["contender"] == FLASHINFER)
    assert row["phases"]["dispatch"]["pairs"]["median"] == 4.95
    plan = make_plan("decode", ranks=1, device="cuda", tokens=(1,))
    plan = dataclasses.replace(plan, cases=plan.cases[1:])
    fast = {"dispatch": PhaseSamples(pairs=(1.0,)), "combine": PhaseSamples(pairs=(9.0,))}
    mine = RankRow(0, SYMMETRIC, phases=samples(9.0))
    theirs = RankRow(0, FLASHINFER, phases={**fast, "both": PhaseSamples(graph=(10.0,))})
    report = RankReport("Some GPU", "", CeilingSamples(0, (), "none"), ("ok",), (((1,),),), (16,), (mine,))
    made = run.make_document(plan, [report], [[theirs]], commit=None, command="")
    faster = {verdict["phase"]: verdict["faster"] for verdict in made["verdicts"]}
    assert faster == {"dispatch": False, "combine": True, "both": True}
    assert made["speed_gate"]["comparisons"][0]["passed"] is True
    assert made["faster_everywhere"] is True


def test_a_comparison_that_was_not_made_is_not_won() -> None:
    document = decode({**WON, FLASHINFER: ["", "no such release", "", 20.9]})
    (alike, _) = document["speed_gate"]["comparisons"]
    assert (alike["won"], alike["cases"], alike["passed"]) == (1, 1, None)
    label = "1 token, fp8_block128, by rank, views, quantised"
    assert (alike["missing"], alike["reasons"]) == ([label], ["no such release"])
    assert summary(alike).endswith("not made in 1 cases (no such release)")
    assert document["speed_gate"]["passed"] is None
    assert "not judged" in gate_line(document)
    without = {name: each for name, each in WON.items() if name != FLASHINFER_WHOLE}
    (_, whole) = decode(without)["speed_gate"]["comparisons"]
    assert (whole["passed"], whole["reasons"], len(whole["missing"])) == (None, ["it was left out"], 2)
    plan = make_plan("decode", ranks=1, device="cuda", tokens=(1,), layout="expert")
    found = document_of(plan, {name: each[:1] for name, each in WON.items()})["speed_gate"]
    assert found["comparisons"][0]["reasons"] == ["moelink symmetric ran no case of this kind"]
    assert (found["comparisons"][1]["passed"], found["passed"]) == (True, None)


def test_comparisons_are_printed_and_rendered(capsys: pytest.CaptureFixture[str]) -> None:
    document = decode(WON)
    heads, lines = table_of(document)
    assert heads == [HEAD, *(name for name in COLUMNS if name not in (AS_ENGINES, "pair, by rank"))]
    assert lines[0][:4] == ["1 token, fp8_block128", "9.0 : 9.9 (1.10)", "10.0 : 20.0 (2.00)", "4.5 : 5.0 (1.10)"]
    console = make_console()
    console.print(view(console, document))
    shown = capsys.readouterr().out
    for words in (
        "comparisons that count",
        "9.0 : 9.9 (1.10)",
        "that do not count",
        "4.5 : 5.0 (1.10)",
        "speed gate: passed",
        "DeepEP V2 on 8 × H20-3e",
    ):
        assert words in shown
    page = render.page([("decode.json", document)])
    readme = render.speed_summary([document])
    assert "| 1 token, fp8_block128 | 9.0 : 9.9 (1.10) | 10.0 : 20.0 (2.00) |" in page
    assert "1 token 14.6 µs / 10.0 µs; 32 tokens 17.3 µs / 16.7 µs" in page.replace("\n  ", " ")
    assert "| 1 token, fp8_block128 | 9.0 : 9.9 (1.10) | 10.0 : 20.0 (2.00) |\n\n" in readme, "the only size it shows"
    for text in (page, readme):
        assert "* like for like: faster in 2 of 2 cases against FlashInfer one-sided." in text
    assert "(1.10)" in render.comparison_section([document])
    both = render.comparison_section([document, decode({**WON, FLASHINFER: ["", 8.0, "", 20.9]})])
    said = (
        "* like for like: faster in 3 of 4 cases against FlashInfer one-sided, not faster with 1 token, fp8_block128,"
    )
    assert f"{said} by rank, views, quantised." in " ".join(both.split()), "of all results together"
    assert both.count("whole operation: faster in 4 of 4 cases") == 1
    older = {name: value for name, value in {**document, "ranks": 4}.items() if name != "speed_gate"}
    before, prefill = {**document, "date": "2000-01-01"}, {**document, "preset": "prefill"}
    assert render.compared_on([older, prefill, document, before]) == [(1, [document, prefill])], (
        "the newest that have them"
    )
    assert render.newest([older, document]) == [(4, [older]), (1, [document])]
    sections = render.comparison_sections([document, {**document, "ranks": 2}, {**document, "preset": "skew"}])
    assert sections.startswith("**2 GPUs**\n\n| ")
    assert sections.count("\n**1 GPU**\n\n| ") == 1
    assert sections.count("| 1 token, fp8_block128 | 9.0 : 9.9 (1.10)") == 2
    assert sections.count("DeepEP V2 on 8 × H20-3e") == 1
    alone = render.comparison_section([document_of(make_plan("decode", ranks=1, device="cuda", tokens=(1,)), {})])
    assert "| 1 token" not in alone, "nobody was measured"
    remarked = {**document, "remark": "Disturbed."}
    for text in (render.page([("decode_4xh200.json", remarked)]), render.speed_summary([remarked])):
        assert text.count("\n\nDisturbed.\n\n* like for like") == 1, "below the table"
    assert render.claim([document]) == "", "it has no such size"
    without = {name: value for name, value in remarked.items() if name != "speed_gate"}
    assert "Disturbed." in render.page([("decode_4xh200.json", without)])


def test_the_readme_claims_what_was_measured() -> None:
    plan = make_plan("decode", ranks=1, device="cuda", tokens=(32, 128))
    document = document_of(plan, WON)
    claim = " ".join(render.claim([document]).split())
    for words in (
        "On 1 × Some GPU, a dispatch and its combine of 128 tokens per rank take **20.0 µs**.",
        "with the permutation and the sum that experts need, takes 30.0 µs.",
        "moelink takes 19.0 µs and FlashInfer 20.9 µs.",
        f"fp8_block128 dispatch, CUDA graphs, {document['date']}",
    ):
        assert words in claim
    lost = render.claim([document_of(plan, {**WON, FLASHINFER: ["", 9.9, "", 18.0]})])
    assert "moelink takes 19.0 µs and FlashInfer 18.0 µs." in " ".join(lost.split())
    assert render.claim([document_of(plan, {**WON, FLASHINFER: ["", 9.9, "", "no such release"]})]) == ""


def test_a_remark_is_of_a_result_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "here.json").write_text('{"benchmark": "moelink bench", "device": "cuda", "ranks": 2}')
    (tmp_path / "results" / "cpu.json").write_text('{"benchmark": "moelink bench", "device": "cpu"}')
    monkeypatch.setattr(render, "results_folder", lambda: tmp_path / "results")
    (tmp_path / "remarks.json").write_text('{"here.json": "Disturbed."}')
    ((_, document),) = render.gpu_results()
    assert document["remark"] == "Disturbed."
    for other in ("gone.json", "cpu.json"):
        (tmp_path / "remarks.json").write_text(json.dumps({other: "Disturbed."}))
        with pytest.raises(FileNotFoundError, match=rf"expected files of benchmarks/results/, got \['{other}'\]"):
            render.gpu_results()


def test_other_forms_by_rank_are_information(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan("layouts", ranks=1, device="cuda")
    plan = dataclasses.replace(plan, cases=plan.cases[:4])
    times: dict[str, list[float | str]] = {
        SYMMETRIC: [10.0, 12.0, 11.0, 9.0], FLASHINFER: ["", 9.8, 9.8, 9.8], FLASHINFER_WHOLE: [20.0, "", "", ""],
        FLASHINFER_MARKED: ["", 12.6, 12.6, 12.6],
    }  # fmt: skip
    document = document_of(plan, times)
    kinds = [(verdict["kind"], verdict["counts"]) for verdict in document["verdicts"] if verdict["phase"] == "both"]
    assert kinds == [("whole operation", True), ("by rank", False), ("by rank", False), ("like for like", True)]
    assert document["speed_gate"]["passed"] is True, "slower forms lose nothing"
    heads, lines = table_of(document)
    assert heads == [HEAD, *COLUMNS]
    assert [line[:5] for line in lines] == [
        ["1 token, fp8_block128", "9.0 : 9.8 (1.09)", "9.0 : 12.6 (1.40)", "10.0 : 20.0 (2.00)", "–"],
        ["1 token, fp8_block128, by rank", "–", "–", "–", "12.0 : 9.8 (0.82)"],
        ["1 token, fp8_block128, by rank, views", "–", "–", "–", "11.0 : 9.8 (0.89)"],
    ]
    assert lines[0][5:7] == ["4.5 : 4.9 (1.09)"] * 2, "phases are those of the shortest call"
    console = make_console()
    console.print(view(console, document))
    counted = capsys.readouterr().out.partition("comparisons that count")[2].partition("that do not count")[0]
    assert "10.0 : 20.0 (2.00)" in counted
    assert "by rank, views" not in counted
    assert "| 12.0 : 9.8 (0.82) |" in render.comparison_section([document])


def test_results_of_before_rows_came_quantised_are_rendered() -> None:
    """Then a pair with rows by rank that moelink quantised and copied was like for like."""
    document = decode(WON)
    for entry in document["cases"]:
        by_rank = entry["case"].pop("quantised")
        entry["case"]["zero_copy"] = False
        entry["label"] = entry["label"].removesuffix(", views, quantised")
        assert entry["label"].endswith(", by rank") == by_rank
    cells = ["1 token, fp8_block128", "9.0 : 9.9 (1.10)", "10.0 : 20.0 (2.00)"]
    assert table_of(document)[1][0][:3] == cells
    views = {"case": 3, "kind": "like for like", "phase": "both", "duels": [
        {"contender": FLASHINFER, "ours": 10.0, "theirs": 9.0},
    ]}  # fmt: skip
    document["verdicts"].append({**views, "case": len(document["cases"])})
    document["cases"].append({"case": {"layout": "rank"}, "label": "1 token, fp8_block128, by rank, views"})
    lines = table_of(document)[1]
    assert lines[0][:3] == cells
    assert lines[-1][:2] == ["1 token, fp8_block128, by rank, views", "10.0 : 9.0 (0.90)"]


def test_the_speed_gate_is_an_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked: list[Any] = []
    arguments = ["bench", "--ranks", "1", "--tokens", "1", "--peer", "flashinfer", "--json"]
    lost, missing = decode({**WON, VDEV: [8.0, "", 30.0, ""]}), decode({**WON, FLASHINFER: []})
    for document, gate, status in ((decode(WON), True, 0), (lost, True, 3), (missing, True, 3), (lost, False, 0)):
        monkeypatch.setattr(run, "run_bench", lambda plan, made=document, **_: asked.append(plan) or made)
        done = CliRunner().invoke(app.app, [*arguments, *(["--speed-gate"] if gate else [])])
        assert done.exit_code == status, done.output
        assert ("moelink: speed gate: " in done.output) == (status == 3)
        assert asked[-1].peers == ("flashinfer",)


def test_options_that_mean_nothing_are_refused() -> None:
    for arguments, expected in (
        (["--preset", "roles-smoke", "--speed-gate"], "speed-gate: expected nothing with --preset roles-smoke"),
        (["--preset", "layer-smoke", "--peer", "vdev"], "peer: expected nothing with --preset layer-smoke"),
        (["--preset", "smoke", "--contender", "moelink bf16"], "contender: expected nothing with --preset smoke"),
        (["--preset", "layer-smoke", "--contender", "mine"], "contender: expected one of moelink bf16, "),
        (
            ["--preset", "layer-smoke", "--contender", "DeepGEMM fused", "--no-peers"],
            "contender: expected one of moelink's",
        ),
        (["--preset", "smoke", "--peer", "vdev", "--no-peers"], "peer: expected nothing with --no-peers"),
    ):
        done = CliRunner().invoke(app.app, ["bench", *arguments])
        assert isinstance(done.exception, moelink.ConfigError), done.output
        assert expected in str(done.exception)


def test_flashinfer_is_another_contender_by_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dataclasses.replace(make_plan("decode", ranks=1, device="cuda", tokens=(1,)), timeout=7.0)
    limits = []

    def found(program: Any, ranks: int, part: Any, *, timeout: float) -> list[list[RankRow]]:
        limits.append(timeout)
        peer: Any = "vdev" if program is run.vdev_main else "flashinfer"
        rows = [(index, name) for index, case in enumerate(part.cases) for name in run.names_of(peer, case)]
        return [[RankRow(index, name, note="something") for index, name in rows]] * ranks

    monkeypatch.setattr(run, "flashinfer_refusal", lambda: "")
    monkeypatch.setattr(ranks_of, "run_ranks", found)
    (rows,) = run.run_peer(plan, "flashinfer", run.flashinfer_main)
    expected = [(0, FLASHINFER_WHOLE), (1, FLASHINFER), (1, FLASHINFER_MARKED)]
    assert [(row.case, row.contender) for row in rows] == expected
    assert {row.note for row in rows} == {"something"}
    (rows,) = run.run_peer(plan, "vdev", run.vdev_main)
    assert [(row.case, row.contender) for row in rows] == [(0, VDEV)]
    assert limits == [7.0, 7.0], "not longer than the run may take"


def test_published_figures_name_their_source_and_machine() -> None:
    assert [one.tokens for one in DEEPEP_V2] == [1, 8, 32, 128, 256, 8192, 8192]
    assert all(one.source and one.hardware.startswith("8 × ") and one.ranks == 8 for one in DEEPEP_V2)
    cases = PRESETS["decode"]()[::2]
    assert [one.tokens for one in beside(cases)] == [1, 8, 32, 128, 256]
    for other in ({"format": "bf16"}, {"hidden_size": 4096}, {"distribution": "zipf"}, {"num_sms": 8}):
        assert beside([dataclasses.replace(case, **other) for case in cases]) == ()
    (times,) = published_lines([dataclasses.asdict(one) for one in DEEPEP_V2[:2]])
    assert times.startswith(
        "As published, not measured here: DeepEP V2 on 8 × H20-3e, dispatch / combine of 1 token 14.6 µs / 10.0 µs; "
        "8 tokens 14.7 µs / 10.5 µs (384 experts, top-8,"
    )
    assert times.endswith("DeepEP 723716f)")
    assert len(published_lines([dataclasses.asdict(one) for one in DEEPEP_V2])) == 3


def sms(ranks: int, times: list[float | str]) -> dict[str, Any]:
    """4096 tokens with 24, 64 and all SMs, and 128 tokens with 24."""
    plan = make_plan("sms", ranks=1, device="cuda")
    cases = [Case(tokens=4096, num_sms=limit) for limit in (24, 64, None)] + [Case(tokens=128, num_sms=24)]
    document = document_of(dataclasses.replace(plan, cases=tuple(cases)), {SYMMETRIC: times})
    return {**document, "ranks": ranks}


def test_shares_of_the_full_speed_are_stated(capsys: pytest.CaptureFixture[str]) -> None:
    document = sms(4, [200.0, 120.0, 110.0, 50.0])
    found = [(share["num_sms"], share["both"], share["target"], share["met"]) for share in document["sm_shares"]]
    assert found == [(24, pytest.approx(0.55), 0.6, False), (64, pytest.approx(110 / 120), 0.9, True)]
    assert document["sm_shares"][0]["dispatch"] == pytest.approx(0.55), "by pairs inside a graph"
    assert "60% of the pair's speed with 24 SMs, 90% of the pair's speed with 64 SMs" in document["sm_share_rule"]
    console = make_console()
    console.print(view(console, document))
    shown = capsys.readouterr().out
    for words in ("share of the full speed", "60%: NOT met", "90%: met"):
        assert words in shown
    assert "| 4096 tokens, fp8_block128, 24 SMs | 55% | 55% | 55% | 60%: NOT met |" in render.speed_table(document)
    _, lines = share_lines(sms(2, [200.0, 120.0, 110.0, 50.0]))
    assert lines[1][-1] == "90%: met, which is set for 4 GPUs or more"


def test_shares_need_the_full_speed() -> None:
    document = sms(4, [200.0, 120.0, "out of memory", 50.0])
    assert "sm_shares" not in document
    assert share_lines(document)[1] == []
    assert not any(verdict["counts"] for verdict in document["verdicts"]), "cases with an SM limit do not count"
    (share,) = sms(4, ["it failed", 90.0, 80.0, "it failed"])["sm_shares"]
    assert (share["num_sms"], share["met"]) == (64, False)


def test_the_preset_of_sm_limits_has_what_its_targets_need() -> None:
    limits = {case.num_sms for case in PRESETS["sms"]() if case.tokens == 4096}
    assert {24, 64, None} <= limits
    plan = make_plan("sms", ranks=1, device="cuda", tokens=(4096,), num_sms=(24, 64))
    assert [(case.tokens, case.num_sms) for case in plan.cases] == [(4096, 24), (4096, 64), (4096, None)]
    plan = make_plan("decode", ranks=1, device="cuda", tokens=(8,), num_sms=16, layout="expert")
    assert [(case.tokens, case.num_sms) for case in plan.cases] == [(8, 16)]
