"""The presets ``roles`` and ``roles-smoke`` of ``moelink bench``: every role alone, with all ranks on one device.

One device shows how long each part of a call takes by itself: what a rank sends and what it receives, when everything
that it waits for is there. It shows nothing of links. What is timed, and how, is said in :data:`METHOD`; the processes
that time are those of :mod:`~moelink_bench.roles`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, get_args

import torch

from moelink.errors import ConfigError
from moelink.tools.common import Progress
from moelink.tools.results import ROLES_BENCHMARK, SYMMETRIC
from moelink_bench import roles_flashinfer, roles_worker
from moelink_bench.document import run_head
from moelink_bench.names import LAYOUTS, DeviceKind, RolePresetName
from moelink_bench.peers import FLASHINFER, flashinfer_refusal
from moelink_bench.roles import RANKS, TOKENS, label
from moelink_bench.roles_process import Worker, compile_all, environment_of, own_source
from moelink_bench.roles_result import METHOD, bytes_of, comparisons, config_of, rows_of
from moelink_bench.roles_worker import Case
from moelink_bench.timing import make_clock

ROLE_PRESETS = get_args(RolePresetName)
SHARE_OF_MEMORY = 0.8
MEMORY_RULE = (
    f"a case is left out when its inputs, two sets of its outputs and its workspaces, of all ranks, take more than "
    f"{SHARE_OF_MEMORY:.0%} of the device's free memory"
)
COMPILE_SECONDS, CASE_SECONDS = 120.0, 120.0
COPY_BYTES, COPIES = 1 << 30, 20


@dataclass(frozen=True, kw_only=True)
class RolesPlan:
    """A whole run.

    Attributes:
        preset: its name.
        cases: in order; only the layouts of neighbours differ where both are measured.
        device: "cuda" (device 0) or "cpu".
        rounds: of all cases; a figure is the median of the rounds.
        peers: FlashInfer takes part.
        timeout: seconds after which no case is started.
    """

    preset: str
    cases: tuple[Case, ...]
    device: DeviceKind
    rounds: int = 2
    peers: bool = True
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError("samples", "at least 1", self.rounds)
        for case in self.cases:
            config_of(case)

    @property
    def settings(self) -> dict[str, float]:
        """The settings of the run, for its result."""
        return {"rounds": self.rounds, "timeout": self.timeout}

    @property
    def place(self) -> str:
        """The device's name for torch."""
        return "cuda:0" if self.device == "cuda" else "cpu"


def make_roles_plan(
    preset: str,
    *,
    device: DeviceKind,
    ranks: int | None = None,
    tokens: Sequence[int] = (),
    formats: Sequence[str] = (),
    layout: str | None = None,
    num_sms: Sequence[int] = (),
    rounds: int | None = None,
    peers: bool = True,
    timeout: float = 600.0,
    **sizes: int | None,
) -> RolesPlan:
    """Return a preset with some of its settings replaced.

    Args:
        ranks: number of simulated ranks, or None for the preset's.
        tokens, formats, layout: replace the preset's.
        num_sms: SM limits that are measured besides no limit.
        rounds: of all cases, or None for the preset's.
        sizes: ``hidden``, ``experts`` and ``topk``; None leaves the preset's.

    Raises:
        ConfigError: no such preset, or a value that is not acceptable.
    """
    if preset not in ROLE_PRESETS:
        raise ConfigError("preset", f"one of {', '.join(ROLE_PRESETS)}", preset)
    smoke = preset == "roles-smoke"
    fields = {"hidden": 256, "experts": 8, "topk": 2} if smoke else {}
    fields |= {name: value for name, value in sizes.items() if value is not None}
    worlds = (ranks,) if ranks is not None else (2,) if smoke else RANKS
    cases = [
        Case("roles", world, count, name, **fields, layout=one, num_sms=limit)  # type: ignore[arg-type]
        for world in worlds
        for count in tokens or ((3,) if smoke else TOKENS)
        for name in formats or ("fp8_block128",)
        for limit in (None, *num_sms)
        for one in ((layout,) if layout is not None else LAYOUTS)
    ]
    for case in cases:
        if case.tokens < 1:
            raise ConfigError("tokens", "at least 1", case.tokens)
        if case.topk > case.experts:
            raise ConfigError("topk", f"at most experts = {case.experts}", case.topk)
    given = {"rounds": rounds} if rounds is not None else {"rounds": 1} if smoke else {}
    return RolesPlan(preset=preset, cases=tuple(cases), device=device, peers=peers, timeout=timeout, **given)


