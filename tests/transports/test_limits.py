"""Arguments, sizes and outputs at or past their limits are refused by name, never by an error of Python or torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import InterpreterError

import moelink
from moelink import ops, output
from moelink.config import MAX_INT32, MAX_TIMEOUT
from moelink.kernels.launch.arguments import innermost
from moelink.memory.layout import as_bytes
from moelink.testing import rank_data
from tests.support.cases import Case, Setup
from tests.support.symmetric_ranks import apart, dispatch_requests, over

SIZES: dict[str, Any] = {"num_experts": 6, "topk": 2, "hidden_size": 32, "max_tokens_per_rank": 4}
TRANSPORTS = ["collective", "symmetric"]
both = pytest.mark.quick("the transports make their outputs in ways of their own")


@pytest.mark.quick("milliseconds")
@pytest.mark.parametrize("timeout", [1e15, 1e300, 2_000_001, float("nan"), 0, True])
def test_timeouts_that_cannot_be_waited_for_are_refused(timeout: float) -> None:
    with pytest.raises(
        moelink.ConfigError, match=f"^timeout: expected a positive number of seconds up to {MAX_TIMEOUT}"
    ):
        moelink.init(**SIZES, timeout=timeout)


@pytest.mark.parametrize("fields, name", [
    ({"max_tokens_per_rank": 1 << 30}, "max_tokens_per_rank"),
    ({"max_tokens_per_rank": 1 << 20, "world_size": 1 << 10}, "max_tokens_per_rank"),
    ({"expert_alignment": 1 << 31}, "max_tokens_per_rank"),
    ({"capacity": MAX_INT32 + 1}, "capacity"),
])  # fmt: skip
def test_sizes_that_int32_cannot_count_are_refused(fields: dict[str, int], name: str) -> None:
    with pytest.raises(moelink.ConfigError, match=f"^{name}: expected sizes with at most {MAX_INT32} "):
        moelink.EPConfig(**{**SIZES, **fields})
    assert moelink.EPConfig(**{**SIZES, "capacity": MAX_INT32}).row_capacity == MAX_INT32


@both
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_changed_since_dispatch_is_refused(transport: str) -> None:
    d = rank_data(seed=5, rank=0, num_tokens=3, hidden_size=32, num_experts=6, topk=2)
    with moelink.init(**SIZES, transport=transport) as ep:
        recv = ep.dispatch(d.x, d.topk_ids, d.topk_weights)
        cut = dataclasses.replace(recv, weights=recv.weights[:1])
        with pytest.raises(moelink.ArgumentError, match=r"^recv.weights: expected shape \[8\], a weight for each row"):
            ep.combine(recv.tokens, cut)
        for call in (
            lambda: ep.combine(recv.tokens, recv, reduce=torch.ones(2)),
            lambda: ep.dispatch(d.x, d.topk_ids, d.topk_weights, host_counts=torch.ones(2)),
        ):
            with pytest.raises(moelink.ArgumentError, match="expected True or False, got a Tensor"):
                call()
        ep.combine(recv.tokens, recv)
        d.topk_ids.fill_(1 << 20)
        for call in (lambda: ep.combine(recv.tokens, recv), lambda: ep.dispatch(d.x, None, routing=recv)):
            with pytest.raises(
                moelink.ArgumentError, match="^(recv|routing): .* whose topk_ids were overwritten since"
            ):
                call()
        d.topk_ids.fill_(1)
        recv = ep.dispatch(d.x, d.topk_ids)
        ep.combine(recv.tokens, recv)


@both
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ids_of_a_captured_dispatch_may_be_overwritten_between_replays(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph dispatches what its ids hold at each replay, so an eager combine of its output must not compare them."""
    d = rank_data(seed=5, rank=0, num_tokens=3, hidden_size=32, num_experts=6, topk=2)
    asked: list[torch.Tensor] = []
    with moelink.init(**SIZES, transport=transport) as ep:
        with monkeypatch.context() as capturing:
            capturing.setattr(output, "is_captured", lambda ids: asked.append(ids) or True)
            captured = ep.dispatch(d.x, d.topk_ids)
        eager = ep.dispatch(d.x, d.topk_ids)
        d.topk_ids.fill_(1)
        ep.combine(captured.tokens, captured)
        with pytest.raises(moelink.ArgumentError, match="overwritten since"):
            ep.combine(eager.tokens, eager)
    assert [ids is d.topk_ids for ids in asked] == [True]


