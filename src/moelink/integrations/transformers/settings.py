"""The settings of a model's communicator that its user chooses; the rest follows from the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

import moelink
from moelink.config import Mode, TransportName
from moelink.errors import ConfigError
from moelink.ops.gradient_communicators import GRADIENT_FORMATS


@dataclass(frozen=True)
class Shape:
    """What a model says of its experts.

    Attributes:
        num_experts: of a layer, over all ranks.
        topk: experts of a token.
        hidden_size: elements of a row.
        dtype: of the experts' weights.
    """

    num_experts: int
    topk: int
    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of :func:`moelink.init` that users of a model choose; see there.

    Attributes:
        dispatch_format: None for the one that carries the model's dtype exactly.
        combine_dtype: None for the model's dtype.
    """

    max_tokens_per_rank: int
    dispatch_format: str | None = None
    combine_dtype: torch.dtype | None = None
    capacity: int | None = None
    transport: TransportName = "auto"
    num_sms: int | None = None
    timeout: float = 60.0

    def open(
        self, shape: Shape, *, mode: Mode, group: dist.ProcessGroup | None, device: torch.device | None
    ) -> moelink.Communicator:
        """The communicator of a model's layers, which run one after the other and so share one. Collective.

        Raises:
            ConfigError: a rank would own no expert, or as :func:`moelink.init`.
        """
        ep = moelink.init(
            num_experts=shape.num_experts,
            topk=shape.topk,
            hidden_size=shape.hidden_size,
            max_tokens_per_rank=self.max_tokens_per_rank,
            dispatch_format=self.dispatch_format or GRADIENT_FORMATS.get(shape.dtype, "bf16"),
            combine_dtype=self.combine_dtype or shape.dtype,
            capacity=self.capacity,
            mode=mode,
            group=group,
            device=device,
            transport=self.transport,
            num_sms=self.num_sms,
            timeout=self.timeout,
        )
        if shape.num_experts < ep.config.world_size:
            ep.close()
            raise ConfigError(
                "num_experts",
                f"at least one expert for each of {ep.config.world_size} ranks",
                shape.num_experts,
            )
        return ep
