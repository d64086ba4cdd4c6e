"""Who takes part: the interface, and moelink's own transports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

import moelink
from moelink.errors import UnsupportedError
from moelink.output import DispatchOutput
from moelink.tools.bench.presets import Case
from moelink.tools.bench.workload import Workload

Handle = Any
"""What a contender's dispatch returns and its combine takes."""


class Contender(Protocol):
    """A way to dispatch and combine, set up for one workload on one rank.

    Attributes:
        name: in tables and files.
        leaves_out: what the operation does not do that moelink's does; "" for nothing.
        capturable: calls do not synchronise with the host, so that a CUDA graph can hold them.
        alternates: each dispatch must be followed by its combine, so that phases cannot be repeated on their own.
        kernel_prefix: what the names of its kernels start with ("" for any).
    """

    name: str
    leaves_out: str
    capturable: bool
    alternates: bool
    kernel_prefix: str

    def dispatch(self, copy: int) -> Handle:
        """Dispatch input ``copy``."""

    def combine(self, copy: int, handle: Handle) -> Any:
        """Bring home what stands for the experts' outputs of input ``copy``."""

    def check(self) -> str:
        """What is wrong with its results, or "". Collective; synchronises."""

    def close(self) -> None:
        """Release everything. Collective."""


COLLECTIVE, SYMMETRIC = "moelink collective", "moelink symmetric"


class MoelinkContender:
    """One of moelink's transports. Outputs are allocated once per copy and reused."""

    leaves_out = ""
    alternates = False

    def __init__(self, workload: Workload, *, transport: str, device: torch.device, timeout: float) -> None:
        """Open a communicator. Collective over the default group.

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
        self.ep = open_communicator(
            case, transport=transport, capacity=workload.capacity, device=device, timeout=timeout
        )
        self._workload = workload
        self._received: list[DispatchOutput | None] = [None] * workload.copies
        self._combined: list[Tensor | None] = [None] * workload.copies

    def dispatch(self, copy: int) -> DispatchOutput:
        """See :class:`Contender`."""
        batch = self._workload.batches[copy]
        recv = self.ep.dispatch(batch.x, batch.topk_ids, batch.topk_weights, out=self._received[copy])
        self._received[copy] = self._received[copy] or recv
        return recv

    def combine(self, copy: int, handle: DispatchOutput) -> Tensor:
        """See :class:`Contender`."""
        out = self.ep.combine(self._workload.y[copy], handle, out=self._combined[copy])
        self._combined[copy] = out
        return out

    def check(self) -> str:
        """ "": what went wrong in the calls so far, rows that did not fit included, is raised."""
        self.ep.check()
        return ""

    def results(self) -> list[Tensor]:
        """Copies of what the last calls returned: combined rows of every input, dispatched rows of the first."""
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
        """See :class:`Contender`."""
        self.ep.close()


def open_communicator(
    case: Case, *, transport: str, capacity: int | None, device: torch.device, timeout: float
) -> moelink.Communicator:
    """A communicator for ``case``, over the default group where there is one. Collective."""
    return moelink.init(
        num_experts=case.num_experts, topk=case.topk, hidden_size=case.hidden_size, max_tokens_per_rank=case.tokens,
        dispatch_format=case.format, capacity=capacity, num_sms=case.num_sms if transport == "symmetric" else None,
        layout=case.layout, transport=transport, device=device, timeout=timeout,  # type: ignore[arg-type]
    )  # fmt: skip


@contextmanager
def compiling_only(ep: moelink.Communicator) -> Iterator[None]:
    """Calls of ``ep`` inside compile and load their kernels, and launch nothing: no peer has to take part.

    For communicators on CUDA devices. (``ep.warmup()`` compiles the kernels of the split calls too, which take longer
    than all measurements.)
    """
    (rank,) = ep._session.transport.ranks  # type: ignore[attr-defined]
    with rank.preparing():
        yield


def compile_calls(ep: moelink.Communicator) -> None:
    """Compile what the calls of the bench launch, for ``ep``'s device. Local to this rank."""
    config, device = ep.config, ep.device
    tokens = config.max_tokens_per_rank
    x = torch.zeros(tokens, config.hidden_size, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(tokens, config.topk, dtype=torch.int32, device=device)
    weights = torch.zeros(tokens, config.topk, device=device)
    y = torch.zeros(config.row_capacity, config.hidden_size, dtype=config.combine_dtype, device=device)
    with compiling_only(ep):
        ep.combine(y, ep.dispatch(x, ids, weights))
