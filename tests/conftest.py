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


@pytest.fixture
def blocks(monkeypatch):
    """A function that sets how many columns of a row combine sums at a time, and, if given, how many tokens are few."""
    import moelink.kernels.launch.constants as specs
    import moelink.memory.workspace as workspaces

    def set_blocks(columns, few=workspaces.FEW_TOKENS):
        for module in (workspaces, specs):
            monkeypatch.setattr(module, "COMBINE_BLOCK", columns)
        monkeypatch.setattr(workspaces, "FEW_TOKENS", few)

    specs.combine_spec.cache_clear()
    yield set_blocks
    specs.combine_spec.cache_clear()


def pytest_collection_finish(session):
    """On GPU machines: what the selected GPU tests launch is in Triton's cache before the first of them begins, so none
    of it counts as the time of a test."""
    if torch.cuda.is_available() and not session.config.option.collectonly:
        from gpu_compile import ahead, compile_all

        compile_all(ahead(item for item in session.items if item.get_closest_marker("gpu")))
