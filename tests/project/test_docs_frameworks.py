"""The examples of docs/torchtitan.md and docs/megatron.md. The pages themselves: test_docs.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.quick("two frameworks")
@pytest.mark.parametrize(
    ("example", "lines", "most"), [("torchtitan_layer.py", 6, 0.01), ("megatron_layer.py", 3, 1e-6)]
)
def test_the_example_agrees_with_the_framework(example: str, lines: int, most: float) -> None:
    module = example.partition("_")[0]
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed here: run by make test-frameworks")
    # Not in the tests' own processes, where warnings are errors: frameworks warn of what CPUs lack.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLES / example]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    differences = re.findall(r"largest difference from \w+: ([\d.]+)", done.stdout)
    assert len(differences) == lines, done.stdout
    assert all(float(difference) <= most for difference in differences), done.stdout
