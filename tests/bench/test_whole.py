"""One call that tests and measures a machine: its steps, their limits and its files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from moelink_bench import whole
from moelink_bench.whole import Done, Step, perform_all, steps_on
from tests.support.cases import FORMATS
from tests.support.patience import until


def test_each_step_is_known_and_ends_within_nine_minutes_but_those_of_four_gpus() -> None:
    for gpus in (2, 8):
        steps = steps_on(gpus)
        assert [step.name for step in steps][:2] == ["results", "decode"], "results are compared first"
        assert len({step.name for step in steps}) == len(steps)
        for step in steps:
            for word in step.arguments:
                assert not word.startswith("tests/") or Path(word).exists(), word
            assert step.arguments[:2] in (("-m", "pytest"), ("-m", "moelink_bench"))
            assert ("--out" in step.arguments) == (step.arguments[1] == "moelink_bench")
            assert step.arguments[1] == "pytest" or step.arguments[step.arguments.index("--ranks") + 1] == str(gpus)
    assert "tests" not in {step.name for step in steps_on(2)}


def test_the_tests_of_a_step_exist() -> None:
    """A selection of none would fail the step, on a machine that is there for minutes."""
    steps = [step for gpus in (2, 4) for step in steps_on(gpus) if "-k" in step.arguments]
    assert {step.name for step in steps} == {"results", "calls"}
    for step in steps:
        files = [Path(word) for word in step.arguments if word.startswith("tests/")]
        tests = [name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())]
        words = set(re.findall(r"\w+", step.arguments[step.arguments.index("-k") + 1])) - {"not", "and", "or"}
        for word in words:
            assert any(word in name for name in (*tests, *map(str, files), *FORMATS)), (step.name, word)


def test_what_hangs_is_ended_with_its_children_and_the_rest_goes_on(tmp_path: Path) -> None:
    """A step that no time is left for does not begin; a shorter one does."""
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    written = "import sys; open(sys.argv[2], 'w').write('{}'); print('one'); print('two'); sys.exit(3)"
    steps = [
        Step("hangs", ("-c", child), 2.0),
        Step("too long", ("-c", "print('never')"), 900.0),
        Step("writes", ("-c", written, "--out"), 20.0),
    ]
    seen: list[list[Done]] = []
    done = perform_all(steps, tmp_path, 60.0, lambda all_of: seen.append(list(all_of)))
    assert [(one.name, one.status) for one in done] == [("hangs", "ended"), ("too long", "not begun"), ("writes", 3)]
    assert done[2].last == "two"
    assert (tmp_path / "writes.json").read_text() == "{}"
    assert [one.status for one in seen[0]] == ["ended", "not begun", "not begun"]
    assert len(seen) == 2
    until(lambda: not _runs(int(done[0].last)))


def test_early_steps_run_beside_one_another_and_before_all_others(tmp_path: Path) -> None:
    """The first waits for what the second writes."""
    waits = f"import pathlib, time; p = pathlib.Path(r'{tmp_path}/mark')\nwhile not p.exists(): time.sleep(0.01)"
    makes = f"open(r'{tmp_path}/mark', 'w').close()"
    last = f"import os; print(os.path.exists(r'{tmp_path}/mark'))"
    steps = [Step("last", ("-c", last), 60.0), *(Step(name, ("-c", code), 60.0, early=True) for name, code in (
        ("waits", waits), ("makes", makes),
    ))]  # fmt: skip
    done = perform_all(steps, tmp_path, 120.0, lambda all_of: None)
    assert [(one.name, one.status) for one in done] == [("last", 0), ("waits", 0), ("makes", 0)]
    assert done[0].last == "True"


def test_kernels_are_compiled_by_the_same_command_without_a_file() -> None:
    step = next(step for step in steps_on(2) if step.name == "decode")
    compiling = step.compiling(peers=True)
    assert compiling.early
    assert not compiling.measures
    assert compiling.arguments == (*step.arguments[:-1], "--samples", "1", "--timeout", "170")
    assert step.arguments[-1] == "--out"
    alone = step.compiling(peers=False).arguments
    assert step.arguments[6:8] == ("--peer", "flashinfer"), "which the command refuses beside --no-peers"
    assert alone == (*compiling.arguments[:6], *compiling.arguments[8:], "--no-peers")


def test_the_file_of_a_step_names_the_commit_that_is_given() -> None:
    results, decode = steps_on(2)[:2]
    assert decode.recording("abc1234").arguments == (*decode.arguments[:-1], "--commit", "abc1234", "--out")
    assert decode.recording("abc1234").measures
    assert decode.recording(None) is decode
    assert results.recording("abc1234") is results, "pytest takes no commit"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_summary_is_written_and_the_status_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Step("good", ("-c", "print('fine')"), 20.0), Step("bad", ("-c", "raise SystemExit(5)"), 20.0)]
    monkeypatch.setattr(whole, "steps_on", lambda gpus: steps)
    common = ["--folder", str(tmp_path), "--commit", "abc1234"]
    assert whole.main([*common, "--steps", "good"]) == 0
    assert whole.main(common) == 1
    document = json.loads((tmp_path / "whole.json").read_text())
    assert [(step["name"], step["status"], step["last"]) for step in document["steps"]] == [
        ("good", 0, "fine"), ("bad", 5, ""),
    ]  # fmt: skip
    assert document["commit"] == "abc1234"
    assert whole.main([*common, "--steps", "other"]) == 2


def test_a_cpu_and_one_gpu_have_steps_as_well() -> None:
    assert [step.name for step in steps_on(0)] == ["smoke", "layer-smoke", "roles-smoke"]
    roles, *layers = steps_on(1)
    assert roles.name == "roles"
    assert "--ranks" not in roles.arguments, "2, 4 and 8 ranks are simulated"
    assert [step.name for step in layers] == [step.name for step in steps_on(2) if step.name.startswith("layer")]
