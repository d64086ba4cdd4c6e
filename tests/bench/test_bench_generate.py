"""The benchmark of generation with transformers: a tiny model on two CPU ranks, transformers' own way and moelink's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moelink.testing import run_ranks
from tests.bench.generate_ranks import script

SIZES = {
    "hidden": 32, "layers": 1, "heads": 2, "kv-heads": 2, "head-dim": 16, "intermediate": 16, "experts": 4, "topk": 2,
    "vocabulary": 64, "batch": 2, "prompt": 5, "new-tokens": 2, "samples": 1,
}  # fmt: skip


@pytest.mark.parametrize("tolerance", [None, -1.0], ids=["close", "differs"])
def test_generation_on_two_ranks(tolerance: float | None, tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel", reason="this transformers has no registry")
    out = tmp_path / "generate.json"
    words = ["--device", "cpu", "--commit", "abc", "--out", str(out)]
    for name, value in SIZES.items():
        words += [f"--{name}", str(value)]
    assert run_ranks(script, 2, words, tolerance, timeout=240) == [int(tolerance is not None)] * 2
    document: dict[str, Any] = json.loads(out.read_text())
    assert (document["benchmark"], document["ranks"], document["devices"]) == ("generate", 2, ["CPU", "CPU"])
    assert document["case"] == {name.replace("-", "_"): SIZES[name] for name in SIZES if name != "samples"} | {
        "dtype": "float32"
    }
    assert 0 <= document["gate"]["difference"] < 1e-5
    if tolerance is not None:
        assert document["gate"]["fault"] == "logits differ"
        assert "rows" not in document
        return
    assert document["gate"]["equal_tokens"] == 1.0
    theirs, ours = document["rows"]
    assert (theirs["contender"], ours["contender"]) == ("transformers", "moelink")
    assert document["times_as_fast"]["decode"] == round(theirs["decode_us"] / ours["decode_us"], 3)
    assert ours["prefill_tokens_per_second"] == pytest.approx(1e6 * 2 * 5 / ours["prefill_us"], rel=1e-3)
