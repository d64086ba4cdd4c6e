"""Run a benchmark: the program of each rank, the peers' ranks, and the document made of them.

A rank measures the ceiling, passes the correctness gate and times its contenders, case by case. It returns plain data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch

import moelink
from moelink.tools.common import Progress
from moelink.tools.results import BENCHMARK, COLLECTIVE, SYMMETRIC
from moelink_bench.ceiling import ceiling_of, measure_ceiling
from moelink_bench.comparisons import SHARE_RULE, beside, comparisons_of, passed, shares_of
from moelink_bench.contenders import Contender, MoelinkContender, check_transports, compile_calls, open_communicator
from moelink_bench.document import device_names, run_head, to_document
from moelink_bench.measure import PHASES, measure_contender
from moelink_bench.names import PeerName
from moelink_bench.peers import (
    VDEV,
    FlashInferContender,
    Pool,
    Sizes,
    VdevContender,
    flashinfer_contenders,
    flashinfer_refusal,
)
from moelink_bench.presets import Case, Plan
from moelink_bench.ranks import CALL_TIMEOUT, Note, joined, reports_of, run_apart, teller
from moelink_bench.report import RULE, RankReport, RankRow, case_results, judge, overall, rows_of
from moelink_bench.timing import Captured, Clock, attempt, everyone, first_fault, host_barrier
from moelink_bench.workload import FORMULA, Workload, count_messages, make_workload, num_copies


def moelink_main(rank: int, world_size: int, plan: Plan, progress: str = "") -> list[RankReport]:
    """Run the ceiling, the gate and moelink's own transports; every rank returns the reports of all.

    The program of ``world_size`` processes. Rank 0 appends a line per step to the file ``progress``, if one is named.
    """
    say = teller(rank, progress)
    with joined(rank, plan.device, flush_bytes=plan.flush_bytes, timeout=plan.timeout) as clock:
        say("measuring the ceiling")
        ceiling = measure_ceiling(clock, samples=max(3, plan.settings.samples // 2), timeout=CALL_TIMEOUT)
        say("compiling")
        compile_ahead(plan, rank, world_size, clock.device)
        report = RankReport(device=device_names(plan.device)[0], gate="", ceiling=ceiling)
        for index, case in enumerate(plan.cases):
            say(f"{case.label} ({index + 1} of {len(plan.cases)})")
            report = run_case(report, index, case, plan, rank, world_size, clock)
            if report.gate:
                break
        return [RankReport.decode(said) for said in everyone(asdict(report))]


def compile_ahead(plan: Plan, rank: int, world_size: int, device: torch.device) -> None:
    """Compile the symmetric transport's kernels of all cases, each on one rank; the others find them in the cache."""
    if device.type != "cuda":
        return
    # The distribution is not known to the compiler. An SM limit is, but those of open communicators must fit the device
    # together: calls of communicators without one have them instead.
    distinct = list(dict.fromkeys(replace(case, distribution="uniform") for case in plan.cases))
    with ExitStack() as opened:
        communicators: dict[Case, moelink.Communicator] = {}
        for case in dict.fromkeys(replace(case, num_sms=None, quantised=False) for case in distinct):
            ep, _ = attempt(
                lambda case=case: open_communicator(  # type: ignore[misc]
                    case, transport="symmetric", capacity=16, device=device, timeout=CALL_TIMEOUT
                )
            )
            if ep is None:  # the gate will meet the same reason, and record it
                return
            communicators[case] = opened.enter_context(ep)
        for case in distinct[rank::world_size]:
            ep = communicators[replace(case, num_sms=None, quantised=False)]
            compile_calls(ep, quantised=case.quantised, num_sms=case.num_sms)
        host_barrier()


def run_case(
    report: RankReport, index: int, case: Case, plan: Plan, rank: int, world_size: int, clock: Clock
) -> RankReport:
    """Run one case, and return ``report`` with its gate and its rows."""
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
        checked = ", ".join(contender.name for contender in contenders) or "nothing could run"
        for contender in list(contenders):
            if fault:
                break
            # With rows by rank the collective transport is what others are compared with, and nobody's contender.
            if case.layout == "expert" or contender.name == SYMMETRIC:
                row, fault = time_contender(contender, index, workload, plan, clock)
                rows.append(row)
            contenders.remove(contender)
            contender.close()
    finally:
        for contender in contenders:
            contender.close()
    if fault:
        return replace(report, gate=f"{case.label}: {fault}", rows=())
    return replace(
        report,
        gates=(*report.gates, f"{case.label}: {checked}"),
        messages=(*report.messages, messages),
        capacities=(*report.capacities, workload.capacity),
        rows=(*report.rows, *sorted((*rows, *skipped), key=lambda row: row.contender != COLLECTIVE)),
    )


