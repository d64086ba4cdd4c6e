"""Megatron-core's Mixture-of-Experts layer with a token dispatcher over moelink."""

from __future__ import annotations

from typing import Any

from moelink.integrations.versions import require

require("megatron-core")  # before anything of it is subclassed

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    get_align_size_for_quantization,
    get_default_pg_collection,
)
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

import moelink
from moelink.errors import MoelinkError, StateError, UnsupportedError
from moelink.integrations.megatron.settings import COMMUNICATORS, Settings, check, ids_and_weights, options_of


class MoelinkTokenDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Sends tokens and their router probabilities to the experts' ranks, and brings the experts' outputs home.

    Rows come grouped by local expert, then by source rank and token, as from Megatron's alltoall dispatcher. The
    experts of Megatron multiply by the probabilities, so combine only sums. The number of rows is read on the host,
    which the experts need.
    """

    def __init__(self, config: Any, pg_collection: Any, settings: Settings) -> None:
        """Find the communicator of the expert-parallel group, or make it. Collective then.

        Args:
            config: Megatron's TransformerConfig.
            pg_collection: Megatron's process groups; ``ep`` and ``expt_tp`` are used.
            settings: arguments that Megatron does not have.

        Raises:
            UnsupportedError: the dispatcher does not support an option of ``config``.
            ConfigError, ConfigMismatchError, PeerTimeoutError: as :func:`moelink.init`, also for options of Megatron
                that differ between ranks.
        """
        super().__init__(config=config, pg_collection=pg_collection)
        check(config, expert_tensor_parallel_size=self.tp_size)
        alignment = get_align_size_for_quantization(config) if config.moe_router_padding_for_quantization else 1
        arguments = settings.init_arguments(config, alignment=alignment)
        self.ep: moelink.Communicator = COMMUNICATORS.get(self.ep_group, arguments, options_of(config))
        self.topk_ids: Tensor | None = None
        self._shape: Any = None
        self._recv: moelink.DispatchOutput | None = None
        self.cudagraph_attrs = ["topk_ids"]  # outputs of a graph of moe_preprocess that token_dispatch reads

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Take the shared experts, whose steps run between those of the dispatcher (``moe_shared_expert_overlap``)."""
        super().set_shared_experts(shared_experts)
        if shared_experts.use_shared_expert_gate:
            self.cudagraph_attrs.append("shared_experts.gate_score")
        self.cudagraph_attrs.append("shared_experts.cached_fc1_input")

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the router's table into ids and weights.

        Args:
            tokens: [sequence, batch, hidden].
            routing_map: [sequence * batch, experts] bool.
            probs: [sequence * batch, experts].

        Returns:
            tokens [sequence * batch, hidden], and the weights of their experts [sequence * batch, topk].
        """
        self._shape = tokens.shape
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(tokens)
        self.topk_ids, weights = ids_and_weights(
            probs, routing_map, self.config.moe_router_topk, padded=bool(self.config.moe_pad_expert_input_to_capacity)
        )
        return tokens.reshape(-1, self._shape[-1]), weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send the tokens: [tokens, hidden] and [tokens, topk] to [rows, hidden] and [rows]. Collective."""
        assert self.topk_ids is not None
        recv = self._recv = self.ep.dispatch(hidden_states.contiguous(), self.topk_ids, probs, host_counts=True)
        assert recv.weights is not None
        rows = recv.tokens if recv.scales is None else moelink.ops.dequantize(self.ep, recv)
        return rows.to(hidden_states.dtype), recv.weights.to(probs.dtype)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, the number of rows of each local expert on the host, padding included, and probabilities."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        return hidden_states, self._received().row_offsets.diff().long().cpu(), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the experts' outputs [rows, hidden] as they are; they stand as the rows stood."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Bring the experts' outputs home and sum them: [rows, hidden] to [tokens, hidden]. Collective.

        Megatron's flags for asynchronous communication have no effect.
        """
        recv, self._recv = self._received(), None
        out = self.ep.combine(hidden_states.to(self.ep.config.combine_dtype).contiguous(), recv, weigh=False)
        return out.to(hidden_states.dtype)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the sums in the shape of the tokens, with the shared experts' output if these overlap."""
        if self.shared_experts is None:
            return hidden_states.view(self._shape)
        self.shared_experts.linear_fc2_forward(hidden_states)
        self.shared_experts.post_forward_comm()
        shared: Tensor = self.shared_experts.get_output()
        return hidden_states.view(self._shape) + shared

    def _received(self) -> moelink.DispatchOutput:
        if self._recv is None:
            raise StateError(
                "MoelinkTokenDispatcher: expected token_dispatch before this step, got none since the last "
                "token_combine; call the six steps in Megatron's order"
            )
        return self._recv


class MoelinkMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's layer with its token dispatcher replaced. Parameters and their names in checkpoints are Megatron's."""

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        moelink: Settings,
    ) -> None:
        """Build Megatron's layer, then replace its dispatcher. Collective over the expert-parallel group.

        Args:
            config, submodules, layer_number, pg_collection: as for Megatron's MoELayer.
            moelink: arguments that Megatron does not have; a layer spec passes them in ``params``
                (:func:`moelink.integrations.megatron.spec.with_moelink`).

        Raises:
            MoelinkError: of the dispatcher, with its message. Megatron rebuilds errors from their message alone, so the
                error itself is the cause.
        """
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        # Before Megatron builds a dispatcher of its own, in any case, which may need other options.
        check(config, expert_tensor_parallel_size=groups.expt_tp.size())
        super().__init__(config, submodules, layer_number, groups)
        try:
            self.token_dispatcher = MoelinkTokenDispatcher(config, groups, moelink)
        except MoelinkError as error:
            raise MoelinkError(f"{type(error).__name__}: {error}") from error
        if self.use_shared_expert and self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Megatron's forward.

        Raises:
            UnsupportedError: a call that records gradients has a ``padding_mask`` and the router an expert bias.
                Megatron 0.16 applies the mask to the wrong dimension of its count of tokens.
        """
        mask = args[2] if len(args) > 2 else options.get("padding_mask")
        if mask is not None and self.router.enable_expert_bias and torch.is_grad_enabled():
            raise UnsupportedError(
                "padding_mask: expected None with moe_router_enable_expert_bias, as Megatron-core 0.16 counts tokens "
                f"wrongly with both, got shape {list(mask.shape)}; leave out one of the two"
            )
        return super().forward(*args, **options)
