"""torchtitan's MoE layer with auxiliary losses of its router and with padding, over moelink."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from moelink.integrations.versions import require

require("torchtitan")  # before anything of it is subclassed

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import MoE

from moelink.errors import UnsupportedError
from moelink.nn import AuxLossConfig, AuxLosses, RouterConfig
from moelink.nn.moe import present_tokens
from moelink.nn.router import Routing


class MoelinkMoE(MoE):  # type: ignore[misc]
    """torchtitan's layer with a :class:`moelink.nn.AuxLosses` and a mask of padding; otherwise it computes the same.

    Attributes:
        aux_losses: the losses, whose gradient this layer starts; None for none.
        padding_mask: of the next forwards (:func:`moelink.integrations.torchtitan.set_padding_mask`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):  # type: ignore[misc]
        """That of torchtitan's MoE, with moelink's dispatcher.

        Attributes:
            aux_loss: the losses; ``group`` is set when torchtitan parallelises the layer.
            aux_scale: by which their gradient is multiplied: 1 / backwards of a step.
            timeout: seconds that a sum over ranks (``over="all"``) may take.
        """

        aux_loss: AuxLossConfig | None = None
        aux_scale: float = 1.0
        timeout: float = 60.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.padding_mask: Tensor | None = None
        self._is_pipelined = False
        self.aux_losses: AuxLosses | None = None
        self._scoring = RouterConfig(
            scoring=config.router.score_func, correction_bias=config.load_balance_coeff is not None
        )
        if config.aux_loss is not None:
            self._set_losses(config.aux_loss, rank=0, ranks=1)

    def _set_losses(self, aux_loss: AuxLossConfig, *, rank: int, ranks: int) -> None:
        made = AuxLosses(
            aux_loss, self._scoring, rank=rank, world_size=ranks, timeout=self.config.timeout,
            device=self.tokens_per_expert_E.device,
        )  # fmt: skip
        made.ranks = ranks  # without a group the losses are of one rank, also beside others
        self.aux_losses = made
        self._reset_scale()

    def _reset_scale(self) -> None:
        """Start the gradient without :func:`moelink.nn.add_aux_losses`, which torchtitan's trainer does not call."""
        assert self.aux_losses is not None
        self.aux_losses.scale.fill_(self.config.aux_scale)
        self.aux_losses.scaled = True

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelise the layer. The losses are of the ranks over which torchtitan sums gradients.

        Raises:
            UnsupportedError: tensor parallelism, whose ranks have parts of tokens; or ``sequence`` with context
                parallelism, whose ranks have parts of sequences.
        """
        if parallel_dims.tp_enabled:
            raise UnsupportedError(
                "tensor_parallel_degree: expected 1 with the override moe, whose losses and masks are of whole tokens, "
                f"got {parallel_dims.tp}; use the override dispatcher"
            )
        aux_loss = self.config.aux_loss
        if aux_loss is not None:
            if aux_loss.sequence and parallel_dims.cp_enabled:
                raise UnsupportedError(
                    "aux_loss.sequence: expected 0 with context parallelism, where a rank has a part of each sequence, "
                    f"got {aux_loss.sequence}; use balance"
                )
            mesh = parallel_dims.get_optional_mesh("loss")
            group = None if mesh is None else mesh.get_group()
            rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
            self._set_losses(dataclasses.replace(aux_loss, group=group), rank=rank, ranks=ranks)
        self._is_pipelined = parallel_dims.pp_enabled
        super().parallelize(parallel_dims)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """The layer's output [B, L, D] of x [B, L, D]. Rows of padding come out as zeros.

        Raises:
            ArgumentError: the mask has another shape than [B, L], or is not bool.
            UnsupportedError: there is a mask, and pipeline parallelism or a tensor that is spread over ranks.
        """
        mask, shape = self.padding_mask, x_BLD.shape[:-1]
        if mask is not None and (self._is_pipelined or isinstance(x_BLD, DTensor)):
            raise UnsupportedError(
                "padding_mask: expected none with pipeline parallelism, whose microbatches have one each, or with "
                "DTensors, got one; leave it out"
            )
        present = present_tokens(x_BLD, None, mask)
        if present is not None:
            x_BLD = x_BLD.where(present.view(*shape, 1), 0)
        scores_BLK, ids_BLK, scores_BLE = self.router(x_BLD, self.expert_bias_E)
        sent_BLK = ids_BLK if present is None else ids_BLK.where(present.view(*shape, 1), -1)
        experts = scores_BLE.shape[-1]
        chosen = scores_BLE.new_zeros(*shape, experts + 1, dtype=torch.bool)
        chosen.scatter_(-1, sent_BLK % (experts + 1), True)  # -1 is the last column, which is left out
        counts_E = chosen[..., :experts].sum((0, 1))
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert_E.add_(counts_E)
        if self.aux_losses is not None:
            scores_BLK = self._attached(x_BLD, scores_BLK, ids_BLK, present)
        out_BLD: Tensor = self.routed_experts(x_BLD, scores_BLK, sent_BLK, counts_E)
        if self.shared_experts is None:
            return out_BLD
        shared_BLD = self.shared_experts(x_BLD)
        if present is not None:
            shared_BLD = shared_BLD.where(present.view(*shape, 1), 0)
        return out_BLD + shared_BLD  # type: ignore[no-any-return]

    def _attached(self, x_BLD: Tensor, scores_BLK: Tensor, ids_BLK: Tensor, present: Tensor | None) -> Tensor:
        """Return the scores, whose gradient brings that of the losses."""
        assert self.aux_losses is not None
        # torchtitan's router returns scores alone. Its logits, made once more in fp32 as there, cost less than keeping
        # them in a hook, whose state a checkpointed region that is compiled may not change.
        with torch.autocast(device_type=x_BLD.device.type, dtype=torch.float32):
            logits = self.router.gate(x_BLD)
        topk, length = scores_BLK.shape[-1], x_BLD.shape[1]
        routing = Routing(ids_BLK.reshape(-1, topk), scores_BLK.reshape(-1, topk), logits.flatten(0, 1).float())
        attached: Tensor = self.aux_losses(routing.topk_weights, routing, present, length, 1)
        return attached.view_as(scores_BLK)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        super()._init_self_buffers(buffer_device=buffer_device)
        if self.aux_losses is not None:
            self.aux_losses.reset_buffers()
            self._reset_scale()
