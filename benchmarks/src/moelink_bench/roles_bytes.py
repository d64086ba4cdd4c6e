"""Bytes that each role of one rank reads and writes in device memory at the least, from what its process counted.

A process that measures may have an older package (:mod:`~moelink_bench.roles`), so it only counts
(``roles_worker.counts_of``). Which rows a combine leaves where they are is known here, by the package of the program
itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moelink.config import EPConfig
from moelink.kernels.launch.own_rows import own_rows_stay
from moelink.memory.workspace import Workspace
from moelink_bench.roles_worker import LAYOUT, ROLES, Case


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
