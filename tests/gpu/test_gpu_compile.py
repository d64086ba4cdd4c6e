"""What GPU tests say they launch: read here without GPUs, as a marker that raises would cost a GPU machine's time."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from moelink.tuning import FEW_TOKENS
from tests.gpu import gpu_compile
from tests.gpu.gpu_compile import (
    Kernel,
    ahead,
    calls_of,
    compile_all,
    compile_in_turn,
    kernels_of,
    over_routing,
    take_device,
    warmup_kernels,
)
from tests.support.paths import ROOT

NAMED = ("contract", "faults", "matrix", "nodes", "one_device", "processes", "startup", "symmetric", "trace")
COUNT = """
import sys
from collections import Counter
from tests.gpu.gpu_compile import gpu_tests, named_by

count = Counter()
for item in gpu_tests(sys.argv[1:]):
    marker = item.get_closest_marker("kernels")
    if marker is not None:
        count[item.module.__name__] += len(named_by(marker, item))
print("counted", dict(count))
"""


def item(of, *, skipped=False, **parameters):
    """A test as pytest has it."""
    marker = pytest.mark.kernels(of=of).mark
    skip = pytest.mark.skipif(skipped, reason="a test as it stands on another machine").mark
    return SimpleNamespace(
        get_closest_marker=lambda name: marker if name == "kernels" and of is not None else None,
        iter_markers=lambda name: [skip] if name == "skipif" else [],
        callspec=SimpleNamespace(params=parameters),
    )


def test_markers_are_called_with_the_parameters_they_name():
    fields = {"num_experts": 4, "topk": 1, "hidden_size": 128, "capacity": 3}
    tests = [
        item(lambda tokens: kernels_of(fields | {"max_tokens_per_rank": tokens}, 2), tokens=7, fused=True),
        item(lambda: kernels_of(fields, 2, ["combine"])),
        item(lambda: 1 / 0, skipped=True),
        item(None),
    ]
    few = (("num_experts", 4), ("topk", 1), ("hidden_size", 128))
    some = (*few, ("max_tokens_per_rank", 7))
    assert ahead(tests) == [Kernel(some, 2, "dispatch"), Kernel(some, 2, "combine"), Kernel(few, 2, "combine")]


@dataclass(frozen=True)
class Note:
    """A task that appends its name to a file, or fails."""

    name: str
    order: str
    fails: bool = False

    def compile(self):
        with open(self.order, "a") as order:
            order.write(f"{self.name} {os.nice(0)}\n")
        if self.fails:
            raise ValueError("no such word")


def test_groups_are_compiled_in_turn_and_each_task_once(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_compile, "MAX_WORKERS", 1)
    monkeypatch.setattr(gpu_compile, "take_device", take_turn)
    a, b, c, d = (Note(name, str(tmp_path / "order"), fails=name == "b") for name in "abcd")
    found = list(compile_in_turn([[a, b], [], [a, c], [d]], timeout=120))
    lines = (tmp_path / "order").read_text().splitlines()
    lower = min(os.nice(0) + 10, 19)  # than the tests themselves, however nice these are
    assert lines == [f"{name} {lower}" for name in "abcd"]
    assert [(number, error is None) for number, error in found] == [(0, False), (1, True), (2, True), (3, True)]
    assert "Note(name='b'" in str(found[0][1])
    assert "no such word" in str(found[0][1])
    with pytest.raises(RuntimeError, match="no such word"):
        compile_all([a, b], timeout=120)
    assert list(compile_in_turn([[], []])) == [(0, None), (1, None)]


def take_turn(turn):
    """What :func:`gpu_compile.take_device` does where there is no device."""
    torch.cuda.set_device, torch.cuda.device_count = lambda device: None, lambda: 1
    take_device(turn)


@pytest.mark.full("collects all GPU tests in a new process; needed before a run on GPUs")
def test_gpu_tests_say_what_they_launch():
    files = [f"tests/gpu/test_{name}_gpu.py" for name in NAMED]
    command = [sys.executable, "-c", COUNT, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    counted = "".join(line for line in done.stdout.splitlines() if line.startswith("counted"))
    assert all(f"test_{name}_gpu'" in counted for name in NAMED), done.stdout + done.stderr


@pytest.mark.parametrize("bound", [{"layout": "masked", "rows_per_expert": 256}, {"layout": "rank"}, {"capacity": 3}])
def test_calls_to_compile_are_accepted_in_each_layout(bound):
    """What bounds the rows of a layout differs, and kernels do not depend on it."""
    fields = {"num_experts": 4, "topk": 1, "hidden_size": 128, "max_tokens_per_rank": 7, **bound}
    for kernel in kernels_of(fields, 2):
        assert not {"capacity", "rows_per_expert"} & dict(kernel.fields).keys()
        dispatch, combine = calls_of(kernel, torch.device("cpu"))
        assert dispatch.output.tokens.shape == combine.request.y.shape
        assert over_routing(dispatch).output.tokens.shape == combine.request.y.shape


def test_a_warmup_has_a_kernel_for_each_bound_of_tokens():
    fields = {"num_experts": 4, "topk": 1, "hidden_size": 128, "max_tokens_per_rank": FEW_TOKENS + 1, "capacity": 9}
    made = warmup_kernels(fields, 2)
    for part in ("dispatch", "dispatch_async"):
        bounds = {kernel.max_tokens for kernel in made if kernel.part == part}
        assert bounds == {FEW_TOKENS, None}
    fewer = [kernel for kernel in made if kernel.max_tokens == FEW_TOKENS]
    assert calls_of(fewer[0], torch.device("cpu"))[0].request.max_tokens == FEW_TOKENS


@pytest.mark.parametrize("traced", [False, True])
def test_what_is_compiled_for_a_trace_stamps(traced):
    fields = {"num_experts": 4, "topk": 1, "hidden_size": 128, "max_tokens_per_rank": 7}
    for kernel in kernels_of(fields, 2, traced=traced):
        dispatch, combine = calls_of(kernel, torch.device("cpu"))
        for plan in (dispatch.launch_plan, combine.launch_plan):
            assert bool(plan.both.S.TRACE) == traced
