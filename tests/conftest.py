"""Test session set-up.

Kernels are interpreted unless a GPU is there: the variable must be set before anything imports triton, and it is
inherited by the ranks that tests spawn.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)


@pytest.fixture
def filled_memory():
    """What is not written shows: torch fills new tensors with NaN, or with the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(scope="session", autouse=True)
def compiled_ahead(request):
    """On GPU machines: what the selected GPU tests launch is in Triton's cache before the first of them begins."""
    if torch.cuda.is_available():
        from gpu_compile import ahead, compile_all

        compile_all(ahead(item for item in request.session.items if item.get_closest_marker("gpu")))
