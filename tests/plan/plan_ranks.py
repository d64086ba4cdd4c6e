"""Ranks whose traffic a plan is held against, and a document of the bench as its schema has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import moelink


def send_and_return(rank: int, world_size: int, fields: dict[str, Any], ids: np.ndarray) -> tuple[int, int, int]:
    """Dispatch ``ids`` [tokens, topk] and combine; bytes sent in each phase, and messages received from other ranks."""
    with moelink.init(**fields) as ep:
        x = torch.randn(len(ids), fields["hidden_size"]).to(torch.bfloat16)
        recv = ep.dispatch(x, torch.from_numpy(ids), torch.ones(ids.shape))
        ep.combine(torch.zeros(recv.tokens.shape[0], fields["hidden_size"], dtype=torch.bfloat16), recv)
        traffic = ep.traffic()
        info = recv.src_info[recv.src_info[:, 0] >= 0][: int(recv.num_recv_tokens)]
        pairs = {(int(source), int(token)) for source, token, _ in info if int(source) != rank}
        return traffic.dispatch, traffic.combine, len(pairs)


def bench_document(ranks: int, times: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """What ``moelink bench`` writes, as far as a plan reads it.

    Each entry of ``times``: tokens, format, phase to microseconds, and optionally distribution and contender.
    """
    cases, rows = [], []
    for index, entry in enumerate(times):
        case = {
            "tokens": entry["tokens"], "hidden_size": 7168, "num_experts": 256, "topk": 8,
            "format": entry.get("format", "fp8_block128"), "distribution": entry.get("distribution", "uniform"),
            "num_sms": entry.get("num_sms"),
        }  # fmt: skip
        cases.append({"index": index, "case": case})
        phases = {
            phase: {"graph": {"median": entry[phase]}, "eager": {"median": 10 * entry[phase]}, "kernel": None}
            for phase in ("dispatch", "combine")
        }
        contender = entry.get("contender", "moelink symmetric")
        rows.append({"case": index, "contender": contender, "reason": "", "phases": phases})
        rows.append({"case": index, "contender": "somebody else", "reason": "", "phases": phases})
    return {
        "schema_version": 1, "benchmark": "moelink bench", "date": "2026-01-02", "commit": "c0ffee", "device": "cuda",
        "devices": ["Some GPU"] * ranks, "ranks": ranks, "gate": {"passed": True}, "cases": cases, "rows": rows,
        **changes,
    }  # fmt: skip
