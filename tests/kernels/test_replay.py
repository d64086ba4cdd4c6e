"""Replays of launches: the words that a later call's kernels get, and the calls that are not replayed."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moelink.kernels.launch import replay as module
from moelink.kernels.launch import row_launch
from moelink.kernels.launch.replay import Note, Replays
from moelink.kernels.launch.row_launch import RowLauncher

STREAM = 5


class Kernel:
    """A prepared kernel, which notes its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], int, int]] = []

    def launch(self, words: Any, count: int, stream: int) -> None:
        self.launches.append((tuple(words), count, stream))


class Played:
    """A launcher; ``current``: its device is; ``prepared``: the second kernel is, as the first."""

    def __init__(self) -> None:
        self.kernels, self.calls, self.current = (Kernel(), Kernel()), 0, True
        self.prepared = True
        self.notes: list[Note] | None = None

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        return (0, STREAM) if self.current else None

    @contextmanager
    def noting(self) -> Iterator[list[Note]]:
        self.notes = []
        yield self.notes
        self.notes = None

    def launch(self, kernel: Kernel, words: tuple[int, ...], count: int) -> None:
        kernel.launch(words, count, STREAM)
        if self.notes is not None:
            by_triton = not self.prepared and kernel is self.kernels[1]
            self.notes.append(Note(None if by_triton else kernel, words, count))

    def function(self, x: Tensor, other: Tensor, number: int) -> Any:
        """Two launches, with two tensors between them, and two results."""
        self.calls += 1
        out, count = mapped(len(x), 3), mapped(1, dtype=torch.int32)
        between, scales = mapped(len(x), 5, dtype=torch.uint8), mapped(7)
        first, second = self.kernels
        self.launch(first, (x.data_ptr(), between.data_ptr(), scales.data_ptr(), len(x), number), 8)
        last = between.data_ptr(), scales.data_ptr(), other.data_ptr(), out.data_ptr(), count.data_ptr(), number
        self.launch(second, last, 4)
        return (out, count), (between, scales)

    def run(self, replays: Replays, x: Tensor, other: Tensor, number: int = 3) -> tuple[Tensor, ...]:
        return replays.run(self, (x, other), self.function, number)


def mapped(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor in memory of its own, at an address that is no number of an int32 parameter, as on a device: the
    heap of a Python that is linked to fixed addresses begins below 2**31."""
    return torch.empty(1 << 26, dtype=torch.uint8).view(dtype)[: math.prod(shape)].view(shape)


def tensors() -> tuple[Tensor, Tensor]:
    return mapped(6, 4), mapped(2)


def test_a_later_call_launches_the_same_kernels_with_its_own_addresses() -> None:
    played, replays = Played(), Replays()
    kept = [played.run(replays, *tensors()) for _ in range(2)]
    for kernel in played.kernels:
        kernel.launches.clear()
    x, other = tensors()
    out, count = played.run(replays, x, other)
    assert played.calls == 1
    assert (out.shape, out.dtype, count.shape, count.dtype) == ((6, 3), torch.float32, (1,), torch.int32)
    (first,), (second,) = (kernel.launches for kernel in played.kernels)
    between, scales = first[0][1:3]
    assert first == ((x.data_ptr(), between, scales, 6, 3), 8, STREAM)
    assert second == ((between, scales, other.data_ptr(), out.data_ptr(), count.data_ptr(), 3), 4, STREAM)
    assert between % 16 == scales % 16 == 0
    assert scales - between >= 6 * 5, "the tensors between lie apart"
    assert len({tensor.data_ptr() for made in (*kept, (out, count)) for tensor in made}) == 6, "results are new"


def test_launches_that_take_tiles_get_the_counter_of_the_call() -> None:
    """The noted call's counter, 640, is no number that stays."""
    played, replays = Played(), Replays()
    counters = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
    left = iter(counters)
    played.tile_counters = SimpleNamespace(of=lambda device: next(left))  # type: ignore[attr-defined]

    def function(x: Tensor) -> Any:
        out = mapped(len(x))
        for kernel in played.kernels:
            words = x.data_ptr(), 640, 7, 640
            kernel.launch(words, 3, STREAM)
            if played.notes is not None:
                played.notes.append(Note(kernel, words, 3, counted=True))
        return (out,), ()

    for _ in range(3):
        x = mapped(6)
        replays.run(played, (x,), function)  # type: ignore[arg-type]
    for kernel in played.kernels:
        assert [launch[0][1:] for launch in kernel.launches] == [
            (640, 7, counter) for counter in (640, *[each.data_ptr() for each in counters])
        ]


@pytest.mark.quick("each is another part of the key")
@pytest.mark.parametrize("what", ["rows", "dtype", "rest", "device", "hooks", "alignment", "strides", "memory"])
def test_calls_of_other_kinds_are_made_by_the_function(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    played, replays = Played(), Replays()
    x, other = tensors()
    played.run(replays, x, other)
    number = 3
    if what == "rows":
        x = torch.zeros(7, 4)
    elif what == "dtype":
        x = x.int()
    elif what == "rest":
        number = 4
    elif what == "device":
        played.current = False
    elif what == "hooks":
        monkeypatch.setattr(module, "has_hooks", lambda: True)
    elif what == "strides":
        x = torch.zeros(4, 6).t()
    elif what == "memory":
        other = torch.zeros(2, device="meta")
        monkeypatch.setattr(Tensor, "get_device", lambda tensor: int(tensor.is_meta))
    else:
        x = torch.zeros(25)[1:].view(6, 4)
    played.run(replays, x, other, number)
    assert played.calls == 2
    assert played.notes is None


@pytest.mark.parametrize("why", ["Triton launched it", "one tensor stands for two", "nothing was launched"])
def test_what_cannot_be_replayed_is_called_each_time(why: str) -> None:
    played, replays = Played(), Replays()
    x, other = tensors()
    if why == "Triton launched it":
        played.prepared = False
    elif why == "one tensor stands for two":
        other = x
    else:
        played.launch = lambda *given: None  # type: ignore[method-assign]
    for _ in range(3):
        played.run(replays, x, other)
    assert played.calls == 3


def test_notes_are_those_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others launch, and prepare, meanwhile."""
    launcher, kernel = RowLauncher(), Kernel()
    played = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: STREAM))
    monkeypatch.setattr(row_launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(row_launch, "driver", played)
    monkeypatch.setattr(RowLauncher, "_prepare", lambda *given: kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    card, x, function = torch.device("cuda", 0), torch.zeros(4), object()

    def launch() -> None:
        launcher.launch(function, (x, 7), "S", 2, device=card, fused=False, options={})

    def prepare() -> None:
        with launcher.preparing():
            launch()

    with launcher.noting() as notes:
        launch()
        for inside in (launch, prepare):
            thread = threading.Thread(target=inside)
            thread.start()
            thread.join()
    launch()
    assert notes == [Note(kernel, [x.data_ptr(), 7], 2)]
    assert len(kernel.launches) == 3
