"""How a contender is measured: which calls are made, which replays are read, what is said of what could not be."""

import weakref
from typing import Any

import pytest
import torch

from moelink_bench import Settings, measure, timing
from moelink_bench.timing import KernelTimes
from tests.bench.bench_fakes import FakeClock, FakeDevice, FakeGraph, NotingContender, TakingContender

PAIR = ["dispatch", "combine"]


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Graphs and profiles without a device, agreement without a group."""
    monkeypatch.setattr(timing, "everyone", lambda value: [value])
    monkeypatch.setattr(measure, "everyone", lambda value: [value])
    monkeypatch.setattr(measure, "kernel_times", lambda *_, **__: KernelTimes([2.0], ("ep_x",)))
    return FakeDevice(monkeypatch)


def test_every_phase_is_measured_by_every_method(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of the whole is judged, and gone before chains are captured."""
    settings = Settings(calls=4, samples=2, warmup=1)
    contender, capture_marked = NotingContender(), measure.capture_marked
    judged: list[weakref.ref[timing.Captured]] = []

    def judge(graph: timing.Captured) -> str:
        judged.append(weakref.ref(graph))
        return f"made of {graph.results}"

    def marked(*given: Any) -> timing.Captured:
        assert [graph() for graph in judged] == [None]
        return capture_marked(*given)

    monkeypatch.setattr(measure, "capture_marked", marked)
    measured = measure.measure_contender(
        contender, copies=3, settings=settings, clock=FakeClock(fake_device), judge=judge
    )
    assert list(measured.phases) == ["dispatch", "combine", "both"]
    for phase, samples in measured.phases.items():
        assert (samples.graph, samples.eager) == ((0.75, 0.75), (0.75, 0.75))
        assert (samples.kernel, samples.kernels, samples.note) == ((2.0,), ("ep_x",), "")
        assert len(samples.pairs) == (0 if phase == "both" else 2)
    assert measured.fault == "made of [0, 1, 2, 0]"
    phases = [name for name, _ in contender.calls]
    assert phases[:9] == PAIR * 3 + ["dispatch"] * 3  # warm-up, handles
    assert phases[9:17] == ["dispatch"] * 8
    assert phases[17:25] == ["combine"] * 8
    assert phases[25:] == PAIR * 12
    assert [copy for _, copy in contender.calls[9:13]] == [0, 1, 2, 0]
    assert [copy for _, copy in contender.calls[-8:]] == [0, 0, 1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize("alternates", [False, True])
def test_pairs_are_each_phase_s_part_of_a_replay(fake_device: FakeDevice, alternates: bool) -> None:
    """Copies 0, 1, 0. Of replays 1 to 6, 2 is the warm-up, 4 and 6 are the samples, and the others only come first."""
    measured = measure.measure_contender(
        TakingContender(fake_device, alternates=alternates), copies=2,
        settings=Settings(calls=3, samples=2, warmup=1), clock=FakeClock(fake_device),
    )  # fmt: skip
    assert measured.phases["dispatch"].pairs == pytest.approx([4 / 3 + 40, 4 / 3 + 60])
    assert measured.phases["combine"].pairs == pytest.approx([8 / 3 + 400, 8 / 3 + 600])
    assert measured.phases["both"].pairs == ()
    assert fake_device.log[-16:] == ["wait", *(["align", "replay", "align", "replay", "wait"] * 3)]


def test_a_contender_that_alternates_is_never_called_otherwise(fake_device: FakeDevice) -> None:
    contender = NotingContender(alternates=True)
    measured = measure.measure_contender(
        contender, copies=2, settings=Settings(calls=3, samples=2), clock=FakeClock(fake_device)
    )
    assert [name for name, _ in contender.calls] == PAIR * (len(contender.calls) // 2)
    assert list(measured.phases) == ["dispatch", "combine", "both"]
    assert measured.phases["dispatch"].eager == (3.0, 3.0)
    assert measured.phases["combine"].graph == ()
    assert measured.phases["combine"].note == "alone only between events, as its calls must alternate"
    assert (measured.phases["both"].eager, measured.phases["both"].graph) == ((1.0, 1.0), (1.0, 1.0))
    assert measured.phases["both"].kernel == (2.0,)


def test_without_a_graph_the_reason_is_noted(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    arguments = {
        "copies": 1,
        "settings": Settings(calls=2, samples=2, host_calls=1, host_samples=3),
        "clock": FakeClock(fake_device),
    }
    synchronising = measure.measure_contender(NotingContender(capturable=False), **arguments).phases
    assert (len(synchronising["both"].eager), synchronising["both"].graph) == (3, ())
    for samples in synchronising.values():
        assert samples.note == "not in a CUDA graph: its calls synchronise with the host"
        assert samples.pairs == ()
    monkeypatch.setattr(torch.cuda, "graph", fail)
    reason = "the capture failed: RuntimeError: operation not permitted when stream is capturing"
    failed = measure.measure_contender(NotingContender(), **arguments)
    assert failed.fault == ""
    for samples in failed.phases.values():
        assert samples.note == reason
        assert (samples.graph, samples.pairs, samples.eager, samples.kernel) == ((), (), (1.5, 1.5), (2.0,))
    contender = NotingContender(alternates=True)
    turns = measure.measure_contender(contender, **arguments).phases
    assert turns["combine"].note == f"alone only between events, as its calls must alternate; no pairs: {reason}"
    assert (turns["combine"].eager, turns["combine"].pairs) == ((3.0, 3.0), ())
    assert (turns["both"].note, turns["both"].eager, turns["both"].kernel) == (reason, (1.5, 1.5), ())


def test_a_torch_without_events_in_graphs_has_no_pairs(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def event(*, enable_timing: bool = False, blocking: bool = False) -> None:
        return None

    monkeypatch.setattr(torch.cuda, "Event", event)
    contender = NotingContender()
    phases = measure.measure_contender(
        contender, copies=1, settings=Settings(calls=2, samples=2), clock=FakeClock(fake_device)
    ).phases
    for phase in PAIR:
        assert phases[phase].pairs == ()
        assert phases[phase].note.startswith("no pairs: the capture failed: TypeError: ")
        assert "external" in phases[phase].note
        assert (phases[phase].graph, phases[phase].eager) == ((1.5, 1.5), (1.5, 1.5))
    assert phases["both"].note == ""
    assert contender.calls[-4:] == [("dispatch", 0), ("combine", 0)] * 2, "nothing is called in the capture that fails"


def test_no_rank_replays_what_another_could_not_capture(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreements = []

    def everyone(value: str) -> list[str]:
        agreements.append(value)
        return [value, "RuntimeError: elsewhere" if len(agreements) == 2 else ""]

    made: list[FakeGraph] = []

    def make() -> FakeGraph:
        made.append(FakeGraph(fake_device))
        return made[-1]

    monkeypatch.setattr(timing, "everyone", everyone)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    phases = measure.measure_contender(
        NotingContender(alternates=True), copies=1, settings=Settings(calls=2), clock=FakeClock(fake_device)
    ).phases
    assert agreements == ["", ""], "pairs of calls, then the same with events: both could be captured here"
    assert [graph.replays > 0 for graph in made] == [True, False]
    assert phases["dispatch"].pairs == ()
    assert phases["dispatch"].note.endswith("; no pairs: the capture failed: RuntimeError: elsewhere")
    assert len(phases["both"].graph) == 15
