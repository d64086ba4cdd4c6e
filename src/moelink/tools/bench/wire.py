"""Bytes that must cross links, by formula: the yardstick that times are held against.

Legend: ``M[s][d]`` messages from rank s to rank d, one per (token, destination rank); ``m`` bytes of a message; ``r``
bytes of a row on its way home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moelink.routing import ExpertMap, plan_sends
from moelink.tools.bench.presets import Case

FORMULA = (
    "dispatch: m bytes for each (token, remote rank that has at least one of its experts), m = payload + scales + "
    "token number + ids + weights, each part padded to 16 bytes; combine: hidden_size * 2 bytes (bf16) for each of the "
    "same pairs, the other way. A rank's link carries what leaves it in one direction and what reaches it in the "
    "other; the busiest of all links and directions counts. Signals and counts are left out"
)


@dataclass(frozen=True)
class WireBytes:
    """Bytes per call between ranks, the mean over the rotated inputs.

    Attributes:
        total: out of all ranks together.
        busiest: over the busiest direction of the busiest rank's link.
        per_message: of one message, or of one row on its way home.
    """

    total: float
    busiest: float
    per_message: int

    def microseconds(self, gb_per_s: float) -> float:
        """Time of the busiest link at ``gb_per_s`` (10**9 bytes a second)."""
        return self.busiest / gb_per_s / 1e3


def count_messages(topk_ids: Tensor, case: Case, world_size: int) -> list[int]:
    """Messages that a rank with ``topk_ids`` [tokens, topk] sends to each rank, itself included.

    Example: 4 experts on 2 ranks, ids [[0, 1], [1, 2], [3, 3]]: two tokens go to rank 0, two to rank 1: ``[2, 2]``.
    """
    counts: list[int] = plan_sends(topk_ids, ExpertMap(case.num_experts, world_size)).counts.tolist()
    return counts


def wire_bytes(messages: Sequence[Sequence[Sequence[int]]], per_message: int) -> WireBytes:
    """Bytes of dispatch from ``messages[source][copy][destination]``, one entry per rotated input.

    Combine is the same with source and destination exchanged, which leaves the busiest direction as it is: pass its
    bytes per row.

    Example: one input, two ranks, messages [[5, 3], [4, 9]] of 10 bytes: 30 bytes one way, 40 the other; 70 in total,
    40 on the busiest.
    """
    ranks, copies = len(messages), len(messages[0])
    total = busiest = 0
    for copy in range(copies):
        out = [sum(messages[s][copy][d] for d in range(ranks) if d != s) for s in range(ranks)]
        into = [sum(messages[s][copy][d] for s in range(ranks) if s != d) for d in range(ranks)]
        total += sum(out)
        busiest += max(*out, *into)
    return WireBytes(total * per_message / copies, busiest * per_message / copies, per_message)


def dispatch_message_bytes(case: Case, world_size: int) -> int:
    """m of the formula."""
    return case.ep_config(0, world_size).dispatch_message.nbytes


def combine_row_bytes(case: Case, world_size: int) -> int:
    """r of the formula."""
    return case.ep_config(0, world_size).combine_row_bytes
