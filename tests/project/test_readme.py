"""What the README shows: its table is the benchmark's, its picture is drawn from its data. Its code: test_docs.py."""

import json
import runpy
from pathlib import Path

import pytest

from tests.support.commands import run_python
from tests.support.paths import ROOT


def test_the_table_is_up_to_date() -> None:
    done = run_python("-m", "moelink_bench.render", "--check")
    assert done.returncode == 0, done.stderr


def test_the_benchmark_result_meets_what_is_promised() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "collective_vs_topk.json").read_text())
    assert document["gate"] == "passed"
    assert document["bytes_ratio"] <= 0.5
    assert document["time_ratio"] <= 0.8


def test_the_picture_is_drawn_from_its_data(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_demo = runpy.run_path(str(ROOT / "docs" / "picture.py"))["draw_demo"]
    document = json.loads((ROOT / "docs" / "demo.json").read_text())
    for name in ("picture.png", "picture.svg"):
        draw_demo(document, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    assert (ROOT / "docs" / "demo.png").exists()
