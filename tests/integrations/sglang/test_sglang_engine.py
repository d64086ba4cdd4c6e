"""SGLang's whole engine on CPUs: two ranks over moelink answer as one process of SGLang alone does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.sglang import sglang_engine
from tests.integrations.sglang.sglang_engine import Answers

SECONDS = 900
"""For an engine. On slow cores most of it are imports of SGLang, in each of its processes."""


def answers(ranks: int, folder: Path) -> Answers:
    """Run an engine with the model in ``folder``."""
    out, cores = folder / f"answers_{ranks}.json", sorted(os.sched_getaffinity(0))
    variables = {
        "PYTHONPATH": str(Path(sglang_engine.__file__).parent / "stand_ins"), "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
        "SGLANG_NCCL_SO_PATH": "none",  # it would ask the NCCL that comes with torch for a GPU
        "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(sglang_engine.MOST_TOKENS),
        "MOELINK_SGLANG": "batch_invariant=1" if ranks > 1 else "0", "CUDA_VISIBLE_DEVICES": "",
        # Ranks get prompts one by one: with this they start when all have come, in batches that no clock decides.
        "SGLANG_ENABLE_COLOCATED_BATCH_GEN": "1",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", sglang_engine.__file__, str(folder / "model"), str(ranks), str(out)],
        env={**os.environ, **variables}, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return Answers(**json.loads(out.read_text()))


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed; run by make test-engines")
@pytest.mark.full("two engines start, which takes minutes")
@pytest.mark.timeout(2 * SECONDS + 60)
def test_two_ranks_answer_as_one_process(tmp_path: Path) -> None:
    """In every bit: batch_invariant sums where SGLang alone does, and attention has whole requests on a rank."""
    from moelink_bench.serve_model import save_model

    save_model(tmp_path / "model")
    alone, spread = (answers(ranks, tmp_path) for ranks in (1, 2))
    assert spread == alone
    assert [len(tokens) for tokens in alone.tokens] == [sglang_engine.NEW_TOKENS] * len(sglang_engine.TEXTS)