def run_gate(contenders: list[MoelinkContender], workload: Workload, rank: int, world_size: int) -> str:
    """Return the fault of the first two inputs on any rank, or ""."""
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
    """Time one of moelink's transports; return its row, and what is wrong with its results after the replays, or ""."""
    for copy in range(workload.copies):
        contender.combine(copy, contender.dispatch(copy))
    wanted = contender.results()

    def judge(graph: Captured) -> str:
        contender.spoil()
        graph.replay()
        contender.check()
        if all(torch.equal(a, b) for a, b in zip(contender.results(), wanted, strict=True)):
            return ""
        return f"{contender.name}: a replayed graph returns something else than the same calls made one by one"

    measured = measure_contender(
        contender, copies=workload.copies, settings=plan.settings, clock=clock, warm=True, judge=judge
    )
    contender.check()
    row = RankRow(index, contender.name, contender.note, phases=dict(measured.phases))
    return row, first_fault(measured.fault)


def vdev_main(rank: int, world_size: int, plan: Plan) -> list[RankRow]:
    """Measure torch's all_to_all_vdev_2d. The program of ``world_size`` processes."""
    with joined(rank, plan.device, flush_bytes=plan.flush_bytes, timeout=plan.timeout) as clock:
        pool, reason = attempt(
            lambda: Pool([Sizes.of(case, plan.settings, world_size) for case in plan.cases], clock.device)
        )
        if pool is None:
            return [RankRow(index, VDEV, reason=reason) for index in range(len(plan.cases))]

        def make(case: Case) -> Contender:
            return VdevContender(case, plan.settings, pool, rank=rank, world_size=world_size)

        return [peer_row(index, case, VDEV, make, plan, clock) for index, case in enumerate(plan.cases)]


def flashinfer_main(rank: int, world_size: int, plan: Plan) -> list[RankRow]:
    """Measure FlashInfer: alone with rows by rank, in both ways to call it, as a whole operation with rows by expert.

    The program of ``world_size`` processes.
    """
    with joined(rank, plan.device, flush_bytes=plan.flush_bytes, timeout=plan.timeout) as clock:

        def make(contender: type[FlashInferContender], case: Case) -> Contender:
            workload = make_workload(case, plan.settings, rank=rank, world_size=world_size, device=clock.device)
            return contender(workload, rank=rank, world_size=world_size)

        return [
            peer_row(index, case, contender.name, functools.partial(make, contender), plan, clock)
            for index, case in enumerate(plan.cases)
            for contender in flashinfer_contenders(case.layout)
        ]


def peer_row(index: int, case: Case, name: str, make: Callable[[Case], Contender], plan: Plan, clock: Clock) -> RankRow:
    """Measure the peer called ``name`` on one case, and return its samples or the reason why there are none."""
    contender, reason = attempt(lambda: make(case))
    if contender is None:
        return RankRow(index, name, reason=reason)
    row = RankRow(index, contender.name, contender.note)
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


PEER_TIMEOUT = 150.0
"""Seconds after which the ranks of a peer are given up, and its rows say so."""

METHOD = (
    "Each call in a sample has its own input and outputs as far as `copies` goes; before each sample more bytes than "
    "the second-level cache holds are written and all ranks are aligned. A figure is the median (20th, 80th "
    "percentile) over samples of the slowest rank, microseconds per call; skew is the median difference between "
    "slowest and fastest rank. graph: events around one replay of a CUDA graph of `calls` calls. pairs: events inside "
    "one replay of a CUDA graph of `calls` dispatches, each followed by its combine, before the first call and after "
    "every one; a phase's part of it, with the time that events take. eager: events around as many calls made one by "
    "one, `host_calls` where calls synchronise with the host (wall-clock time on CPUs). kernel: device time of the "
    "kernels of each call of one such run. Outputs have `capacity` rows instead of the worst case"
)


def run_bench(
    plan: Plan, *, commit: str | None = None, command: str = "", progress: Progress = lambda _: None,
    note: Note = lambda _: None,
) -> dict[str, Any] | None:  # fmt: skip
    """Run ``plan`` and return its document; None on all ranks but 0 when a launcher (torchrun) started this process.

    ``note`` is given the document so far before each peer, with the reason of rows that are not measured yet.

    Without a launcher, ranks are processes of this call. A document whose ``gate.passed`` is false has no figures.

    Raises:
        ConfigError: the launcher started another number of ranks.
        RankFailedError, RankHungError: a rank of moelink broke or did not end in time.
    """
    reports, apart = reports_of(moelink_main, plan, progress)
    if reports is None:
        return None
    document = functools.partial(make_document, plan, reports, commit=commit, command=command)
    peers: list[list[RankRow]] = [[] for _ in range(plan.ranks)]
    if any(report.gate for report in reports):
        return document(peers)
    programs = {"vdev": vdev_main, "flashinfer": flashinfer_main}
    for number, peer in enumerate(plan.peers):
        later = [row for one in plan.peers[number:] for row in _reason_rows(plan, one, apart or "was not reached")]
        if apart:
            return document([later] * plan.ranks)
        note(document([[*rows, *later] for rows in peers]))
        progress(peer)
        for rows, found in zip(peers, run_peer(plan, peer, programs[peer]), strict=True):
            rows.extend(found)
    return document(peers)


