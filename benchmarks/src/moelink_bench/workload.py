"""Inputs that rotate, and the bytes that they put on the wire.

Enough inputs rotate that none is still in the second-level cache when its turn comes again. Every input is a function
of (seed, rank, copy), so that processes which never meet measure the same data.

Legend: ``M[s][d]`` messages from rank s to rank d, one per (token, destination rank); ``m`` bytes of a message; ``r``
bytes of a row on its way home.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moelink.arith import align_up
from moelink.formats import get_format
from moelink.routing import ExpertMap, plan_sends
from moelink_bench.presets import Case, Settings

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
    """Count the messages that a rank with ``topk_ids`` [tokens, topk] sends to each rank, itself included.

    Example: 4 experts on 2 ranks, ids [[0, 1], [1, 2], [3, 3]]: two tokens go to rank 0, two to rank 1: ``[2, 2]``.
    """
    counts: list[int] = plan_sends(topk_ids, ExpertMap(case.num_experts, world_size)).counts.tolist()
    return counts


def wire_bytes(messages: Sequence[Sequence[Sequence[int]]], per_message: int) -> WireBytes:
    """Compute the bytes of dispatch from ``messages[source][copy][destination]``, one entry per rotated input.

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
    """Return m of the formula."""
    return case.ep_config(0, world_size).dispatch_message.nbytes


def combine_row_bytes(case: Case, world_size: int) -> int:
    """Return r of the formula."""
    return case.ep_config(0, world_size).combine_row_bytes


CAPACITY_MARGIN = 1.25
"""Rows allocated for outputs, relative to the most that any rank receives from any of the rotated inputs."""


@dataclass(frozen=True)
class Batch:
    """One rank's input of one call.

    Attributes:
        x: [tokens, hidden_size] bf16.
        topk_ids: [tokens, topk] int32.
        topk_weights: [tokens, topk] fp32, positive, their sum is 1 for each token.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


def rows_to_dispatch(case: Case, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the rows to dispatch for ``x``: ``x`` alone, or its payload and row-major scales where ``quantised``."""
    if not case.quantised:
        return x, None
    made = get_format(case.format).quantize(x)
    return made.payload, made.scales


@dataclass(frozen=True)
class Workload:
    """One rank's rotating inputs.

    Attributes:
        case: of the inputs.
        batches: one per copy; call i uses ``batches[i % len(batches)]``.
        rows: per copy, what dispatch is given for ``x`` of its batch: :func:`rows_to_dispatch`.
        capacity: rows of every dispatch output, the same on all ranks.
        y: per copy [capacity, hidden_size] bf16, what the experts made of the rows. Their values are arbitrary. With
            ``zero_copy`` [world_size, tokens, hidden_size].
    """

    case: Case
    batches: tuple[Batch, ...]
    rows: tuple[tuple[Tensor, Tensor | None], ...]
    capacity: int
    y: tuple[Tensor, ...]

    @property
    def copies(self) -> int:
        """Number of rotated inputs."""
        return len(self.batches)


def num_copies(case: Case, settings: Settings) -> int:
    """Return how many inputs rotate: one per call, fewer where ``rotation_bytes`` pass sooner, at least 3.

    Example: 20 calls and 120 MB: 1 token of 14336 bytes rotates 20 inputs, 4096 tokens (58.7 MB) rotate 3.
    """
    each = case.tokens * case.hidden_size * 2
    return min(settings.calls, max(3, math.ceil(settings.rotation_bytes / each)))


