"""Contenders: their interface, moelink's own transports, and the correctness gate that these pass before timing.

The gate has two parts. **Truth**: experts that multiply by a power of two make the result computable from this rank's
own tokens, ids and weights alone, in fp64. **Equality**: all transports return the same bits in dispatch and combine.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import moelink
from moelink.errors import UnsupportedError
from moelink.formats import get_format
from moelink.output import DispatchOutput
from moelink.routing import ExpertMap
from moelink.tools.common import dequantize_rows, row_major_scales
from moelink.tools.results import COLLECTIVE, SYMMETRIC
from moelink_bench.presets import Case
from moelink_bench.workload import Batch, Workload, rows_to_dispatch

Handle = Any
"""The result of a contender's dispatch, which its combine takes."""
Call = Callable[[], Any]


class Contender(ABC):
    """A way to do what is measured, set up on one rank for inputs that are named by their ``copy``.

    Attributes:
        name: in tables and files.
        note: its differences from others, such as omitted work, or "".
        capturable: calls do not synchronise with the host, so that a CUDA graph can hold them.
        alternates: the parts of the chain must follow one another, so that none can be repeated on its own.
        kernel_prefix: what the names of its kernels start with ("" for any); None where they are not looked at.
    """

    name: str
    note: str = ""
    capturable: bool = True
    alternates: bool = False
    kernel_prefix: str | None = None

    @abstractmethod
    def repeats(self, copy: int) -> Mapping[str, Call]:
        """Return by name what can be made again and again of an input; the last is the whole."""

    def chain(self, copy: int) -> Sequence[tuple[str, Call]]:  # noqa: ARG002 - has no parts
        """Return the parts of the whole by name, calls that are made one after the other; () where it has none."""
        return ()

    def check(self) -> str:
        """Return the fault of its results, or "". Collective; synchronises."""
        return ""

    def close(self) -> None:  # noqa: B027 - most have nothing else
        """Release everything that does not go with the process. Collective."""


class Calls(Contender):
    """A contender by its dispatch and its combine."""

    kernel_prefix = ""

    @abstractmethod
    def dispatch(self, copy: int) -> Handle:
        """Dispatch input ``copy``."""

    @abstractmethod
    def combine(self, copy: int, handle: Handle) -> Any:
        """Bring home what stands for the experts' outputs of input ``copy``."""

    def repeats(self, copy: int) -> Mapping[str, Call]:
        """See :class:`Contender`. Combine alone is made on the handle of a dispatch of its own."""

        def both() -> Any:
            return self.combine(copy, self.dispatch(copy))

        if self.alternates:
            return {"both": both}
        handle = self.dispatch(copy)
        return {"dispatch": lambda: self.dispatch(copy), "combine": lambda: self.combine(copy, handle), "both": both}

    def chain(self, copy: int) -> Sequence[tuple[str, Call]]:
        held: list[Handle] = [None]

        def dispatch() -> Handle:
            held[0] = self.dispatch(copy)
            return held[0]

        return ("dispatch", dispatch), ("combine", lambda: self.combine(copy, held[0]))


class MoelinkContender(Calls):
    """One of moelink's transports. Outputs are allocated once per copy and reused."""

    def __init__(self, workload: Workload, *, transport: str, device: torch.device, timeout: float) -> None:
        """Open a communicator. Collective.

        Raises:
            UnsupportedError: the transport cannot run here; the message says why.
        """
        on_cpu = device.type == "cpu"
        if transport == "symmetric" and on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise UnsupportedError("on a CPU its kernels run in Triton's interpreter only: set TRITON_INTERPRET=1")
        case = workload.case
        self.name = COLLECTIVE if transport == "collective" else SYMMETRIC
        self.capturable = transport == "symmetric" and not on_cpu
        self.kernel_prefix = "ep_" if transport == "symmetric" else ""
        self.alternates = case.zero_copy
        self.ep = open_communicator(
            case, transport=transport, capacity=workload.capacity, device=device, timeout=timeout
        )
        self._workload = workload
        self._received: list[DispatchOutput | None] = [None] * workload.copies
        self._combined: list[Tensor | None] = [None] * workload.copies

    def dispatch(self, copy: int) -> DispatchOutput:
        batch, (x, scales) = self._workload.batches[copy], self._workload.rows[copy]
        if self.alternates:  # rows are in the workspace, and what is beside them is made anew
            return self.ep.dispatch(x, batch.topk_ids, batch.topk_weights, scales=scales)
        recv = self.ep.dispatch(x, batch.topk_ids, batch.topk_weights, scales=scales, out=self._received[copy])
        self._received[copy] = self._received[copy] or recv
        return recv

    def combine(self, copy: int, handle: DispatchOutput) -> Tensor:
        out = self.ep.combine(self._workload.y[copy], handle, out=self._combined[copy])
        self._combined[copy] = out
        return out

    def check(self) -> str:
        """Return "", or raise the error of the calls so far. Rows that did not fit are an error."""
        self.ep.check()
        return ""

    def results(self) -> list[Tensor]:
        """Copies of what the last calls returned: combined rows of every input, dispatched rows of the first. Rows that
        stay in the workspace have ended with their combine."""
        first = self._received[0]
        rows = [] if first is None else [first.tokens[: int(first.row_offsets[-1])].view(torch.uint8)]
        return [result.clone() for result in (*rows, *(out for out in self._combined if out is not None))]

    def spoil(self) -> None:
        """Overwrite what :meth:`results` looks at, so that later calls have to write it again."""
        if self._received[0] is not None:
            self._received[0].tokens.view(torch.uint8).fill_(255)
        for out in self._combined:
            if out is not None:
                out.fill_(float("nan"))

    def close(self) -> None:
        self.ep.close()


