"""The input of the demonstration (ranks, tokens, formats, transport) and its results, as plain values."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from moelink.config import EPConfig
from moelink.errors import ConfigError
from moelink.names import TransportName
from moelink.routing import ExpertMap
from moelink.tools.demo.layer import LayerConfig

FORMATS = ("bf16", "fp8_block128", "mxfp8", "nvfp4", "mxfp4", "fp32", "fp64")
"""The formats that run by default."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The input of a run.

    Attributes:
        ranks: processes, one rank each, over all hosts.
        tokens_per_rank: bytes of text each rank takes; the last ranks get fewer, or none, when the text is short.
        formats: dispatch formats, run one after the other.
        transport: as in ``moelink.init``.
        device: "cpu", "cuda", or "auto": a GPU per rank if there are enough, else CPU.
        layer: sizes and seed of the layer.
        timeout: seconds after which the ranks are given up.
    """

    ranks: int = 4
    tokens_per_rank: int = 512
    formats: tuple[str, ...] = FORMATS
    transport: TransportName = "auto"
    device: str = "auto"
    layer: LayerConfig = field(default_factory=LayerConfig)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(name, "an integer >= 1", getattr(self, name))
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError("device", "'auto', 'cpu' or 'cuda'", self.device)
        if self.device == "cuda" and torch.cuda.device_count() < self.ranks_here:
            raise ConfigError(
                "device", f"'cpu', or {self.ranks_here} GPUs (there are {torch.cuda.device_count()})", self.device
            )
        for name in self.formats:
            self.ep_config(name)

    @property
    def ranks_here(self) -> int:
        """Ranks on this host: the local ones of torchrun, or all."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))

    @property
    def uses_cuda(self) -> bool:
        """Whether each rank gets a GPU."""
        return self.device == "cuda" or (self.device == "auto" and torch.cuda.device_count() >= self.ranks_here)

    def combine_dtype(self, format_name: str) -> torch.dtype:
        """Return fp32 and fp64 for the formats of that name, else bf16."""
        return {"fp32": torch.float32, "fp64": torch.float64}.get(format_name, torch.bfloat16)

    def ep_config(self, format_name: str, rank: int = 0) -> EPConfig:
        """Return the communicator's configuration, which also validates the sizes before anything starts."""
        return EPConfig(
            num_experts=self.layer.num_experts, topk=self.layer.topk, hidden_size=self.layer.hidden_size,
            max_tokens_per_rank=self.tokens_per_rank, dispatch_format=format_name, transport=self.transport,
            combine_dtype=self.combine_dtype(format_name), world_size=self.ranks, rank=rank,
        )  # fmt: skip

    def share(self, rank: int, available: int) -> slice:
        """Return the part of ``available`` tokens that ``rank`` takes."""
        start = min(rank * self.tokens_per_rank, available)
        return slice(start, min(start + self.tokens_per_rank, available))


@dataclass(frozen=True)
class FormatResult:
    """The result of one format.

    Attributes:
        format: its name.
        combine_dtype: dtype of the rows on the way home.
        transport: the transport that ran.
        bytes_per_token: payload and scales of one row.
        dispatch_bytes, combine_bytes: bytes from all ranks to other ranks, as the communicator counted them
            (one message per token and rank, ids and weights included).
        copies_dispatch_bytes, copies_combine_bytes: the same with one bare row per token and remote expert.
        rounding_error: largest difference from the unsharded layer with the same quantised input, in units of
            the bound of combine's roundings.
        relative_error: root mean square of the difference from the full-precision layer, relative to that layer.
        allowed_error: the bound of ``relative_error`` by the format's tolerance.
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
        config: the input.
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
