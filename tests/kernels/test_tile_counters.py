"""Counters of tiles: which calls share one. CUDA is played, on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from moelink.kernels.launch import tile_counters as module
from moelink.kernels.launch.tile_counters import WORDS, TileCounters


class PlayedCuda:
    """The device, stream and capture that are current, and a stream's event."""

    def __init__(self) -> None:
        self.device, self.stream, self.captures, self.waited = 0, 5, False, 0

    @contextmanager
    def use(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before

    def record(self, stream: object) -> None:
        assert stream == "a stream of its own"

    def synchronize(self) -> None:
        assert not self.captures
        assert threading.current_thread() is not threading.main_thread(), "which may allocate from a pool"
        self.waited += 1
        self.meet()

    def meet(self) -> None:
        """Another thread goes on meanwhile."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    made, zeros = PlayedCuda(), torch.zeros
    played = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: made.stream))
    monkeypatch.setattr(module, "driver", played)
    monkeypatch.setattr(module, "beside_captures", nullcontext)
    for name, value in {
        "current_device": lambda: made.device, "device": made.use, "Stream": lambda device: "a stream of its own",
        "stream": lambda stream: nullcontext(), "is_current_stream_capturing": lambda: made.captures,
        "Event": lambda: made,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    return made


def places(counters: TileCounters, calls: int, device: int = 0) -> list[int]:
    made = [counters.of(torch.device("cuda", device)) for _ in range(calls)]
    assert all(each.shape == (WORDS,) and each.dtype == torch.int32 and not each.any() for each in made)
    assert all(each.data_ptr() % 16 == 0 for each in made)
    return [each.data_ptr() for each in made]


def test_calls_of_a_stream_share_a_counter_and_captured_ones_do_not(cuda: PlayedCuda) -> None:
    counters = TileCounters()
    [eager] = set(places(counters, 3))
    assert cuda.waited == 1, "the zeros are there before any stream uses them"
    cuda.captures = True
    captured = places(counters, 3)
    cuda.captures, cuda.stream = False, 6
    [other] = set(places(counters, 2))
    assert len({eager, other, *captured}) == 5
    [of_another_device] = set(places(counters, 2, device=1))
    assert of_another_device not in {eager, other, *captured}
    assert cuda.waited == 2


def test_a_graph_makes_its_counters_if_none_are_left(cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2)
    monkeypatch.setattr(module, "FEW", 1)
    counters = TileCounters()
    cuda.captures = True
    kept = [counters.of(torch.device("cuda", 0))]  # before any eager call
    cuda.captures = False
    kept.append(counters.of(torch.device("cuda", 0)))
    assert cuda.waited == 1
    cuda.captures = True
    kept += [counters.of(torch.device("cuda", 0)) for _ in range(3)]
    assert cuda.waited == 1, "nothing waits in a capture"
    cuda.captures = False
    assert counters.of(torch.device("cuda", 0)).data_ptr() == kept[1].data_ptr()
    assert cuda.waited == 2, "an eager call has more of them made"
    cuda.captures = True
    kept.append(counters.of(torch.device("cuda", 0)))
    assert len({each.data_ptr() for each in kept}) == 6
    assert len(counters._blocks[0]) == 2, "what calls have stays in memory"


def test_threads_that_begin_together_make_counters_once(cuda: PlayedCuda) -> None:
    counters, found = TileCounters(), []
    threads = [threading.Thread(target=lambda: found.extend(places(counters, 1))) for _ in range(4)]

    def meet() -> None:
        for thread in threads[1:]:
            thread.start()

    cuda.meet = meet  # type: ignore[method-assign]
    threads[0].start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 4
    assert len(set(found)) == cuda.waited == 1
