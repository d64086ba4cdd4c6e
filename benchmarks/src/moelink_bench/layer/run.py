"""Run the benchmark of the layer: the program of each rank, its gate and its clock, and the document of a run.

A rank draws the weights of a shape once. All contenders share them; each is compared with the truth before it is
timed. Libraries that may take a process down, or set torch's symmetric memory, run in processes of their own.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moelink.errors import ConfigError
from moelink.tools.common import Progress
from moelink_bench.contenders import compile_calls
from moelink_bench.document import device_names
from moelink_bench.layer.contenders import (
    Given,
    LayerContender,
    MoelinkLayer,
    Setting,
    moelink_maker,
    run_parts,
)
from moelink_bench.layer.data import LayerInput, make_inputs, make_weights, truth, worst_error
from moelink_bench.layer.peers import (
    DEEP_GEMM,
    DEEP_GEMM_PRODUCTS,
    EXCHANGE,
    EXCHANGE_FP8,
    FLASHINFER_FP8,
    FLASHINFER_LAYER,
    TRANSFORMERS,
    DeepGemmLayer,
    DeepGemmProducts,
    ExchangeFp8Layer,
    ExchangeLayer,
    FlashInferFp8Layer,
    FlashInferLayer,
    TransformersLayer,
    deep_gemm_refusal,
)
from moelink_bench.layer.plan import FORMATS, LayerPlan, Shape
from moelink_bench.layer.result import layer_document
from moelink_bench.measure import PhaseSamples, measure_contender
from moelink_bench.peers import flashinfer_refusal
from moelink_bench.presets import Settings
from moelink_bench.ranks import CALL_TIMEOUT, Note, joined, reports_of, run_apart, teller
from moelink_bench.report import RankReport, RankRow
from moelink_bench.timing import Captured, Clock, attempt, everyone, first_fault, host_barrier

MAKERS: Mapping[str, Callable[[Setting], LayerContender]] = MappingProxyType({
    **{f"moelink {fmt}": moelink_maker(fmt) for fmt in FORMATS},
    TRANSFORMERS: TransformersLayer,
    EXCHANGE: ExchangeLayer,
    EXCHANGE_FP8: ExchangeFp8Layer,
    FLASHINFER_LAYER: FlashInferLayer,
    FLASHINFER_FP8: FlashInferFp8Layer,
    DEEP_GEMM_PRODUCTS: DeepGemmProducts,
    DEEP_GEMM: DeepGemmLayer,
})  # fmt: skip
"""Every contender, in the order of tables."""
APART: Mapping[str, Callable[[], str]] = MappingProxyType({
    DEEP_GEMM: deep_gemm_refusal,
    FLASHINFER_FP8: flashinfer_refusal,
    DEEP_GEMM_PRODUCTS: deep_gemm_refusal,
    FLASHINFER_LAYER: flashinfer_refusal,
})  # fmt: skip
"""Contenders that run in processes of their own, each in others, and the function that says why one cannot, or "". The
fastest ones come first, for runs that end at a limit of time."""


def takes_part(plan: LayerPlan) -> tuple[str, ...]:
    """Return the names of the contenders of ``plan``. Raises ConfigError where one is not known."""
    for name in plan.contenders or ():
        if name not in MAKERS:
            raise ConfigError("contender", f"one of {', '.join(MAKERS)}", name)
    names = MAKERS if plan.contenders is None else plan.contenders
    return tuple(name for name in MAKERS if name in names and (plan.peers or name.startswith("moelink")))


def layer_main(rank: int, world_size: int, plan: LayerPlan, progress: str = "") -> list[RankReport]:
    """Run all cases; every rank returns the reports of all.

    The program of ``world_size`` processes. Rank 0 appends a line per step to the file ``progress``, if one is named.
    """
    say = teller(rank, progress)
    with joined(rank, plan.device, flush_bytes=plan.flush_bytes, timeout=plan.timeout) as clock, torch.no_grad():
        report = RankReport(device_names(plan.device)[0])
        for shape, most in plan.shapes().items():
            say(f"{shape.model}: weights")
            made, reason = attempt(functools.partial(
                make_weights, shape, seed=plan.settings.seed, rank=rank, world_size=plan.ranks, device=clock.device,
            ))  # fmt: skip
            if made is None:
                report = replace(report, rows=(*report.rows, *absent_rows(plan, shape, reason)))
                continue
            report = run_shape(report, Setting(plan, shape, made, most, rank, clock.device, CALL_TIMEOUT), clock, say)
            del made
            gc.collect()
            if plan.device == "cuda":
                torch.cuda.empty_cache()
            if report.gate:
                break
        return [RankReport.decode(said) for said in everyone(asdict(report))]


def absent_rows(plan: LayerPlan, shape: Shape, reason: str) -> list[RankRow]:
    """Rows of all contenders for all cases of ``shape``, which could not be made."""
    cases = [index for index, case in enumerate(plan.cases) if case.shape == shape]
    return [RankRow(index, name, reason=reason) for index in cases for name in takes_part(plan)]


def run_shape(report: RankReport, at: Setting, clock: Clock, say: Callable[[str], None]) -> RankReport:
    """Run all cases of one shape, and return ``report`` with its rows, or with what is wrong."""
    cases = [(index, case) for index, case in enumerate(at.plan.cases) if case.shape == at.shape]
    rows: list[RankRow] = []
    open_: dict[str, LayerContender] = {}
    try:
        for name in takes_part(at.plan):
            say(f"{at.shape.model}: opening {name}")
            made, reason = attempt(lambda name=name: MAKERS[name](at))  # type: ignore[misc]
            if made is None:
                rows += [RankRow(index, name, reason=reason) for index, _ in cases]
                continue
            open_[name] = made
            if isinstance(made, MoelinkLayer) and made.capturable and at.plan.ranks > 1:
                # No rank waits in a call for one that compiles.
                compile_calls(made.ep, bounds=[case.tokens for _, case in cases])
                host_barrier()
        for index, case in cases:
            say(f"{case.label} ({index + 1} of {len(at.plan.cases)})")
            inputs = make_inputs(case, at.plan.settings, rank=at.rank, device=at.device)
            truths, reason = attempt(lambda given=inputs[0]: _truths(list(open_.values()), given, at))  # type: ignore[misc]
            if truths is None:
                rows += [RankRow(index, name, reason=f"no truth: {reason}") for name in open_]
                continue
            for name, contender in open_.items():
                row, fault = run_contender(
                    contender, inputs, truths[contender.fmt, contender.fp8_experts], at.plan.settings, clock
                )
                if fault and name.startswith("moelink"):
                    return replace(report, gate=f"{case.label}: {name}: {fault}", rows=())
                rows.append(replace(row, case=index))
    finally:
        for contender in open_.values():
            contender.close()
    return replace(report, rows=(*report.rows, *in_order(rows)))


def in_order(rows: Iterable[RankRow]) -> list[RankRow]:
    """Sort rows by case, and by contender as tables have them."""
    order = list(MAKERS)
    return sorted(rows, key=lambda row: (row.case, order.index(row.contender)))


def _truths(contenders: Sequence[LayerContender], given: LayerInput, at: Setting) -> dict[tuple[str, bool], Tensor]:
    """The truth of one input for every way in which contenders round."""
    kinds = dict.fromkeys((contender.fmt, contender.fp8_experts) for contender in contenders)
    return {
        (fmt, fp8): truth(given, at.shape, fmt=fmt, seed=at.plan.settings.seed, fp8_experts=fp8) for fmt, fp8 in kinds
    }


def run_contender(
    contender: LayerContender, inputs: Sequence[LayerInput], want: Tensor, settings: Settings, clock: Clock
) -> tuple[RankRow, str]:
    """Compare a contender with the truth of the first input, and time it if it is right. Collective.

    Returns:
        Its row, and what is wrong with its output on any rank, or "".
    """
    row = RankRow(0, contender.name, contender.note)
    error, reason = attempt(lambda: wrong_by(contender, inputs[0], want))
    if error is None:
        return replace(row, reason=reason), ""
    row = replace(row, error=error if math.isfinite(error) else None)  # JSON knows no infinity
    fault = first_fault(_fault("its output", error, contender))
    if fault:
        return replace(row, reason=f"not timed: {fault}"), fault
    timed, reason = attempt(lambda: time_layer(contender, inputs, want, settings, clock))
    if timed is None:
        return replace(row, reason=reason), ""
    phases, fault = timed
    fault = first_fault(fault)
    return (replace(row, reason=fault) if fault else replace(row, phases=phases)), fault


def _fault(what: str, error: float, contender: LayerContender) -> str:
    """The fault of an output of this error, or "". NaN is wrong."""
    if error <= contender.tolerance:
        return ""
    return f"{what} is wrong by {error:.3g} of its length, more than the {contender.tolerance:g} of roundings"


def wrong_by(contender: LayerContender, given: LayerInput, want: Tensor) -> float:
    """Return the error of the layer, or of the chain of its parts where that is larger. NaN counts as infinite."""
    outputs = [contender.layer(given)]
    if contender.parts():
        outputs.append(run_parts(contender.parts(), given))
    contender.check()
    errors = [worst_error(out, want) for out in outputs]
    return max(math.inf if math.isnan(error) else error for error in errors)


def time_layer(
    contender: LayerContender, inputs: Sequence[LayerInput], want: Tensor, settings: Settings, clock: Clock
) -> tuple[dict[str, PhaseSamples], str]:
    """Measure the layer whole and in parts; return the samples, and what is wrong with a replayed output, or "".

    Collective. A sample has a call of each input. The first input was computed before.
    """

    def judge(graph: Captured) -> str:
        return _fault("the output of a replayed graph", worst_error(graph.results[0], want), contender)

    measured = measure_contender(
        Given(contender, inputs), copies=len(inputs), clock=clock, judge=judge, eager_samples=settings.host_samples,
        settings=replace(settings, calls=len(inputs), host_calls=len(inputs)),
    )  # fmt: skip
    contender.check()
    return dict(measured.phases), measured.fault


def run_layer_bench(
    plan: LayerPlan, *, commit: str | None = None, command: str = "", progress: Progress = lambda _: None,
    note: Note = lambda _: None,
) -> dict[str, Any] | None:  # fmt: skip
    """Run ``plan`` and return its document; None on all ranks but 0 when a launcher (torchrun) started this process.

    ``note`` is given the document so far before each contender that runs in processes of its own.

    Without a launcher, ranks are processes of this call. A document whose ``gate.passed`` is false has no figures.

    Raises:
        ConfigError: the launcher started another number of ranks, a contender is not known, or none takes part.
        RankFailedError, RankHungError: a rank broke or did not end in time.
    """
    chosen = takes_part(plan)
    if not chosen:
        raise ConfigError("contender", "one of moelink's without other libraries", ", ".join(plan.contenders or ()))
    inside = replace(plan, contenders=tuple(name for name in chosen if name not in APART))
    reports, absent = reports_of(layer_main, inside, progress)
    if reports is None:
        return None
    for name in APART:
        if name in chosen and not any(report.gate for report in reports):
            note(layer_document(plan, reports, commit=commit, command=command))
            why = absent or (APART[name]() if plan.device == "cuda" else "runs on CUDA devices only")
            reports = _with_rows_of(name, plan, reports, why, progress)
    return layer_document(plan, reports, commit=commit, command=command)


def _with_rows_of(
    name: str, plan: LayerPlan, reports: Sequence[RankReport], absent: str, progress: Progress
) -> list[RankReport]:
    """Return ``reports`` with the rows of a contender of :data:`APART`; an error becomes the reason of its rows."""
    found: list[list[RankReport]] = []
    if not absent:
        progress(name)
        found, absent = run_apart(layer_main, replace(plan, contenders=(name,)))
    rows = [RankRow(index, name, reason=absent) for index in range(len(plan.cases))]
    theirs = [report.rows for report in found[0]] if found else [rows] * len(reports)
    return [
        replace(report, rows=tuple(in_order((*report.rows, *mine))))
        for report, mine in zip(reports, theirs, strict=True)
    ]