def run_peer(plan: Plan, peer: PeerName, program: Callable[..., list[RankRow]]) -> list[list[RankRow]]:
    """Run one peer, and return its rows by rank. Whatever goes wrong becomes the reason of its rows.

    Cases with an SM limit are left out, as only moelink has one. all_to_all_vdev_2d sends a row to each expert, so its
    cases with one row per rank are also left out.
    """
    chosen = [index for index, case in enumerate(plan.cases) if case.num_sms is None and names_of(peer, case)]
    if plan.device != "cuda":
        return [_reason_rows(plan, peer, "runs on CUDA devices only")] * plan.ranks
    refusal = flashinfer_refusal() if peer == "flashinfer" else ""
    if refusal:
        return [_reason_rows(plan, peer, refusal)] * plan.ranks
    if not chosen:
        lacking = "no SM limit" + " and no rows by rank" * (peer == "vdev")
        return [_reason_rows(plan, peer, f"has {lacking}")] * plan.ranks
    limit = min(PEER_TIMEOUT, plan.timeout)
    part = replace(plan, cases=tuple(plan.cases[index] for index in chosen), timeout=limit)
    found, reason = run_apart(program, part)
    if reason:
        return [_reason_rows(plan, peer, reason)] * plan.ranks
    return [[replace(row, case=chosen[row.case]) for row in rank] for rank in found]


def names_of(peer: PeerName, case: Case) -> tuple[str, ...]:
    """Return the contenders that ``peer`` is in ``case``."""
    if peer == "flashinfer":
        return tuple(contender.name for contender in flashinfer_contenders(case.layout))
    return (VDEV,) if case.layout == "expert" else ()


def _reason_rows(plan: Plan, peer: PeerName, reason: str) -> list[RankRow]:
    names = [names_of(peer, case) or (VDEV,) for case in plan.cases]
    return [RankRow(index, name, reason=reason) for index, each in enumerate(names) for name in each]


def make_document(
    plan: Plan, reports: Sequence[RankReport], peers: Sequence[Sequence[RankRow]], *, commit: str | None, command: str
) -> dict[str, Any]:
    """Return the document of a run, from ranks' reports and peers' rows: without figures when the gate failed."""
    fault = next((report.gate for report in reports if report.gate), "")
    gate = {"passed": not fault, "fault": fault, "checked": list(reports[0].gates)}
    document = run_head(BENCHMARK, plan, [report.device for report in reports], gate, command, commit)
    if fault:
        return document
    ceiling = ceiling_of([report.ceiling for report in reports], plan.device)
    results = case_results(plan, reports, ceiling)
    rows = rows_of(results, reports, peers)
    verdicts = judge(results, rows)
    comparisons = comparisons_of(results, rows, verdicts)
    shares = shares_of(results, rows)
    cases = []
    for case in results:
        entry: Any = to_document(case)
        entry.pop("gb_per_s")
        entry |= {"label": case.case.label, "wire_us": {phase: case.wire_us(phase) for phase in PHASES}}
        cases.append(entry)
    return {
        **document,
        "method": METHOD,
        "bytes_formula": FORMULA,
        "ceiling": to_document(ceiling),
        "cases": cases,
        "rows": [
            {
                "case": row.case,
                "contender": row.contender,
                "leaves_out": row.note,
                "reason": row.reason,
                "phases": to_document(row.phases),
            }
            for row in rows
        ],
        "rule": RULE,
        "verdicts": [
            {**entry, "duels": [{**duel, "ratio": duel["theirs"] / duel["ours"]} for duel in entry["duels"]]}
            for entry in to_document(verdicts)  # type: ignore[attr-defined]
        ],
        "faster_everywhere": overall([verdict.faster for verdict in verdicts if verdict.counts]),
        "at_the_wire_everywhere": overall([verdict.within_wire for verdict in verdicts]),
        "speed_gate": {"passed": passed(comparisons), "comparisons": to_document(comparisons)},
        "published": to_document(beside([case.case for case in results])),
        **({"sm_shares": shares, "sm_share_rule": SHARE_RULE} if shares else {}),
    }
