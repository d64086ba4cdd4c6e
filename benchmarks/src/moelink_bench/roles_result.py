"""Rows of the preset ``roles``, and how they compare: made of the answers of the processes that time.

A process that measures may have an older package (:mod:`~moelink_bench.roles`), so it only counts
(``roles_worker.counts_of``) what bytes follow from here. Which rows a combine leaves where they are is known here, by
the package of the program itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from moelink.config import EPConfig
from moelink.kernels.launch.own_rows import own_rows_stay
from moelink.memory.workspace import Workspace
from moelink.tools.results import SYMMETRIC
from moelink_bench.peers import FLASHINFER
from moelink_bench.roles_worker import LAYOUT, ROLES, Case

PARTS: Mapping[str, tuple[str, ...]] = {"dispatch": ROLES[:2], "combine": ROLES[2:]}
"""Roles of moelink whose times are compared with a phase of FlashInfer's, which has no split form."""

METHOD = (
    "W ranks are simulated on one device, in split form. A role's launches of all ranks are one CUDA graph on one "
    "stream, so that a role runs alone and finds everything it waits for; its time is that of a replay / W, in "
    "microseconds, the median of the rounds' medians. The receiver's graph includes the launch that lays out scales, "
    "where there is one; `scale layout` is that launch alone, between events around an eager launch. FlashInfer has "
    "one kernel a phase; the flags it waits for are written before, outside of what is timed, and its ranks' launches "
    "overlap (programmatic dependent launch, its default). bytes: the least that the role of one rank reads and "
    "writes in device memory, computed from the routing (own rows that stay in a combine are read once, by the home "
    "role); share: bytes / time / bandwidth. A small case lies in the second-level cache, so its share can exceed 1. "
    "Nothing crosses a link"
)


def rows_of(answers: Mapping[tuple[Case, str], Sequence[Mapping[str, Any]]], gb_per_s: float) -> list[dict[str, Any]]:
    """Return a row for each role of each case and contender.

    Args:
        answers: of every round, by case and contender.
        gb_per_s: the device's bandwidth.
    """
    rows = []
    for (case, contender), rounds in answers.items():
        order = (*ROLES, LAYOUT) if contender == SYMMETRIC else tuple(PARTS)
        for role in (name for name in order if name in rounds[0]["times"]):
            times = [answer["times"][role] for answer in rounds]
            moved = int(rounds[0]["bytes"][role])
            if role == ROLES[1] and LAYOUT in rounds[0]["times"]:
                moved += int(rounds[0]["bytes"][LAYOUT])  # its graph includes that launch
            us = median(times)
            rows.append({
                "contender": contender, "layout": case.layout, "role": role, "W": case.ranks, "tokens": case.tokens,
                "format": case.format, "hidden": case.hidden, "experts": case.experts, "topk": case.topk,
                "num_sms": case.num_sms, "us": round(us, 3), "rounds": [round(each, 3) for each in times],
                "bytes": moved, "share": round(moved / us / 1e3 / gb_per_s, 4),
            })  # fmt: skip
    return rows


KEYS = ("W", "tokens", "format", "hidden", "experts", "topk", "num_sms")


