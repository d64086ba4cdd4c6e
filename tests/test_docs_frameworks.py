"""The examples of docs/torchtitan.md and docs/megatron.md. The pages themselves: test_docs.py."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from commands import run_python

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# Frameworks warn of what CPUs lack, and of packages that are not installed.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}


@pytest.mark.quick("two frameworks")
@pytest.mark.parametrize(("module", "lines", "most"), [("torchtitan", 6, 0.01), ("megatron", 3, 1e-6)])
def test_the_example_agrees_with_the_framework(module: str, lines: int, most: float) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed here: run by make test-frameworks")
    done = run_python(EXAMPLES / f"{module}_layer.py", ranks=2, environment={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    differences = re.findall(r"largest difference from \w+: ([\d.]+)", done.stdout)
    assert len(differences) == lines, done.stdout
    assert all(float(difference) <= most for difference in differences), done.stdout
