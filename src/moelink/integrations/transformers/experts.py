"""A layer's experts spread over the ranks: dispatch, this rank's experts, combine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import moelink
from moelink.control.exchange import Peers
from moelink.env import DEBUG
from moelink.errors import ArgumentError, UnsupportedError
from moelink.integrations.transformers.forms import Form
from moelink.integrations.transformers.padding import Padding
from moelink.integrations.transformers.ranks import check_same, shared_by_ranks, total_over_ranks
from moelink.nn import dequantized
from moelink.nn.checkpoint import refuse_plain_checkpoints
from moelink.nn.experts import group_of_rows, grouped_matmul, known_max_tokens, likely_rows, refuse_experts
from moelink.nn.load import BalancedLayer, LoadMeter
from moelink.nn.owned import Ownership, Wrapping, share_of_gradient
from moelink.nn.parameters import KnowsRows
from moelink.nn.placed_experts import QuantizedExperts, refuse_gradients
from moelink.nn.placement import Placement, PlacementMap
from moelink.output import DispatchOutput
from moelink.routing import ExpertMap
from moelink.rows.gated import gated_activation, known_activation
from moelink.rows.scale_rows import cast_rows

_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook",
)  # fmt: skip
"""Names of the dictionaries in which torch keeps the hooks of a module."""


def run_experts(
    ep: moelink.Communicator,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    experts: Callable[[DispatchOutput], Tensor],
    peers: Peers | None,
) -> Tensor:
    """The experts' weighted sum for each of this rank's tokens, [T, H] of the dtype of ``hidden_states``. Collective.

    Args:
        hidden_states: [T, H]; the same on every rank if ``ep`` is in mode "allreduce". Zeros are sent behind each if
            rows of ``ep`` are wider.
        topk_ids, topk_weights: [T, K], ids over all ranks.
        experts: this rank's, from received rows to rows [R, H].
        peers: the ranks of sums in mode "allreduce"; None for one rank.
    """
    replicated = ep.config.mode == "allreduce"
    x, weights = hidden_states, topk_weights
    if replicated:
        x, weights = shared_by_ranks(x, peers), shared_by_ranks(weights, peers)
    # In mode "alltoall" each rank has a batch of its own, whose size the others do not know.
    bound, hidden = known_max_tokens(ep.config, x.shape[0]), x.shape[1]
    if hidden < ep.config.hidden_size:
        x = functional.pad(x, (0, ep.config.hidden_size - hidden))
    recv = ep.dispatch(x.contiguous(), topk_ids.contiguous(), weights.contiguous(), max_tokens=bound)
    out = ep.combine(cast_rows(experts(recv), recv.row_offsets, ep.config.combine_dtype), recv)
    if hidden < ep.config.hidden_size:
        out = out[:, :hidden]
    return (total_over_ranks(out, peers) if replicated else out).to(hidden_states.dtype)


def compute(
    form: Form, tensors: Mapping[str, Tensor], recv: DispatchOutput, ep: moelink.Communicator, peers: Peers | None
) -> Tensor:
    """Return the output [R, H] of received rows, by experts of ``form`` with ``tensors``, parameters by name.

    ``peers`` are the ranks over which the norm's gradients are summed in mode "allreduce"; None for one rank.
    """
    offsets = recv.row_offsets
    rows = dequantized(recv, ep.config, dtype=tensors[form.up].dtype)  # which is another one after a cast of the model
    owner = group_of_rows(offsets, rows.shape[0]) if form.biased or form.norm is not None else None
    fixed = ep.config.batch_invariant
    inner = _activated(form, _product(form, tensors, form.up, rows, offsets, owner, fixed), offsets, fixed)
    out = _product(form, tensors, "down_proj", inner, offsets, owner, fixed)
    if form.norm is None:
        return out
    assert owner is not None
    exists = (owner >= 0)[:, None]
    shares = ep.config.mode == "allreduce"  # each rank normalises its experts' rows, so has a share of the gradient
    weights = {name: shared_by_ranks(p, peers) if shares else p for name, p in form.norm.named_parameters()}
    normed = torch.func.functional_call(form.norm, weights, (out.where(exists, 0),))
    return normed.where(exists, 0)  # type: ignore[no-any-return]


def refuse_form(form: Form, tensors: Mapping[str, Any], ep: moelink.Communicator) -> None:
    """Raise UnsupportedError for experts of ``form`` that cannot be batch-invariant, if ``ep`` is."""
    if ep.config.batch_invariant:
        activation = form.activation if form.gated and form.norm is None else None
        refuse_experts(activation, tensors[form.up], tensors["down_proj"], ep.device)


def _product(
    form: Form, tensors: Mapping[str, Tensor], name: str, rows: Tensor, offsets: Tensor, owner: Tensor | None,
    batch_invariant: bool,
) -> Tensor:  # fmt: skip
    """The grouped product of ``rows`` with the weight ``name``, and its bias."""
    weight = tensors[name].transpose(1, 2) if form.transposed else tensors[name]
    out = grouped_matmul(rows, offsets, weight, batch_invariant)
    if not form.biased:
        return out
    assert owner is not None
    # Rows that do not exist are undefined; as zeros they give the bias no gradient.
    return (out + tensors[f"{name}_bias"][owner.clamp(min=0)]).where((owner >= 0)[:, None], 0)


def _activated(form: Form, rows: Tensor, offsets: Tensor, batch_invariant: bool) -> Tensor:
    """Apply the function between the products."""
    if form.activation is None:
        return form.method(rows)
    if not form.gated:
        assert callable(form.activation)
        return form.activation(rows)
    if form.interleaved:
        rows = rows.unflatten(1, (form.intermediate_size, 2)).transpose(1, 2).flatten(1)
    assert known_activation(form.activation) is not None
    return gated_activation(rows, offsets, form.activation, batch_invariant)


class ParallelExperts(KnowsRows, BalancedLayer):
    """Takes the place of a model's experts module; holds this rank's experts under the same parameter names.

    Attributes:
        gate_up_proj, down_proj, ...: as the model has them, of this rank's experts; none if they are quantised.
        quantized: the experts in fp8 or mxfp4, or None.
        form: how the experts compute.
        num_experts: of the layer, each counted once.
        first: id of this rank's first expert among the communicator's.
        load, placement: as in :class:`moelink.nn.load.BalancedLayer`; None without a placement.
        has_jitter: whether the router multiplies tokens by random numbers in training.
    """

    def __init__(
        self,
        ep: moelink.Communicator,
        module: nn.Module,
        form: Form,
        *,
        peers: Peers | None,
        padding: Padding | None = None,
        placement: Placement | None = None,
        quantized: QuantizedExperts | None = None,
    ) -> None:
        super().__init__()
        config = ep.config
        self.form, self.num_experts, self.num_shared = form, form.num_experts, 0
        self.first = ExpertMap(config.num_experts, config.world_size).first(config.rank)
        self.hidden_dim, self.intermediate_dim = form.hidden_size, form.intermediate_size
        self.quantized = quantized
        if quantized is None:
            for name in form.stacked:
                self.register_parameter(name, module._parameters[name])
        if form.norm is not None:
            self.post_expert_norm = form.norm
        self.ep, self._peers, self.wrapping = ep, peers, Wrapping()
        self.row_dtype = config.combine_dtype
        self.padding = Padding() if padding is None else padding
        self.load, self.placement = None, None
        if placement is not None:
            replicated = config.mode == "allreduce"
            self.load = LoadMeter(
                config.num_experts, rank=config.rank, world_size=config.world_size, replicated=replicated,
                device=ep.device,
            )  # fmt: skip
            self.placement = PlacementMap(placement, rank=0 if replicated else config.rank, device=ep.device)
        self.has_jitter, self._debug = False, DEBUG.is_on()
        self.train(module.training)
        for name in _HOOKS:  # the same dictionaries, so that the handles that the hooks' owners have still remove them
            setattr(self, name, getattr(module, name))
        refuse_plain_checkpoints(self)

    @property
    def stacked(self) -> tuple[str, ...]:
        """Names of the entries of the state_dict whose first dimension is this rank's experts."""
        return self.form.stacked if self.quantized is None else tuple(f"quantized.{n}" for n in self.quantized.stacked)

    @property
    def holder(self) -> nn.Module:
        """The module with this rank's weights."""
        return self if self.quantized is None else self.quantized

    @property
    def is_transposed(self) -> bool:
        """Whether weights are [E, in, out], as PEFT asks before it attaches adapters.

        Raises:
            UnsupportedError: this rank has a single expert, whose weight PEFT takes for [1, out, in].
        """
        if self.form.transposed and self.ep.config.num_local_experts == 1:
            raise UnsupportedError(
                "adapters: expected two experts or more on each rank, as PEFT adapts a single one with [in, out] and "
                "[out, in] confused, got 1; use fewer ranks"
            )
        return self.form.transposed

    @property
    def ownership(self) -> Ownership:
        """The experts here, as functions on whole models ask for them (:mod:`moelink.nn.owned`)."""
        config = self.ep.config
        placed = range(config.num_experts) if self.placement is None else self.placement.placement.experts
        held = Ownership.of(config.rank, config.world_size, self.first, config.num_local_experts, placed, 0)
        norm = ("post_expert_norm",) if self.form.norm is not None else ()
        return replace(held, replicated=norm)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H], [T, K], [T, K] to [T, H], as transformers calls its experts. Collective."""
        config = self.ep.config
        if hidden_states.shape[-1] != self.hidden_dim:  # narrower rows would be filled up
            raise ArgumentError("hidden_states", f"shape [T, {self.hidden_dim}]", list(hidden_states.shape))
        self.wrapping.look(config.mode, config.world_size, config.mode == "allreduce")
        top_k_index = self.padding.masked(top_k_index)
        if config.mode == "allreduce" and self._peers is not None:
            if self.has_jitter and self.training:
                check_same("hidden_states", hidden_states, self._peers)
            elif self._debug:
                check_same("topk_ids", top_k_index, self._peers)
        if self.quantized is not None:
            refuse_gradients(hidden_states, self)
        self._check_adapters()
        if self.placement is not None:
            if config.num_experts > self.num_experts:
                refuse_gradients(
                    hidden_states, self, name="placement", why="replicas of an expert would get different weights",
                    instead="each expert once",
                )  # fmt: skip
            top_k_index = self.placement(top_k_index)
            assert self.load is not None
            self.load.record(top_k_index)
        experts = partial(self._experts, hidden_states.shape[0])
        return run_experts(self.ep, hidden_states, top_k_index, top_k_weights, experts=experts, peers=self._peers)

    def _check_adapters(self) -> None:
        """Refuse adapters that another rank could not share, which PEFT makes parametrisations during a forward."""
        for name, chain in getattr(self, "parametrizations", {}).items():
            if not any(type(part).__module__.startswith("peft.") for part in chain):
                continue
            if self.placement is not None:
                raise UnsupportedError(
                    "adapters: expected experts without a placement, got one, whose Balancer would move weights and "
                    "leave their adapters; call merge_and_unload of PEFT's model first"
                )
            if name.endswith("_bias"):
                raise UnsupportedError(
                    f"{name}: expected adapters of the weights of experts, got those of their biases, which mix the "
                    "experts of all ranks; leave it out of target_parameters"
                )

    def _experts(self, tokens: int, recv: DispatchOutput) -> Tensor:
        """Return the experts' outputs for received rows, in a call of so many own ``tokens``."""
        if self.quantized is not None:
            assert recv.scales is not None
            likely = likely_rows(self.ep.config, known_max_tokens(self.ep.config, tokens))
            return self.quantized(  # type: ignore[no-any-return]
                recv.tokens, recv.scales, recv.row_offsets, likely_rows=likely
            )
        ranks = self.wrapping.ranks()
        tensors = {name: share_of_gradient(getattr(self, name), ranks) for name in self.form.stacked}
        return compute(self.form, tensors, recv, self.ep, self._peers)

    def extra_repr(self) -> str:
        """The experts here, of how many."""
        last = self.first + self.ep.config.num_local_experts - 1
        return f"experts {self.first}-{last} of {self.ep.config.num_experts}, mode={self.ep.config.mode!r}"
