"""Ranks of the symmetric transport for tests: all in one process, or a process each over shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import moelink
from moelink.kernels.launch.launcher import CompiledKernel, Launcher
from moelink.memory import create_all
from moelink.memory.workspace import Workspace
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.symmetric import SymmetricTransport
from tests.support.cases import Case, Result, Setup


def one_process(fields: dict[str, Any], world_size: int, device: str = "cpu") -> SymmetricTransport:
    """All ranks in this process."""
    configs = [moelink.EPConfig(**fields, world_size=world_size, rank=rank) for rank in range(world_size)]
    devices = [device if device == "cpu" else f"{device}:{rank}" for rank in range(world_size)]
    memories = create_all(devices, Workspace(configs[0]).nbytes)
    return SymmetricTransport(configs, memories, "test")


def apart(setup: Setup, world_size: int, timeout: float = 10.0) -> list[SymmetricTransport]:
    """A transport for each rank, in this process."""
    configs = [dataclasses.replace(setup.config(world_size, rank), timeout=timeout) for rank in range(world_size)]
    memories = create_all(["cpu"] * world_size, Workspace(configs[0]).nbytes)
    return [SymmetricTransport([c], [m], "test") for c, m in zip(configs, memories, strict=True)]


def dispatch_requests(case: Case, ranks: list[int], **options: Any) -> list[DispatchRequest]:
    datas = [case.data(rank) for rank in ranks]
    return [DispatchRequest(d.x, d.topk_ids, d.topk_weights if case.travel else None, **options) for d in datas]


def over(recvs: Sequence[moelink.DispatchOutput], requests: Sequence[DispatchRequest]) -> list[DispatchRequest]:
    """``requests`` over the routing of ``recvs``."""
    return [
        dataclasses.replace(request, routing=recv, topk_ids=recv.handle.topk_ids)
        for request, recv in zip(requests, recvs, strict=True)
    ]


def combine_requests(case: Case, ranks: list[int], recvs: list[moelink.DispatchOutput]) -> list[CombineRequest]:
    return [
        CombineRequest(
            case.expert_rows(rank, *recv.tokens.shape[:-1]),
            recv,
            case.data(rank).topk_weights if case.weights == "combine" else None,
            reduce=case.reduce,
            shared=case.shared_rows(rank),
            weigh=case.weights != "left",
        )
        for rank, recv in zip(ranks, recvs, strict=True)
    ]


def run_case(transport: SymmetricTransport, case: Case, ranks: list[int], *, fused: bool = False) -> list[Result]:
    """One dispatch and one combine of ``case`` on the local ranks."""
    recvs = transport.dispatch(dispatch_requests(case, ranks), fused=fused).wait()
    outs = transport.combine(combine_requests(case, ranks, recvs), fused=fused).wait()
    return [Result.of(recv, out) for recv, out in zip(recvs, outs, strict=True)]


def note_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched from now on, as they come."""
    launched: list[str] = []
    launch = Launcher.launch

    def note(self: Launcher, kernel: CompiledKernel, *args: Any, **kwargs: Any) -> None:
        launched.append(kernel.function.__name__)
        launch(self, kernel, *args, **kwargs)

    monkeypatch.setattr(Launcher, "launch", note)
    return launched


def poison_memory(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0xAA)