def _generator(seed: int, rank: int, copy: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(((seed * 1009 + copy) * 1013 + rank) * 2 + 1)


def draw_ids(case: Case, generator: torch.Generator, world_size: int) -> Tensor:
    """Draw [tokens, topk] int32 ids of the case's distribution, on the CPU, distinct in a token if possible.

    With one rank's experts fewer than ``topk``, "one-rank" repeats them.
    """
    experts = (
        ExpertMap(case.num_experts, world_size).num_local(0) if case.distribution == "one-rank" else case.num_experts
    )
    shape = (case.tokens, case.topk)
    if case.topk > experts:
        return torch.randint(0, experts, shape, generator=generator).int()
    # The largest of log p + Gumbel noise are a draw without replacement with probabilities p.
    uniform = torch.rand(case.tokens, experts, generator=generator).clamp_min(1e-20)
    scores = -torch.log(-torch.log(uniform))
    if case.distribution == "zipf":
        scores -= torch.log(torch.arange(1, experts + 1, dtype=torch.float32))
    return scores.topk(case.topk, dim=-1).indices.int()


def rank_ids(case: Case, *, seed: int, rank: int, copy: int, world_size: int) -> Tensor:
    """Draw the ids [tokens, topk] int32, on the CPU, of input ``copy`` of ``rank``."""
    return draw_ids(case, _generator(seed, rank, copy, torch.device("cpu")), world_size)


def rank_batch(case: Case, *, seed: int, rank: int, copy: int, world_size: int, device: torch.device) -> Batch:
    """Draw input ``copy`` of ``rank``. Activations are drawn on ``device``: equal for equal kinds of device."""
    ids = rank_ids(case, seed=seed, rank=rank, copy=copy, world_size=world_size)
    generator = _generator(seed, rank, copy, device)
    x = torch.randn(case.tokens, case.hidden_size, generator=generator, device=device, dtype=torch.bfloat16)
    weights = torch.rand(case.tokens, case.topk, generator=generator, device=device) + 0.1
    return Batch(x, ids.to(device), weights / weights.sum(-1, keepdim=True))


def rows_needed(case: Case, *, seed: int, copies: int, world_size: int) -> int:
    """Return the most rows, padding of groups included, that any rank receives from any of the inputs.

    Example: 2 ranks, 4 experts, 3 tokens of topk 1, rank 0's tokens all on expert 0 and rank 1's on expert 2: rank 0
    receives 3 rows and rank 1 too; with groups of 4 rows (fp8_block128) each needs 4. In layout "rank" rows are
    messages, in groups of no least size: 3.
    """
    if case.layout == "rank":
        return max(_messages_received(case, seed=seed, copy=copy, world_size=world_size) for copy in range(copies))
    config = case.ep_config(0, world_size)
    experts, most = ExpertMap(case.num_experts, world_size), 0
    for copy in range(copies):
        counts = torch.zeros(case.num_experts, dtype=torch.int64)
        for rank in range(world_size):
            ids = rank_ids(case, seed=seed, rank=rank, copy=copy, world_size=world_size)
            counts += torch.bincount(ids.flatten(), minlength=case.num_experts)
        aligned = [align_up(int(count), config.row_alignment) for count in counts]
        for rank in range(world_size):
            first = experts.first(rank)
            most = max(most, sum(aligned[first : first + experts.num_local(rank)]))
    return most


def _messages_received(case: Case, *, seed: int, copy: int, world_size: int) -> int:
    """Return the most messages that any rank receives from input ``copy`` of all ranks."""
    drawn = (rank_ids(case, seed=seed, rank=rank, copy=copy, world_size=world_size) for rank in range(world_size))
    sent = (count_messages(ids, case, world_size) for ids in drawn)
    return max(map(sum, zip(*sent, strict=True)))


def output_rows(case: Case, needed: int, world_size: int) -> int:
    """Return the rows to allocate for ``needed``: with a margin, a multiple of 16, at most the worst case."""
    worst = case.ep_config(0, world_size).max_rows
    return max(needed, min(worst, align_up(math.ceil(needed * CAPACITY_MARGIN), 16)))


def make_workload(case: Case, settings: Settings, *, rank: int, world_size: int, device: torch.device) -> Workload:
    """Draw this rank's inputs without communication: every rank computes the routing of all."""
    copies = num_copies(case, settings)
    batches = tuple(
        rank_batch(case, seed=settings.seed, rank=rank, copy=copy, world_size=world_size, device=device)
        for copy in range(copies)
    )
    needed = rows_needed(case, seed=settings.seed, copies=copies, world_size=world_size)
    capacity = output_rows(case, needed, world_size)
    by_row: tuple[int, ...] = (capacity,)
    if case.zero_copy:
        capacity, by_row = world_size * case.tokens, (world_size, case.tokens)
    generator = _generator(settings.seed, rank, copies, device)
    y = tuple(
        torch.randn(*by_row, case.hidden_size, generator=generator, device=device, dtype=torch.bfloat16)
        for _ in range(copies)
    )
    rows = tuple(rows_to_dispatch(case, batch.x) for batch in batches)
    return Workload(case, batches, rows, capacity, y)
