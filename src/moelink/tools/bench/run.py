"""A whole run: ranks as processes, then the peers' ranks, then one document."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from moelink.control.group import is_launched
from moelink.errors import ConfigError
from moelink.testing import RankFailedError, RankHungError, run_ranks
from moelink.tools.bench import peer_flashinfer, peer_vdev, provenance, wire
from moelink.tools.bench.judge import RULE, judge, overall
from moelink.tools.bench.presets import LAYOUTS, Plan
from moelink.tools.bench.ranks import RankReport, RankRow, flashinfer_main, moelink_main, vdev_main
from moelink.tools.bench.report import Results, results_of, to_document

SCHEMA_VERSION = 1
BENCHMARK = "moelink bench"

Progress = Callable[[str], None]
"""Called with one sentence at each step, possibly from another thread."""

PEER_TIMEOUT = 150.0
"""Seconds after which the ranks of a peer are given up, and its rows say so."""

METHOD = (
    "Each call in a sample has its own input and outputs as far as `copies` goes; before each sample more bytes than "
    "the second-level cache holds are written and all ranks are aligned. A figure is the median (20th, 80th "
    "percentile) over samples of the slowest rank, microseconds per call; skew is the median difference between "
    "slowest and fastest rank. graph: events around one replay of a CUDA graph of `calls` calls. pairs: events inside "
    "one replay of a CUDA graph of `calls` dispatches, each followed by its combine, before the first call and after "
    "every one; a phase's part of it. eager: events around as many calls made one by one, `host_calls` where calls "
    "synchronise with the host (wall-clock time on CPUs). kernel: device time of the kernels of each call of one such "
    "run. Outputs have `capacity` rows instead of the worst case"
)


def run_bench(
    plan: Plan, *, commit: str | None = None, command: str = "", progress: Progress = lambda _: None
) -> dict[str, Any] | None:
    """Run ``plan`` and return its document; None on all ranks but 0 when a launcher (torchrun) started this process.

    Without a launcher, ranks are processes of this call. A document whose ``gate.passed`` is false has no figures.

    Raises:
        ConfigError: the launcher started another number of ranks.
        RankFailedError, RankHungError: a rank of moelink broke or did not end in time.
    """
    if is_launched():
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if ranks != plan.ranks:
            raise ConfigError("ranks", f"the launcher's WORLD_SIZE {ranks}", plan.ranks)
        reports = moelink_main(rank, plan.ranks, plan)
        if rank:
            return None
        reason = "runs in processes of its own: start the bench without a launcher"
        peers = [_reason_rows(plan, reason)] * plan.ranks if plan.peers else []
        return make_document(plan, results_of(plan, reports, peers), commit=commit, command=command)
    progress(f"starting {plan.ranks} ranks")
    with _followed(progress) as path:
        everyone: list[list[RankReport]] = run_ranks(moelink_main, plan.ranks, plan, path, timeout=plan.timeout)
    reports = everyone[0]
    peers = []
    if plan.peers and not any(report.gate for report in reports):
        peers = run_peers(plan, progress)
    return make_document(plan, results_of(plan, reports, peers), commit=commit, command=command)


def run_peers(plan: Plan, progress: Progress) -> list[list[RankRow]]:
    """Every peer's rows, by rank."""
    programs = ((peer_vdev.NAME, vdev_main), (peer_flashinfer.NAME, flashinfer_main))
    rows: list[list[RankRow]] = [[] for _ in range(plan.ranks)]
    for name, program in programs:
        progress(name)
        for mine, found in zip(rows, run_peer(plan, name, program), strict=True):
            mine.extend(found)
    return rows