def test_whether_a_call_is_captured_is_asked_of_the_device_of_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: entered[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: entered[-1] == 1)

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    for index, captured in ((0, False), (1, True)):
        ids: Any = SimpleNamespace(is_cuda=True, device=index, get_device=lambda index=index: index)
        assert output.is_captured(ids) is captured
    assert not output.is_captured(torch.zeros(1)), "nothing asks about devices for a tensor on a CPU"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_every_rank_would_add_is_refused_where_tokens_are_replicated(transport: str) -> None:
    with moelink.init(**SIZES, transport=transport, mode="allreduce") as ep:
        x = torch.ones(3, 32, dtype=torch.bfloat16)
        recv = ep.dispatch(x, torch.ones(3, 2, dtype=torch.int32))
        for name, value in (("epilogue", x[0]), ("epilogue", x), ("shared", x)):
            with pytest.raises(moelink.ArgumentError, match=f"^{name}: expected None with mode='allreduce'"):
                ep.combine(recv.tokens, recv, **{name: value})


@both
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128", "nvfp4"])
def test_tensors_without_elements_may_have_any_strides(transport: str, fmt: str) -> None:
    """Torch calls them contiguous and views them as no other dtype. A sum's gradient without tokens is one."""
    d = rank_data(seed=5, rank=0, num_tokens=3, hidden_size=256, num_experts=6, topk=2)
    none = torch.ones((), dtype=torch.bfloat16).expand(0, 256)
    ids, weights = torch.ones((), dtype=torch.int32).expand(0, 2), torch.ones(()).expand(0, 2)
    assert none.is_contiguous()
    assert none.stride() == (0, 0)
    with moelink.init(**{**SIZES, "hidden_size": 256}, dispatch_format=fmt, transport=transport) as ep:
        recv = ep.dispatch(none, ids, weights)
        y = torch.zeros(len(recv.tokens), 256, dtype=torch.bfloat16)
        assert ep.combine(y, recv, shared=none, epilogue=none).shape == (0, 256)
        if ep.config.format.scale_dtype is not None:
            payload = torch.empty(0, ep.config.format.payload_width(256), dtype=ep.config.format.payload_dtype)
            scales = torch.ones((), dtype=ep.config.format.scale_dtype)
            ep.dispatch(payload, ids, scales=scales.expand(0, ep.config.format.scale_width(256)))
        x = torch.ones(0, 256, dtype=torch.bfloat16, requires_grad=True)
        recv = ep.dispatch(x, torch.ones(0, 2, dtype=torch.int32))
        ep.combine(ops.dequantize(ep, recv), recv).sum().backward()
        assert x.grad is not None
        recv = ep.dispatch(d.x, d.topk_ids)
        assert int(recv.num_recv_tokens) == 6


def test_columns_are_bytes_whatever_their_strides() -> None:
    column = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()[:, :1].contiguous().as_strided((2, 1), (1, 5))
    assert column.is_contiguous()
    assert as_bytes(column).view(torch.float32).tolist() == [[1.0], [2.0]]
    assert as_bytes(column).data_ptr() == column.data_ptr()


def test_nested_errors_of_the_interpreter_are_unwrapped() -> None:
    error: BaseException = MemoryError("in a device function")
    for _ in range(8):
        outer = InterpreterError(repr(error))
        outer.__cause__ = error
        error = outer
    assert str(innermost(error)) == "in a device function"


def test_of_three_kinds_of_call_all_ranks_name_the_same() -> None:
    setup = Setup("bf16")
    ranks, case = apart(setup, 4), Case(setup, "uniform", small=True)
    requests = dispatch_requests(case, range(4))
    first = [pending.wait()[0] for pending in [t.dispatch([r]) for t, r in zip(ranks, requests, strict=True)]]
    kinds = over(first, requests)
    mixed = [requests[0], kinds[1], dataclasses.replace(requests[2], topk_weights=None), requests[3]]
    pending = [transport.dispatch([request]) for transport, request in zip(ranks, mixed, strict=True)]
    named = []
    for one in pending:
        with pytest.raises(moelink.ProtocolError) as told:
            one.wait()
        named.append(told.value.peer)
    assert named == [1] * 4
