"""Figures of libraries that do not run here, as their source states them, to stand beside results.

They come from other machines, with other numbers of ranks and other ways to measure, so they take part in no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moelink_bench.presets import Case


@dataclass(frozen=True)
class Published:
    """One figure.

    Attributes:
        system: the library.
        hardware: what it ran on.
        ranks: how many.
        tokens: tokens per rank.
        dispatch, combine: as stated, with their unit.
        conditions: what differs from a case of ``moelink bench`` with the same tokens.
        source: where it stands.
    """

    system: str
    hardware: str
    ranks: int
    tokens: int
    dispatch: str
    combine: str
    conditions: str
    source: str


_H20 = (
    "384 experts, top-8, hidden size 7168, fp8 dispatch, bf16 combine; profiler times of the dispatch and the combine "
    "kernel on the slowest rank, without launches; results were not checked in that run"
)
_H20_SOURCE = (
    "github.com/openinfer-project/openinfer, docs/benchmarks/deepep-v2-vs-pplx-moe-backend.md, commit 5f5aef9, "
    "DeepEP 723716f"
)
_README = "github.com/deepseek-ai/DeepEP, README.md, commit 0297fc8"
_README_CONDITIONS = (
    "hidden size 7168, top-8, fp8 dispatch, bf16 combine; logical bandwidth, which counts what stays on a rank"
)

DEEPEP_V2: tuple[Published, ...] = (
    *(
        Published("DeepEP V2", "8 × H20-3e", 8, tokens, f"{dispatch:.1f} µs", f"{combine:.1f} µs", _H20, _H20_SOURCE)
        for tokens, dispatch, combine in (
            (1, 14.621, 10.025), (8, 14.749, 10.467), (32, 17.272, 16.684), (128, 32.042, 42.672),
            (256, 50.735, 71.921),
        )
    ),
    *(
        Published(
            "DeepEP V2", f"8 × SM100 over NVLink, {sms} SMs", 8, 8192, f"{dispatch} GB/s", f"{combine} GB/s",
            _README_CONDITIONS, _README,
        )
        for sms, dispatch, combine in ((64, 726, 740), (24, 643, 675))
    ),
)  # fmt: skip
"""Its own README has no time of 8 Hopper GPUs; the times are another project's measurement of it."""


def beside(cases: Sequence[Case]) -> tuple[Published, ...]:
    """Return what was published for the sizes of ``cases``: fp8_block128, hidden size 7168, top-8, uniform routing."""
    tokens = {
        case.tokens
        for case in cases
        if (case.hidden_size, case.topk, case.format, case.distribution) == (7168, 8, "fp8_block128", "uniform")
        and case.num_sms is None
    }
    return tuple(one for one in DEEPEP_V2 if one.tokens in tokens)


def published_lines(published: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences about the ``published`` figures of a document, one for each source.

    Example: ``"As published, not measured here: DeepEP V2 on 8 × H20-3e, dispatch / combine of 1 token 14.6 µs /
    10.0 µs (conditions; source)"``.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for one in published:
        tokens = f"{one['tokens']} token{'s' * (one['tokens'] != 1)}"
        key = (one["system"], one["hardware"], one["conditions"], one["source"])
        groups.setdefault(key, []).append(f"{tokens} {one['dispatch']} / {one['combine']}")
    return [
        f"As published, not measured here: {system} on {hardware}, dispatch / combine of {'; '.join(figures)} "
        f"({conditions}; {source})"
        for (system, hardware, conditions, source), figures in groups.items()
    ]
