"""docs/plan.md has what the plan says now of a layer on 1 to 256 GPUs, and its picture can be drawn."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "docs" / "support" / "scale.py"


def test_the_tables_are_the_plan_s() -> None:
    made = runpy.run_path(str(SCRIPT))
    page = (ROOT / "docs" / "plan.md").read_text()
    assert page == made["written"](page), "docs/plan.md is out of date; run: make scale"
    rows = re.findall(r"^\| (\d+)(?:\\\*)? \| \d+ \| ([a-zA-Z][^|]*) \|", page, flags=re.MULTILINE)
    assert [int(ranks) for ranks, _ in rows] == 2 * list(made["RANKS"])
    assert {way for _, way in rows} >= {"NVLink", "NVSHMEM, two levels"}


def test_the_picture_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = runpy.run_path(str(SCRIPT))
    draw_scale, parts_of, plan = made["draw_scale"], made["parts_of"], made["plan_of"](128)
    draw_scale({"Decode": plan}, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    size = plan["sizes"][4]
    assert sum(parts_of(size, "node").values()) == pytest.approx(size["layer"]["total_us"]["node"])
    size["layer"]["experts"] = None
    with pytest.raises(ValueError, match="constants are missing"):
        draw_scale({"Decode": plan}, tmp_path / "none.png")
