"""The README: its code runs, its table is the benchmark's, its picture and links exist, its commands are targets."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 2


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: f"{len(code.splitlines())}-lines")
def test_python_blocks_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    if "out" in names:
        assert list(names["out"].shape) == list(names["x"].shape)


def test_the_commands_are_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w[\w-]*)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_table_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moelink.tools.bench.render", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_benchmark_result_meets_what_is_promised() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "collective_vs_topk.json").read_text())
    assert document["gate"] == "passed"
    assert document["bytes_ratio"] <= 0.5
    assert document["time_ratio"] <= 0.8


def test_the_picture_is_drawn_from_its_data(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from moelink.tools.plots.maps import draw_demo

    document = json.loads((ROOT / "docs" / "demo.json").read_text())
    for name in ("picture.png", "picture.svg"):
        draw_demo(document, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    assert (ROOT / "docs" / "demo.png").exists()
