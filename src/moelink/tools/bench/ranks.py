"""The program of one rank: gate, then every contender on every case. What it returns is plain data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moelink.tools.bench.ceiling import CeilingSamples, measure_ceiling
from moelink.tools.bench.contenders import (
    COLLECTIVE,
    SYMMETRIC,
    Contender,
    MoelinkContender,
    compile_calls,
    open_communicator,
)
from moelink.tools.bench.gate import check_transports
from moelink.tools.bench.measure import Phase, PhaseSamples, measure_contender
from moelink.tools.bench.peer_flashinfer import FlashInferContender
from moelink.tools.bench.peer_vdev import Pool, Sizes, VdevContender
from moelink.tools.bench.presets import Case, Plan
from moelink.tools.bench.timing import Clock, CudaClock, WallClock
from moelink.tools.bench.together import attempt, everyone, first_fault, host_barrier
from moelink.tools.bench.wire import count_messages
from moelink.tools.bench.workload import Workload, make_workload, num_copies

CALL_TIMEOUT = 60.0
"""Seconds after which a call gives up on a peer."""


@dataclass(frozen=True)
class RankRow:
    """One contender on one case, as one rank saw it. ``reason`` says why there are no samples."""

    case: int
    contender: str
    leaves_out: str = ""
    reason: str = ""
    phases: dict[Phase, PhaseSamples] = field(default_factory=dict)


@dataclass(frozen=True)
class RankReport:
    """Everything one rank measured.

    Attributes:
        device: its device's name.
        gate: what is wrong, "" when nothing is; then and only then there are rows.
        ceiling: its samples of the ceiling.
        gates: one line per case that passed.
        messages: per case, per rotated input, messages to each rank.
        capacities: per case, rows of outputs.
        rows: its measurements, the baseline first in each case.
    """

    device: str
    gate: str
    ceiling: CeilingSamples
    gates: tuple[str, ...] = ()
    messages: tuple[tuple[tuple[int, ...], ...], ...] = ()
    capacities: tuple[int, ...] = ()
    rows: tuple[RankRow, ...] = ()


@contextmanager
def joined(rank: int, plan: Plan) -> Iterator[Clock]:
    """This rank's device and the default group, and a clock; the group is destroyed at the end."""
    limit = timedelta(seconds=plan.timeout)
    if plan.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=limit)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=limit)
    try:
        clock: Clock = WallClock()
        if plan.device == "cuda":
            clock = CudaClock(device, flush_bytes=2 * plan.settings.rotation_bytes)
        yield clock
    finally:
        dist.destroy_process_group()