def comparisons(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each case and phase that FlashInfer has, its time beside the sum of moelink's roles, by layout.

    ``ratio`` is FlashInfer's time / moelink's. Layout "rank" is the like-for-like comparison.
    """
    times: dict[tuple[Any, ...], dict[tuple[str, str, str], float]] = {}
    for row in rows:
        case = tuple(row[key] for key in KEYS)
        times.setdefault(case, {})[row["contender"], row["layout"], row["role"]] = row["us"]
    found = []
    for case, of_case in times.items():
        for phase, roles in PARTS.items():
            theirs = of_case.get((FLASHINFER, "rank", phase))
            for layout in ("rank", "expert"):
                ours = [of_case.get((SYMMETRIC, layout, role)) for role in roles]
                if theirs is not None and None not in ours:
                    total = sum(us for us in ours if us is not None)
                    found.append({
                        **dict(zip(KEYS, case, strict=True)), "phase": phase, "layout": layout,
                        "ours": round(total, 3), "theirs": theirs, "ratio": round(theirs / total, 4),
                    })  # fmt: skip
    return found


def config_of(case: Case) -> EPConfig:
    """Return the configuration of rank 0. Raises ConfigError where the case is none."""
    fields = {name: value for name, value in case.fields().items() if name not in ("transport", "timeout")}
    return EPConfig(**fields, rank=0, world_size=case.ranks)


def bytes_of(case: Case, counts: Mapping[str, int], device: str) -> dict[str, int]:
    """Return the bytes of each of ``roles_worker.ROLES``, and of the launch that lays out scales.

    A message is a token's payload for one rank that has any of its experts, its own included. Layout "rank" keeps
    messages as rows. Where rows of own tokens stay (``kernels.combine.own_rows``), combine's sender neither loads nor
    stores them, and its home role loads them as they are.

    Args:
        case: what was measured.
        counts: of one rank, averaged over ranks: ``messages``; ``own_messages``, those from the rank to itself;
            ``rows``, received; ``own_rows``, those of own tokens; and the bytes of one ``row`` with scales, of which
            ``scale``.
        device: "cpu", "cuda" or "cuda:N".
    """
    wide, row = 2 * case.hidden, counts["row"]
    messages, rows = counts["messages"], counts["rows"]
    stay = own_rows_stay(Workspace(config_of(case)), torch.device(device), sums=True)
    own_messages, own_rows = (counts["own_messages"], counts["own_rows"]) if stay else (0, 0)
    sums = messages - own_messages
    return {
        ROLES[0]: case.tokens * wide + messages * row,
        ROLES[1]: messages * row + rows * row,
        ROLES[2]: (rows - own_rows + sums) * wide,
        ROLES[3]: (sums + own_rows + case.tokens) * wide,
        LAYOUT: 2 * rows * counts["scale"],
    }


COLUMNS = (*ROLES, LAYOUT, *PARTS)


def tables(document: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return (title, heads, lines) for each contender, layout, number of ranks and format of a document.

    A line has the tokens, then ``"8.5 (13 %)"`` for each role: microseconds, and the share of the bandwidth.
    """
    groups: dict[tuple[Any, ...], dict[int, dict[str, str]]] = {}
    for row in document["rows"]:
        group = (row["W"], row["contender"], row["layout"], row["format"], row.get("num_sms"))
        of_group = groups.setdefault(group, {})
        of_group.setdefault(row["tokens"], {})[row["role"]] = f"{row['us']:.1f} ({100 * row['share']:.0f} %)"
    found = []
    for (world, contender, layout, name, limit), of_group in sorted(groups.items(), key=lambda item: item[0][:1]):
        heads = [role for role in COLUMNS if any(role in cells for cells in of_group.values())]
        lines = [[str(tokens), *(cells.get(role, "–") for role in heads)] for tokens, cells in of_group.items()]
        within = "" if limit is None else f", {limit} SMs"
        found.append((f"W = {world}, {contender}, layout {layout}, {name}{within}", ["tokens", *heads], lines))
    return found


def comparison_lines(document: Mapping[str, Any]) -> list[str]:
    """Return a line for each comparison with FlashInfer, and for each thing that was left out."""
    lines = [
        f"W = {one['W']}, {one['tokens']} tokens, {one['format']}, {one['phase']}, layout {one['layout']}: "
        f"{one['ours']:.1f} µs against {one['theirs']:.1f} µs of FlashInfer, {one['ratio']:.2f} times as fast"
        for one in document["comparisons"]
    ]
    return lines + [f"{one['contender']} left out ({one['case']}): {one['reason']}" for one in document["left_out"]]
