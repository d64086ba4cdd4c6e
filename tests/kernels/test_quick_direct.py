"""Quick calls on a GPU, whose device is played: which addresses, numbers and streams the driver gets."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton import knobs

import moelink
from moelink.kernels.launch.direct import DirectKernel
from moelink.kernels.records import DispatchInputs, DispatchOutputs, RoutingNotes
from moelink.transports.session import Session
from moelink.transports.symmetric import fast_path
from moelink.transports.symmetric.rank import Rank
from moelink_bench.played import played

SIZES = {"num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": 5}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"dispatch_format": "fp8_block128"}, {"layout": "rank", "dispatch_format": "fp8_block128"}, {"layout": "masked"},
    {"pre_reduce": False}, {"dispatch_format": "nvfp4"}, {"mode": "allreduce"},
)  # fmt: skip


class Launch(NamedTuple):
    addresses: list[int]
    numbers: bytes
    count: int
    stream: int


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What the driver got, in order."""
    found: list[Launch] = []

    def noting(self: DirectKernel, count: int, stream: int) -> None:
        numbers = bytes(self._buffer)[self._begin : self._begin + self._numbers.size]
        found.append(Launch(list(self.addresses), numbers, count, stream))

    monkeypatch.setattr(DirectKernel, "launch", noting)
    return found


def given(seed: int, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(tokens, 128).bfloat16(), torch.randint(-1, 4, (tokens, 2)), torch.rand(tokens, 2)


def rank_of(ep: Any) -> Rank:
    return ep._session.transport.ranks[0]


def own(ep: Any) -> tuple[list[int], int]:
    """The addresses of the communicator or session, and what stands for a tensor that a call does not have."""
    rank = (ep if isinstance(ep, Session) else ep._session).transport.ranks[0]
    return [rank.table.data_ptr(), rank.record.data_ptr(), rank.control.data_ptr()], rank.table.data_ptr()


def of_dispatch(ep: Any, x: Tensor, ids: Tensor, weights: Tensor | None, recv: moelink.DispatchOutput) -> list[int]:
    first, nothing = own(ep)
    notes, travelled = recv.handle.routing.parts, recv.topk_weights if ep.config.layout == "rank" else recv.weights
    tensors = [
        x, None, None, ids, weights,
        recv.tokens, recv.scales, recv.row_offsets, recv.expert_ids, recv.src_info, recv.scales_offsets, travelled,
        recv.topk_ids, recv.num_recv_tokens, recv.overflow, recv.handle.counts,
        *notes, notes.received, recv.handle.counts,
    ]  # fmt: skip
    return [*first, *[nothing if tensor is None else tensor.data_ptr() for tensor in tensors]]


def of_combine(ep: Any, y: Tensor, recv: moelink.DispatchOutput, out: Tensor) -> list[int]:
    first, nothing = own(ep)
    tensors = [
        y, recv.weights, recv.handle.topk_weights, recv.handle.topk_ids, None, None, out, None,
        *recv.handle.routing.parts
    ]  # fmt: skip
    return [*first, *[nothing if tensor is None else tensor.data_ptr() for tensor in tensors]]


def rows_of(recv: moelink.DispatchOutput) -> Tensor:
    return torch.zeros(*recv.tokens.shape[:-1], 128, dtype=torch.bfloat16)


def numbers_of(kernel: Any) -> tuple[bytes, int]:
    """The numbers that an ordinary launch of a kernel was packed with last, and its CTAs."""
    ((_, direct),) = kernel.loaded.values()
    return bytes(direct._buffer)[direct._begin : direct._begin + direct._numbers.size], kernel.count


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "options", [pytest.param(o, marks=pytest.mark.quick("other addresses")) for o in OPTIONS], ids=str
)
def test_the_driver_gets_the_addresses_of_each_call(
    options: dict[str, Any], weighted: bool, launches: list[Launch]
) -> None:
    """Of outputs that stay, so that the next one is elsewhere, and of outputs whose memory the next one takes."""
    with played(**SIZES, **options) as ep:
        x, ids, weights = given(0)
        mine = weights if weighted else None
        recv = ep.dispatch(x, ids, mine)
        ep.combine(rows_of(recv), recv)
        assert not launches, "the first calls go the ordinary way, whose launches are played elsewhere"
        plans = rank_of(ep)._plans.values()
        (want_sent,) = [numbers_of(plan.both) for plan in plans if hasattr(plan, "arena")]
        (want_home,) = [numbers_of(plan.both) for plan in plans if not hasattr(plan, "arena")]
        kept: list[Any] = []
        for seed in range(6):
            x, ids, weights = given(seed)
            mine = weights if weighted else None
            recv = ep.dispatch(x, ids, mine)
            out = ep.combine(y := rows_of(recv), recv)
            sent, home = launches[-2:]
            assert sent.addresses == of_dispatch(ep, x, ids, mine, recv)
            assert home.addresses == of_combine(ep, y, recv, out)
            assert ((sent.numbers, sent.count), (home.numbers, home.count)) == (want_sent, want_home)
            if seed % 2:
                kept.append((recv, out))
        assert len(launches) == 12