def run_peer(plan: Plan, name: str, program: Callable[..., list[RankRow]]) -> list[list[RankRow]]:
    """One peer's rows, by rank. Whatever goes wrong becomes the reason of its rows.

    Left out are cases with a budget of multiprocessors, which is moelink's alone, and those with one row a rank of
    all_to_all_vdev_2d, which sends a row to each expert.
    """
    layouts = LAYOUTS if name == peer_flashinfer.NAME else ("expert",)
    chosen = [index for index, case in enumerate(plan.cases) if case.num_sms is None and case.layout in layouts]
    if plan.device != "cuda":
        return [_reason_rows(plan, "runs on CUDA devices only", [name])] * plan.ranks
    if name == peer_flashinfer.NAME and not peer_flashinfer.is_installed():
        return [_reason_rows(plan, "flashinfer is not installed", [name])] * plan.ranks
    if not chosen:
        lacking = "a budget of multiprocessors" + " and rows by rank" * (name != peer_flashinfer.NAME)
        return [_reason_rows(plan, f"is without {lacking}", [name])] * plan.ranks
    part = Plan(
        preset=plan.preset, cases=tuple(plan.cases[index] for index in chosen), device=plan.device, ranks=plan.ranks,
        settings=plan.settings, timeout=PEER_TIMEOUT,
    )  # fmt: skip
    try:
        found: list[list[RankRow]] = run_ranks(program, plan.ranks, part, timeout=PEER_TIMEOUT)
    except (RankFailedError, RankHungError) as error:
        return [_reason_rows(plan, last_line(str(error)), [name])] * plan.ranks
    return [[RankRow(chosen[row.case], name, row.leaves_out, row.reason, row.phases) for row in rank] for rank in found]


def last_line(text: str) -> str:
    """The last line of ``text`` that says something: the error of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"


def _reason_rows(
    plan: Plan, reason: str, names: Sequence[str] = (peer_vdev.NAME, peer_flashinfer.NAME)
) -> list[RankRow]:
    return [RankRow(index, name, reason=reason) for index in range(len(plan.cases)) for name in names]


def make_document(plan: Plan, results: Results, *, commit: str | None, command: str) -> dict[str, Any]:
    """The JSON document of a run. With a red gate: head and faults, no figure."""
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": BENCHMARK,
        "preset": plan.preset,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
        **provenance.collect(commit),
        "device": plan.device,
        "devices": list(results.devices),
        "ranks": plan.ranks,
        "settings": to_document(plan.settings),
        "gate": {"passed": not results.gate, "fault": results.gate, "checked": list(results.gates)},
    }
    if results.gate:
        return document
    verdicts = judge(results.cases, results.rows)
    cases = []
    for case in results.cases:
        entry = to_document(case)
        assert isinstance(entry, dict)
        entry.pop("gb_per_s")
        entry |= {"label": case.case.label, "wire_us": {p: case.wire_us(p) for p in ("dispatch", "combine", "both")}}  # type: ignore[arg-type]
        cases.append(entry)
    return {
        **document,
        "method": METHOD,
        "bytes_formula": wire.FORMULA,
        "ceiling": to_document(results.ceiling),
        "cases": cases,
        "rows": to_document(results.rows),
        "rule": RULE,
        "verdicts": [
            {**entry, "duels": [{**duel, "ratio": duel["theirs"] / duel["ours"]} for duel in entry["duels"]]}
            for entry in to_document(verdicts)  # type: ignore[attr-defined]
        ],
        "faster_everywhere": overall([verdict.faster for verdict in verdicts]),
        "at_the_wire_everywhere": overall([verdict.within_wire for verdict in verdicts]),
    }


@contextmanager
def _followed(progress: Progress) -> Iterator[str]:
    """A file whose lines are passed to ``progress`` as they are written, while the block runs."""
    with tempfile.TemporaryDirectory(prefix="moelink-") as folder:
        path, stop = Path(folder) / "progress", threading.Event()
        path.touch()

        def follow() -> None:
            seen = 0
            while not stop.wait(0.1):
                lines = path.read_text().splitlines()
                for line in lines[seen:]:
                    progress(line)
                seen = len(lines)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield str(path)
        finally:
            stop.set()
            thread.join()