def memory_of(case: Case) -> int:
    """Return about how many bytes ``case`` takes on the device, all ranks together."""
    report, wide = config_of(case).memory_report(), 2 * case.hidden
    rows: int = case.fields()["capacity"]
    inputs = (case.tokens + rows) * wide
    workspace = int(report.block + report.notes)
    drawn = 2 * rows * wide  # fp32 values of one rank, of which the inputs are made
    return case.ranks * (inputs + 2 * int(report.outputs) + workspace) + drawn


def free_memory(device: DeviceKind) -> int:
    """Return the bytes that are free on the device."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info(0)[0])
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def copy_bandwidth(device: DeviceKind) -> dict[str, Any]:
    """Measure what a copy inside the device's memory reaches, in GB/s of bytes read and bytes written."""
    size, copies = (COPY_BYTES, COPIES) if device == "cuda" else (1 << 22, 3)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    clock = make_clock(torch.device(device), flush_bytes=0)
    taken = clock.measure(functools.partial(target.copy_, source), samples=copies, warmup=2)
    del source, target
    if device == "cuda":
        torch.cuda.empty_cache()
    speed = 2 * size / median(taken) / 1e3
    how = f"median of {copies} copies of {size} bytes within the device's memory, bytes read + bytes written"
    return {"gb_per_s": speed, "method": how}


def kind_of(case: Case) -> tuple[Any, ...]:
    """Return what cases have in common of which one has its results compared."""
    return case.ranks, case.format, case.layout, case.num_sms


