"""What the demonstration found, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelink.routing import ExpertMap
from moelink.tools.demo.config import DemoConfig


@dataclass(frozen=True)
class FormatResult:
    """What one format did.

    Attributes:
        format: its name.
        combine_dtype: dtype of the rows on the way home.
        transport: the transport that ran.
        bytes_per_token: payload and scales of one row.
        dispatch_bytes, combine_bytes: what left all ranks for other ranks, as the communicator counted it
            (one message per token and rank, ids and weights included).
        copies_dispatch_bytes, copies_combine_bytes: the same with one bare row per token and remote expert.
        rounding_error: largest difference from the unsharded layer with the same quantised input, in units of what
            combine's roundings allow.
        relative_error: root mean square of the difference from the full-precision layer, relative to that layer.
        allowed_error: what the format's tolerance allows ``relative_error`` to be.
    """

    format: str
    combine_dtype: str
    transport: str
    bytes_per_token: int
    dispatch_bytes: int
    combine_bytes: int
    copies_dispatch_bytes: int
    copies_combine_bytes: int
    rounding_error: float
    relative_error: float
    allowed_error: float

    @property
    def tolerance_error(self) -> float:
        """``relative_error`` in units of ``allowed_error``."""
        return self.relative_error / self.allowed_error

    @property
    def wire_ratio(self) -> float:
        """Bytes on the wire relative to one copy per expert; 1 when nothing had to travel."""
        copies = self.copies_dispatch_bytes + self.copies_combine_bytes
        return (self.dispatch_bytes + self.combine_bytes) / copies if copies else 1.0

    @property
    def passed(self) -> bool:
        """Both errors are within bounds (a NaN is not)."""
        return self.rounding_error <= 1 and self.tolerance_error <= 1


@dataclass(frozen=True)
class DemoReport:
    """The whole run.

    Attributes:
        config: what was asked.
        device: "cpu" or "cuda".
        num_tokens: bytes of text that were routed, all ranks together.
        tokens_by_rank_and_expert: [ranks][experts] tokens that each source rank sends to each expert.
        remote_copies: (token, expert) pairs whose expert is on another rank.
        remote_messages: (token, rank) pairs whose rank is another one.
        formats: one result per format.
    """

    config: DemoConfig
    device: str
    num_tokens: int
    tokens_by_rank_and_expert: tuple[tuple[int, ...], ...]
    remote_copies: int
    remote_messages: int
    formats: tuple[FormatResult, ...]

    @property
    def tokens_per_expert(self) -> tuple[int, ...]:
        """Rows that each expert received."""
        return tuple(sum(column) for column in zip(*self.tokens_by_rank_and_expert, strict=True))

    @property
    def expert_owners(self) -> tuple[int, ...]:
        """Rank that owns each expert."""
        experts = ExpertMap(self.config.layer.num_experts, self.config.ranks)
        return tuple(experts.owner(torch.arange(experts.num_experts)).tolist())

    @property
    def passed(self) -> bool:
        """Every format passed."""
        return all(result.passed for result in self.formats)