def moelink_main(rank: int, world_size: int, plan: Plan, progress: str = "") -> list[RankReport]:
    """Ceiling, gate and moelink's own transports; every rank returns the reports of all.

    The program of ``world_size`` processes. Rank 0 appends a line per step to the file ``progress``, if one is named.
    """

    def say(message: str) -> None:
        if rank == 0 and progress:
            with Path(progress).open("a") as stream:
                stream.write(f"{message}\n")

    with joined(rank, plan) as clock:
        say("measuring the ceiling")
        ceiling = measure_ceiling(clock, samples=max(3, plan.settings.samples // 2), timeout=CALL_TIMEOUT)
        say("compiling")
        compile_ahead(plan, rank, world_size, clock.device)
        name = torch.cuda.get_device_name(clock.device) if plan.device == "cuda" else "CPU"
        report = RankReport(device=name, gate="", ceiling=ceiling)
        for index, case in enumerate(plan.cases):
            say(f"{case.label} ({index + 1} of {len(plan.cases)})")
            report = run_case(report, index, case, plan, rank, world_size, clock)
            if report.gate:
                break
        return everyone(report)


def compile_ahead(plan: Plan, rank: int, world_size: int, device: torch.device) -> None:
    """Compile the symmetric transport's kernels of all cases, each on one rank; the others find them in the cache."""
    if device.type != "cuda":
        return
    # The distribution is not known to the compiler. A budget is, but those of open communicators must fit the device:
    # the first calls of each compile for it.
    distinct = list(dict.fromkeys(replace(case, distribution="uniform", num_sms=None) for case in plan.cases))
    with ExitStack() as opened:
        communicators = []
        for case in distinct:
            ep, _ = attempt(
                lambda case=case: open_communicator(  # type: ignore[misc]
                    case, transport="symmetric", capacity=16, device=device, timeout=CALL_TIMEOUT
                )
            )
            if ep is None:  # the gate will meet the same reason, and record it
                return
            communicators.append(opened.enter_context(ep))
        for ep in communicators[rank::world_size]:
            compile_calls(ep)
        host_barrier()


def run_case(
    report: RankReport, index: int, case: Case, plan: Plan, rank: int, world_size: int, clock: Clock
) -> RankReport:
    """``report`` with the gate and the rows of one case."""
    settings = plan.settings
    workload = make_workload(case, settings, rank=rank, world_size=world_size, device=clock.device)
    messages = tuple(tuple(count_messages(b.topk_ids.cpu(), case, world_size)) for b in workload.batches)
    contenders: list[MoelinkContender] = []
    skipped: list[RankRow] = []
    for transport, name in (("collective", COLLECTIVE), ("symmetric", SYMMETRIC)):
        made, reason = attempt(
            lambda transport=transport: MoelinkContender(  # type: ignore[misc]
                workload, transport=transport, device=clock.device, timeout=CALL_TIMEOUT
            )
        )
        if made is None:
            skipped.append(RankRow(index, name, reason=reason))
        else:
            contenders.append(made)
    rows: list[RankRow] = []
    try:
        fault = run_gate(contenders, workload, rank, world_size)
        for contender in list(contenders):
            if fault:
                break
            row, fault = time_contender(contender, index, workload, plan, clock)
            rows.append(row)
            contenders.remove(contender)
            contender.close()
    finally:
        for contender in contenders:
            contender.close()
    if fault:
        return replace(report, gate=f"{case.label}: {fault}", rows=())
    passed = ", ".join(row.contender for row in rows) or "nothing could run"
    return replace(
        report,
        gates=(*report.gates, f"{case.label}: {passed}"),
        messages=(*report.messages, messages),
        capacities=(*report.capacities, workload.capacity),
        rows=(*report.rows, *sorted((*rows, *skipped), key=lambda row: row.contender != COLLECTIVE)),
    )


def run_gate(contenders: list[MoelinkContender], workload: Workload, rank: int, world_size: int) -> str:
    """What is wrong on any rank with the first two inputs, or empty."""
    if not contenders:
        return ""
    faults = [
        check_transports(
            {c.name: c.ep for c in contenders}, batch, workload.case, rank=rank, world_size=world_size
        )
        for batch in workload.batches[:2]
    ]  # fmt: skip
    return first_fault("; ".join(fault for fault in faults if fault))


def time_contender(
    contender: MoelinkContender, index: int, workload: Workload, plan: Plan, clock: Clock
) -> tuple[RankRow, str]:
    """The row of one of moelink's transports, and what was found wrong with its results after all that replaying."""
    for copy in range(workload.copies):
        contender.combine(copy, contender.dispatch(copy))
    wanted = contender.results()
    measured = measure_contender(contender, copies=workload.copies, settings=plan.settings, clock=clock, warm=True)
    fault = contender.check()
    if measured.graph is not None:
        contender.spoil()
        measured.graph.replay()
        fault = contender.check()
        if any(not torch.equal(a, b) for a, b in zip(contender.results(), wanted, strict=True)):
            fault = f"{contender.name}: a replayed graph returns something else than the same calls made one by one"
    row = RankRow(index, contender.name, contender.leaves_out, phases=dict(measured.phases))
    return row, first_fault(fault)


def vdev_main(rank: int, world_size: int, plan: Plan) -> list[RankRow]:
    """The rows of torch's all_to_all_vdev_2d. The program of ``world_size`` processes."""
    with joined(rank, plan) as clock:
        pool, reason = attempt(
            lambda: Pool([Sizes.of(case, plan.settings, world_size) for case in plan.cases], clock.device)
        )
        if pool is None:
            return [RankRow(index, "", reason=reason) for index in range(len(plan.cases))]

        def make(case: Case) -> Contender:
            return VdevContender(case, plan.settings, pool, rank=rank, world_size=world_size)

        return [peer_row(index, case, make, plan, clock) for index, case in enumerate(plan.cases)]


def flashinfer_main(rank: int, world_size: int, plan: Plan) -> list[RankRow]:
    """The rows of FlashInfer. The program of ``world_size`` processes."""
    with joined(rank, plan) as clock:

        def make(case: Case) -> Contender:
            workload = make_workload(case, plan.settings, rank=rank, world_size=world_size, device=clock.device)
            return FlashInferContender(workload, rank=rank, world_size=world_size)

        return [peer_row(index, case, make, plan, clock) for index, case in enumerate(plan.cases)]


def peer_row(index: int, case: Case, make: Callable[[Case], Contender], plan: Plan, clock: Clock) -> RankRow:
    """One peer's row: its samples, or the reason why there are none."""
    contender, reason = attempt(lambda: make(case))
    if contender is None:
        return RankRow(index, "", reason=reason)
    row = RankRow(index, contender.name, contender.leaves_out)
    fault, reason = attempt(contender.check)
    fault = first_fault(fault or "")
    if fault or reason:
        return replace(row, reason=reason or f"not timed, its result is wrong: {fault}")
    measured, reason = attempt(
        lambda: measure_contender(
            contender, copies=num_copies(case, plan.settings), settings=plan.settings, clock=clock
        )
    )
    contender.close()
    return replace(row, reason=reason, phases={} if measured is None else dict(measured.phases))
