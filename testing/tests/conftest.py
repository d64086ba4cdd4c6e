"""Kernels are interpreted unless a GPU is there: the variable must be set before anything imports Triton."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from moelink_testing.interpreter import is_interpreted, speed_up  # noqa: E402

speed_up()


@pytest.fixture(autouse=True)
def interpreted():
    """Schedules are of interpreted kernels."""
    if not is_interpreted():
        pytest.skip("kernels are compiled in this process; TRITON_INTERPRET=1 interprets them on a GPU machine, too")