class Run:
    """A run under way: its answers, the omitted cases, and the first fault."""

    def __init__(self, plan: RolesPlan, progress: Progress) -> None:
        self.plan, self.progress, self.fault = plan, progress, ""
        self.left_out: dict[tuple[Case, str], str] = {}
        self.answers: dict[tuple[Case, str], list[dict[str, Any]]] = {}
        self.checked: list[str] = []
        self.hello: dict[str, Any] = {}
        self.deadline = time.monotonic() + plan.timeout
        free = free_memory(plan.device)
        for case in plan.cases:
            needed = memory_of(case)
            if needed > SHARE_OF_MEMORY * free:
                self.left_out[case, SYMMETRIC] = (
                    f"needs about {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free"
                )

    def kept(self, contender: str = SYMMETRIC) -> list[Case]:
        """Cases of ``contender`` that nothing speaks against. FlashInfer has one layout, so neighbours share a case."""
        if contender == FLASHINFER:
            cases = dict.fromkeys(replace(case, layout="rank", num_sms=None) for case in self.kept())
            return [case for case in cases if (case, contender) not in self.left_out]
        return [case for case in self.plan.cases if (case, contender) not in self.left_out]

    def due(self, contender: str, turn: int) -> Iterator[Case]:
        """Cases of ``contender`` for one round, each announced; none after a fault or when the time is over."""
        cases = self.kept(contender)
        for index, case in enumerate(cases):
            if not self.fault and time.monotonic() <= self.deadline:
                self.progress(f"{contender}, {label(case)} ({index + 1} of {len(cases)}, round {turn + 1})")
                yield case
            elif not self.fault and (case, contender) not in self.answers:
                self.left_out[case, contender] = f"no time was left of {self.plan.timeout:.0f} s"

    def ours(self, worker: Worker, turn: int) -> None:
        """One round of moelink's cases. The first one compares results with the collective transport's."""
        known: set[tuple[Any, ...]] = {kind_of(c) for c, _ in self.answers} if turn else set()
        for case in self.due(SYMMETRIC, turn):
            kind = kind_of(case)
            answer = worker.ask(case, check=kind not in known, timeout=CASE_SECONDS)
            if "OutOfMemoryError" in answer.get("error", ""):
                self.left_out[case, SYMMETRIC] = answer["error"][:200]
                continue
            if "error" not in answer and kind not in known:
                known.add(kind)
                collective = replace(case, kind="bits", transport="collective", num_sms=None)
                truth = worker.ask(collective, check=True, timeout=CASE_SECONDS)
                if truth.get("checksum") != answer["checksum"]:
                    said = truth.get("error", f"{answer['checksum']} is not {truth.get('checksum')}")
                    answer = {"error": f"other bits than the collective transport: {said}"}
                self.checked.append(f"{label(case)}: the same bits as the collective transport")
            if "error" in answer:
                self.fault = f"{label(case)}: {answer['error']}"
                continue
            answer["bytes"] = bytes_of(case, answer["counts"], self.plan.device)
            self.answers.setdefault((case, SYMMETRIC), []).append(answer)

    def theirs(self, worker: Worker, turn: int) -> None:
        """One round of FlashInfer's cases."""
        for case in self.due(FLASHINFER, turn):
            answer = worker.ask(case, check=True, timeout=CASE_SECONDS)
            if "error" in answer:
                self.left_out[case, FLASHINFER] = answer["error"][:300]
            else:
                self.answers.setdefault((case, FLASHINFER), []).append(answer)

    def measure(self) -> str:
        """Measure everything. Returns why FlashInfer took no part, or ""."""
        plan, environment = self.plan, environment_of(own_source(), self.plan.device)
        own = Worker("moelink", roles_worker.__file__, plan.place, environment)
        refusal = "" if plan.peers else "left out by --no-peers"
        if not refusal:
            refusal = flashinfer_refusal() if plan.device == "cuda" else "runs on CUDA devices only"
        peer = Worker("FlashInfer", roles_flashinfer.__file__, plan.place, environment)
        try:
            if plan.device == "cuda":
                self.progress("compiling")
                compile_all([own], self.kept(), min(COMPILE_SECONDS, plan.timeout / 2))
            self.hello = own.start(CASE_SECONDS)
            for turn in range(plan.rounds):
                self.ours(own, turn)
            if not refusal and not self.fault:
                try:
                    peer.start(CASE_SECONDS)
                    for turn in range(plan.rounds):
                        self.theirs(peer, turn)
                except RuntimeError as error:
                    refusal = str(error)
        except RuntimeError as error:
            self.fault = str(error)
        finally:
            own.stop()
            peer.stop()
        return refusal


def run_roles(
    plan: RolesPlan, *, commit: str | None = None, command: str = "", progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Run ``plan`` on one device and return its document. One whose ``gate.passed`` is false has no figures."""
    progress("measuring the device's bandwidth")
    bandwidth = copy_bandwidth(plan.device)
    run = Run(plan, progress)
    refusal = run.measure()
    gate = {"passed": not run.fault, "fault": run.fault, "checked": run.checked}
    document = run_head(ROLES_BENCHMARK, plan, [run.hello.get("device", plan.device)], gate, command, commit)
    if run.fault:
        return document
    rows = rows_of(run.answers, bandwidth["gb_per_s"])
    reasons = [{"case": label(case), "contender": name, "reason": why} for (case, name), why in run.left_out.items()]
    if refusal:
        reasons.append({"case": "all cases", "contender": FLASHINFER, "reason": refusal})
    return {
        **document, "method": METHOD, "memory_rule": MEMORY_RULE, "bandwidth": bandwidth, "rows": rows,
        "left_out": reasons, "comparisons": comparisons(rows),
    }  # fmt: skip