def open_communicator(
    case: Case, *, transport: str, capacity: int | None, device: torch.device, timeout: float
) -> moelink.Communicator:
    """Open a communicator for ``case``, over the default group where there is one. Collective."""
    return moelink.init(
        num_experts=case.num_experts, topk=case.topk, hidden_size=case.hidden_size, max_tokens_per_rank=case.tokens,
        dispatch_format=case.format, capacity=None if case.zero_copy else capacity, zero_copy=case.zero_copy,
        num_sms=case.num_sms if transport == "symmetric" else None, layout=case.layout, transport=transport,  # type: ignore[arg-type]
        device=device, timeout=timeout,
    )  # fmt: skip


@contextmanager
def compiling_only(ep: moelink.Communicator) -> Iterator[None]:
    """Make calls of ``ep`` compile and load their kernels and launch nothing, so that no peer has to take part.

    For communicators on CUDA devices. (``ep.warmup()`` compiles the kernels of the split calls too, which take longer
    than all measurements.)
    """
    (rank,) = ep._session.transport.ranks  # type: ignore[attr-defined]
    with rank.launcher.preparing():
        yield


def compile_calls(
    ep: moelink.Communicator, *, quantised: bool = False, num_sms: int | None = None,
    bounds: Sequence[int | None] = (None,),
) -> None:  # fmt: skip
    """Compile what the calls of the bench launch, for ``ep``'s device. Local to this rank.

    Args:
        quantised: rows are dispatched in the format.
        num_sms: SM limit of the calls, whose kernels are those of a communicator with this limit.
        bounds: ``max_tokens`` of the calls.
    """
    from moelink.kernels.launch.grid import bounds_of_kernels

    config, device = ep.config, ep.device
    tokens = config.max_tokens_per_rank
    x = torch.zeros(tokens, config.hidden_size, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(tokens, config.topk, dtype=torch.int32, device=device)
    weights = torch.zeros(tokens, config.topk, device=device)
    scales = None
    if quantised:
        made = config.format.quantize(x)
        x, scales = made.payload, made.scales
    with compiling_only(ep):
        for bound in bounds_of_kernels(config, device, bounds):
            few = None if scales is None else scales[:bound]
            recv = ep.dispatch(x[:bound], ids[:bound], weights[:bound], scales=few, max_tokens=bound, num_sms=num_sms)
        rows = recv.src_info.shape[:-1]
        y = torch.zeros(*rows, config.hidden_size, dtype=config.combine_dtype, device=device)
        ep.combine(y, recv, num_sms=num_sms)


ROUNDINGS = 3.1
"""An expert's result, the sum on its rank and the sum at home are rounded to bf16; the rest is fp32 arithmetic."""

EXACT_FIELDS = ("row_offsets", "expert_ids", "scales_offsets", "num_recv_tokens", "overflow")
ROW_FIELDS = ("tokens", "src_info", "weights", "topk_ids", "topk_weights")


def expert_factor(expert: Tensor) -> Tensor:
    """Return the factor of an expert's rows: +-1, +-2 or +-0.5, exact in every dtype. fp32.

    Example: experts 0, 1, 2, 3 multiply with 0.5, -1, 2, -0.5.
    """
    return torch.exp2((expert % 3 - 1).float()) * (1 - 2 * (expert % 2)).float()


def _used(recv: DispatchOutput) -> Tensor:
    """[world_size, tokens] bool: the rows that hold a token."""
    assert recv.topk_ids is not None
    return (recv.topk_ids >= 0).any(2)


def compacted(recv: DispatchOutput) -> DispatchOutput:
    """Copy the rows of an output with ``zero_copy`` that hold a token, as layout "rank" has them without it."""
    used = _used(recv)
    counts = torch.nn.functional.pad(used.sum(1), (1, 0))

    def rows(field: Tensor | None) -> Tensor | None:
        return None if field is None else field.view(torch.uint8)[used].view(field.dtype)

    fields: dict[str, Any] = {name: rows(getattr(recv, name)) for name in (*ROW_FIELDS, "scales")}
    return dataclasses.replace(recv, row_offsets=counts.cumsum(0).int(), **fields)


def spread(y: Tensor, recv: DispatchOutput) -> Tensor:
    """Return [world_size, tokens, hidden_size] with ``y`` where :func:`compacted` took rows from, and NaN elsewhere."""
    used = _used(recv)
    out = torch.full((*used.shape, y.shape[1]), torch.nan, dtype=y.dtype, device=y.device)
    out[used] = y
    return out


def run_experts(recv: DispatchOutput, case: Case, *, rank: int, world_size: int) -> Tensor:
    """Return [rows, hidden_size] bf16: the dequantised rows times :func:`row_factors`, zero past the last row."""
    total = int(recv.row_offsets[-1])
    rows = dequantize_rows(recv, format_name=case.format, hidden_size=case.hidden_size)
    y = torch.zeros(len(recv.tokens), case.hidden_size, dtype=torch.bfloat16, device=rows.device)
    factors = row_factors(recv, total, ExpertMap(case.num_experts, world_size).first(rank))
    y[:total] = (rows * factors[:, None]).to(torch.bfloat16)
    return y


def row_factors(recv: DispatchOutput, total: int, first: int) -> Tensor:
    """[total] fp32: factor of each row's expert, or the weighted sum of a row's experts where it is for several (layout
    "rank"). ``first``: this rank's first expert.

    Example: expert 0 multiplies with 0.5, expert 1 with -1. A row of layout "rank" for both, of weights 0.5 and 0.25,
    is multiplied with 0.25 - 0.25 = 0.
    """
    if recv.topk_ids is not None:
        ids, weights = recv.topk_ids[:total], recv.topk_weights
        assert weights is not None
        return (weights[:total] * expert_factor(first + ids) * (ids >= 0)).sum(1)
    offsets = recv.row_offsets.long()
    sizes = offsets[1:] - offsets[:-1]
    groups = torch.repeat_interleave(torch.arange(sizes.numel(), device=sizes.device), sizes)
    return expert_factor(first + groups)


def difference_from_truth(out: Tensor, batch: Batch, case: Case) -> str:
    """Empty when ``out`` [tokens, hidden_size] is the layer's result but for the roundings that combine makes."""
    fmt = get_format(case.format)
    quantized = fmt.quantize(batch.x)
    x = fmt.dequantize(quantized.payload, quantized.scales).double()
    factors = batch.topk_weights.double() * expert_factor(batch.topk_ids).double()
    exact, magnitude = x * factors.sum(1, keepdim=True), x.abs() * factors.abs().sum(1, keepdim=True)
    allowed = ROUNDINGS * torch.finfo(torch.bfloat16).eps / 2 * magnitude
    wrong = ~((out.double() - exact).abs() <= allowed)
    if not bool(wrong.any()):
        return ""
    token = int(wrong.any(1).nonzero()[0])
    return f"combine differs from the layer's result in {int(wrong.any(1).sum())} tokens, the first is {token}"


def first_difference(got: DispatchOutput, want: DispatchOutput, case: Case) -> str:
    """Return the name of the first field in which two outputs differ in their defined part, or ""."""
    for name in EXACT_FIELDS:
        if not _equal(getattr(got, name), getattr(want, name)):
            return name
    total = int(want.row_offsets[-1])
    for name in ROW_FIELDS:
        a, b = getattr(got, name), getattr(want, name)
        if not _equal(None if a is None else a[:total], None if b is None else b[:total]):
            return name
    scales = (row_major_scales(recv, format_name=case.format, hidden_size=case.hidden_size) for recv in (got, want))
    return "" if _equal(*scales) else "scales"


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors have the same bits."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.numel():
        return True
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def check_transports(
    communicators: Mapping[str, moelink.Communicator], batch: Batch, case: Case, *, rank: int, world_size: int
) -> str:
    """Return the faults of ``communicators``, by name, or "". The others are compared with the first one.

    Collective: every rank makes the same calls, even after a fault.
    """
    recvs, outs, faults = {}, {}, []
    x, scales = rows_to_dispatch(case, batch.x)
    for name, ep in communicators.items():
        recv = ep.dispatch(x, batch.topk_ids, batch.topk_weights, scales=scales)
        rows = compacted(recv) if case.zero_copy else recv
        y = run_experts(rows, case, rank=rank, world_size=world_size)
        outs[name] = ep.combine(spread(y, recv) if case.zero_copy else y, recv)
        ep.check()
        recvs[name] = rows
        if int(recv.overflow):
            faults.append(f"{name}: {int(recv.overflow)} rows did not fit")
    baseline = next(iter(communicators))
    for name in communicators:
        fault = difference_from_truth(outs[name], batch, case)
        if not fault and name != baseline:
            field = first_difference(recvs[name], recvs[baseline], case)
            if field:
                fault = f"dispatch differs from {baseline} in {field}"
            elif not _equal(outs[name], outs[baseline]):
                fault = f"combine differs from {baseline}"
        if fault:
            faults.append(f"{name}: {fault}")
    return "; ".join(faults)