def test_calls_of_two_kinds_do_not_share_parameters(launches: list[Launch]) -> None:
    with played(**SIZES) as ep:
        calls = [given(seed, tokens) for seed, tokens in enumerate((5, 3))]
        for call in calls:
            recv = ep.dispatch(*call)
            ep.combine(rows_of(recv), recv)
        outputs = [ep.dispatch(*call) for call in calls]
        for (x, ids, weights), recv, sent in zip(calls, outputs, launches, strict=True):
            assert sent.addresses == of_dispatch(ep, x, ids, weights, recv)
        for recv in reversed(outputs):
            out = ep.combine(y := rows_of(recv), recv)
            assert launches[-1].addresses == of_combine(ep, y, recv, out)
            assert out.shape == (recv.handle.num_tokens, 128)


def test_a_call_that_fails_half_way_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, launches: list[Launch]
) -> None:
    """It is refused, and none of the addresses that it wrote is believed to be there."""
    monkeypatch.setattr(Rank, "launching", lambda _, *, own_stream: nullcontext())

    class Failing:
        """Addresses, of which only so many can be written."""

        def __init__(self, addresses: Any, left: int) -> None:
            self.addresses, self.left = addresses, left

        def __setitem__(self, place: int, address: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise MemoryError
            self.addresses[place] = address

    with played(**SIZES) as ep:
        x, ids, weights = given(0)
        first = ep.dispatch(x, ids, weights)
        y = rows_of(first)
        ep.combine(y, first)
        lane: Any = ep._fast_path
        sends, returns = lane._prepared.values()
        outputs = [ep.dispatch(x, ids, weights) for _ in range(2)]  # both stay, so their arenas are two
        memories = [vars(recv)["_source"].memory for recv in outputs]

        def dispatch(which: int) -> list[int]:
            object.__setattr__(sends._plan, "make_arena", lambda: memories[which])
            return of_dispatch(ep, x, ids, weights, ep.dispatch(x, ids, weights))

        def combine(which: int) -> list[int]:
            return of_combine(ep, y, outputs[which], ep.combine(y, outputs[which]))

        for kind, call in ((sends, dispatch), (returns, combine)):
            addresses = kind.direct.addresses
            for left in range(9):
                assert call(0) == launches[-1].addresses
                kind.direct.addresses = Failing(addresses, left)
                with pytest.raises(MemoryError):
                    call(1)
                kind.direct.addresses = addresses
                assert call(0) == launches[-1].addresses, left


def test_a_profiler_hears_of_every_launch(monkeypatch: pytest.MonkeyPatch, launches: list[Launch]) -> None:
    """Calls with hooks go the ordinary way, where Triton calls these."""
    ordinary: list[str] = []
    start = Session.start

    def noted(session: Session, requests: Any, *, fused: bool) -> Any:
        ordinary.append(requests[0].phase)
        return start(session, requests, fused=fused)

    monkeypatch.setattr(Session, "start", noted)
    with played(**SIZES) as ep:
        x, ids, weights = given(0)
        recv = ep.dispatch(x, ids, weights)
        y = rows_of(recv)
        ep.combine(y, recv)
        ordinary.clear()
        for hook in ("launch_enter_hook", "launch_exit_hook"):
            with monkeypatch.context() as patch:
                patch.setattr(knobs.runtime, hook, SimpleNamespace(calls=[print]))
                ep.combine(y, ep.dispatch(x, ids, weights))
            with monkeypatch.context() as patch:
                patch.setattr(knobs.runtime, hook, print)  # no chain of hooks: Triton knows what to do with it
                ep.combine(y, ep.dispatch(x, ids, weights))
        assert ordinary == 4 * ["dispatch", "combine"]
        assert not launches
        ep.combine(y, ep.dispatch(x, ids, weights))
        assert len(launches) == 2


def test_launches_go_to_the_current_stream(monkeypatch: pytest.MonkeyPatch, launches: list[Launch]) -> None:
    """Where it is another one than before, or calls are still under way, the rank's launches are put in order first."""
    asked: list[bool] = []

    @contextmanager
    def launching(self: Rank, *, own_stream: bool) -> Iterator[None]:
        asked.append(own_stream)
        yield

    with played(**SIZES) as ep:
        rank, (x, ids, weights) = rank_of(ep), given(0)
        recv = ep.dispatch(x, ids, weights)
        y = rows_of(recv)
        ep.combine(y, recv)
        monkeypatch.setattr(Rank, "launching", launching)
        for stream in (0, 9, 9, 4):
            rank.launcher._stream_of = lambda index, stream=stream: stream  # type: ignore[method-assign]
            ep.combine(y, ep.dispatch(x, ids, weights))
            assert [launch.stream for launch in launches[-2:]] == [stream, stream]
            assert asked == ([False, False] if stream != rank._latest_handle else [])
            asked.clear()
            rank._latest_handle = stream
        rank._forked = True
        monkeypatch.setattr(Rank, "join", lambda _: asked.append(True))
        ep.dispatch(x, ids, weights)
        assert asked == [False, True]


def test_a_captured_call_keeps_no_version_of_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []
    monkeypatch.setattr(fast_path, "is_captured", lambda ids: asked.append(ids) or True)
    with played(**SIZES) as ep:
        rank, (x, ids, weights) = rank_of(ep), given(0)
        ep.dispatch(x, ids, weights)
        assert ep.dispatch(x, ids, weights).handle.ids_version == ids._version
        assert not asked, "nothing is captured on the default stream"
        rank.launcher._stream_of, rank._latest_handle = (lambda index: 7), 7  # type: ignore[method-assign]
        assert ep.dispatch(x, ids, weights).handle.ids_version is None
        assert [tensor is ids for tensor in asked] == [True]
        rank.launcher._stream_of, rank._latest_handle = (lambda index: 0), 0  # type: ignore[method-assign]
        with torch.inference_mode():
            unversioned = ids.clone()
        assert ep.dispatch(x, unversioned, weights).handle.ids_version is None


def test_bound_calls_launch_what_they_were_bound_to(launches: list[Launch]) -> None:
    with played(**SIZES) as ep:
        x, ids, weights = given(0)
        ep.dispatch(x, ids, weights)
        bound = ep.bind(x, ids, weights)
        recv = bound()
        back = bound.combine(y := rows_of(recv))
        ep.dispatch(*given(1))
        out = back()
        bound()
        home, again = launches[-2:]
        assert home.addresses == of_combine(ep, y, recv, out)
        assert again.addresses == of_dispatch(ep, x, ids, weights, recv) == launches[0].addresses


def test_an_output_makes_no_garbage_that_python_must_search_for() -> None:
    """A cycle would keep the rows of a call until Python's collector finds it."""
    with played(**SIZES) as ep:
        x, ids, weights = given(0)
        gc.disable()
        try:
            for _ in range(2):
                recv = ep.dispatch(x, ids, weights)
                out = ep.combine(rows_of(recv), recv)
                assert recv.handle.counts.numel()
                gone = [weakref.ref(recv.tokens), weakref.ref(recv.row_offsets), weakref.ref(out)]
                ep._session.transport._under_way.clear()  # type: ignore[attr-defined]
                del recv, out
                assert [ref() for ref in gone] == [None] * 3
        finally:
            gc.enable()


def test_gradients_travel_over_the_routing_of_the_forward(launches: list[Launch]) -> None:
    """The driver gets the addresses of the notes that the forward made, and of memory of the backward's own."""
    with played(**SIZES, dispatch_format="fp8_block128") as ep:
        gradients: Any = ep._context.gradients
        rows_path, sums_path = gradients.path(gradients.rows()), gradients.path(gradients.sums())
        for seed in range(4):
            recv = ep.dispatch(*given(seed))
            source = vars(recv)["_source"]
            grad = torch.zeros(5, 128, dtype=torch.bfloat16)
            rows = rows_path.rows_again(grad, source)
            sums = sums_path.sum_rows(y := torch.zeros_like(rows), source)
            assert (rows.shape, sums.shape) == ((len(recv.tokens), 128), (5, 128))
            if not seed:  # ordinary calls, whose launches are played elsewhere
                launches.clear()
                continue
            sent, home = launches[-2:]
            first = own(gradients.rows())
            notes = recv.handle.routing.parts
            begin = len(first[0]) + len(DispatchInputs._fields)
            assert sent.addresses[: len(first[0])] == first[0]
            assert sent.addresses[len(first[0])] == grad.data_ptr()
            assert sent.addresses[len(first[0]) + 3] == source.ids.data_ptr()
            outputs = sent.addresses[begin : begin + len(DispatchOutputs._fields)]
            assert outputs[0] == rows.data_ptr()
            read = sent.addresses[begin + len(outputs) :]
            names = RoutingNotes._fields
            fresh = read.pop(names.index("received"))
            kept = [part.data_ptr() for name, part in notes._asdict().items() if name != "received"]
            assert read == [*kept, notes.received.data_ptr(), recv.handle.counts.data_ptr()]
            written = sorted({*outputs[2:], fresh} - {first[1]})
            assert len(written) == 7
            assert not any(at % 16 for at in written)
            assert not source.at <= fresh < source.at + source.memory.nbytes
            tensors = [y, None, None, source.ids, None, None, sums, None, *notes]
            where, absent = own(gradients.sums())
            assert home.addresses == [*where, *[absent if t is None else t.data_ptr() for t in tensors]]
