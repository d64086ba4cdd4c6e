"""Compiles kernels on rows ahead of their first launch, for a GPU that is not there, by threads.

``python -m tests.kernels.ahead_aot`` needs TRITON_INTERPRET unset, and an empty folder as TRITON_CACHE_DIR. What a GPU
does afterwards, to load a kernel, is played.
"""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver

from moelink.kernels.launch import row_launch
from moelink.kernels.launch.row_launch import RowLauncher
from moelink.rows import choose_kernel, common_kernel, gated_kernel
from moelink.rows.choice import Choice
from moelink.transports.ahead import Place, Prepared, prepare
from tests.kernels.absent_gpu import on

GPU = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)  # fmt: skip


def launches() -> None:
    """A router's kernel, and an activation, twice."""
    choice = Choice(2, "softmax", True, 1, 1, "max", 1.0)
    logits, weights = torch.zeros(4, 8), torch.zeros(4, 2)
    choose_kernel.launch(logits, None, torch.zeros(4, 2, dtype=torch.int32), weights, choice)
    rows, offsets = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
    for _ in range(2):
        gated_kernel.launch(rows, offsets, torch.zeros(4, 32, dtype=torch.bfloat16), "silu", 1.0, 1.0)


def step(launcher: RowLauncher, *, load: bool) -> None:
    """A step as of a layer."""
    with launcher.preparing(load=load):
        launches()


def main() -> None:
    """Prepare twice, and once more what cannot be compiled."""
    driver.set_active(GPU)
    loaded: list[str] = []

    def prepared(self: RowLauncher, kernel: object, given: object, *rest: object) -> None:
        made = row_launch._compile(kernel, given, *rest)  # type: ignore[arg-type]
        loaded.append(made.name)
        assert made.asm["cubin"]

    one = RowLauncher()
    with (
        on("sm_90"), mock.patch.object(RowLauncher, "_prepare", prepared),
        mock.patch.object(torch.cuda, "current_device", return_value=None),
        mock.patch.object(common_kernel, "row_launcher", return_value=one),
    ):  # fmt: skip
        first = prepare([functools.partial(step, one)], Place(rank=1, ranks=2))
        assert sorted(first.kernels) == ["choose_experts_kernel", "gated_activation_kernel"], first
        assert sorted(loaded) == sorted(first.kernels)
        assert first.seconds > 0
        again = prepare([functools.partial(step, one)], Place())
        assert again.kernels == ()
        assert len(loaded) == 2, "nothing is loaded twice"
        refused(one)


def refused(launcher: RowLauncher) -> None:
    """The error is Triton's, and Triton's next compile is not put off any more."""

    @triton.jit  # type: ignore[untyped-decorator]
    def wrong(x, S: triton.language.constexpr):  # type: ignore[no-untyped-def]
        triton.language.store(x, missing)  # type: ignore[name-defined] # noqa: F821

    def step(*, load: bool) -> None:
        with launcher.preparing(load=load):
            launcher.launch(wrong, [torch.zeros(1)], 1, 1, device=torch.device("cpu"), fused=False, options={})

    with pytest.raises(CompilationError, match="missing is not defined"):
        prepare([step], Place())
    assert isinstance(prepare([], Place()), Prepared)


if __name__ == "__main__":
    main()
