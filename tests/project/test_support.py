"""The support of the tests: folders of any name, ranks and processes with the faster interpreter."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from moelink.testing import run_ranks
from tests.support import rank_server
from tests.support.paths import ROOT
from tests.support.processes import run_pytest


@pytest.mark.full("runs pytest in a copy; a clone of another name is what CI runs")
def test_tests_pass_in_a_clone_with_any_name(tmp_path: Path) -> None:
    clone = tmp_path / "someone's clones" / "moelink"
    clone.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", clone)
    for name in ("src", "tests", "testing"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = run_pytest(clone, "-n", "0", "-k", "never_comes", "tests/kernels/test_protocol.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_ranks_have_loaded_what_the_server_names() -> None:
    assert run_ranks(rank_server.missing, 2) == [[], []]
