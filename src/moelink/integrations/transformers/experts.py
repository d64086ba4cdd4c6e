"""A layer's experts spread over the ranks: dispatch, this rank's experts, combine."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import activations

import moelink
from moelink.errors import UnsupportedError
from moelink.integrations.transformers.replicated import shared_by_ranks, total_over_ranks
from moelink.nn import dequantized, grouped_experts
from moelink.nn.experts import Activation, known_max_tokens
from moelink.ops.scale_rows import cast_rows


def check_experts(module: nn.Module) -> None:
    """Raise UnsupportedError unless ``module`` computes ``down (act_fn(gate) * up)``, ``[gate | up] = gate_up x``."""
    expected = {
        "has_gate": True,
        "has_bias": False,
        "is_transposed": False,
        "is_concatenated": True,
        "has_post_expert_norm": False,
    }
    for name, value in expected.items():
        if getattr(module, name, value) != value:
            raise UnsupportedError(
                f"{type(module).__name__}: expected experts with {name}={value}, got {name}={not value}; use a model "
                "of a supported family"
            )
    if any(not hasattr(module, name) for name in ("gate_up_proj", "down_proj", "act_fn")):
        raise UnsupportedError(
            f"{type(module).__name__}: expected experts with gate_up_proj, down_proj and act_fn, got others; use a "
            "model of a supported family"
        )


_SAME_AS_TORCH: dict[type, Activation] = {
    activations.SiLUActivation: functional.silu,
    activations.GELUActivation: functional.gelu,
    activations.GELUTanh: functools.partial(functional.gelu, approximate="tanh"),
}


def plain_activation(module: Activation) -> Activation:
    """The function of torch that transformers' module computes, which experts compute for the rows that exist only;
    ``module`` itself where there is none."""
    return _SAME_AS_TORCH.get(type(module), module)


def run_experts(
    ep: moelink.Communicator,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The experts' weighted sum for each of this rank's tokens, [T, H] of the dtype of ``hidden_states``. Collective.

    Args:
        hidden_states: [T, H]; the same on every rank if ``ep`` is in mode "allreduce".
        topk_ids, topk_weights: [T, K], ids over all ranks.
        gate_up: [L, 2 * I, H], this rank's. down: [L, H, I].
        group: what sums are taken over in mode "allreduce"; None for one rank.
    """
    replicated = ep.config.mode == "allreduce"
    x, weights = hidden_states, topk_weights
    if replicated:
        x, weights = shared_by_ranks(x, group), shared_by_ranks(weights, group)
    # In mode "alltoall" each rank has a batch of its own, whose size the others do not know.
    bound = known_max_tokens(ep.config, x.shape[0])
    recv = ep.dispatch(x.contiguous(), topk_ids.contiguous(), weights.contiguous(), max_tokens=bound)
    rows = dequantized(recv, ep.config, dtype=gate_up.dtype)
    y = grouped_experts(rows, recv.row_offsets, gate_up, down, activation=plain_activation(activation))
    out = ep.combine(cast_rows(y, recv.row_offsets, ep.config.combine_dtype), recv)
    return (total_over_ranks(out, group) if replicated else out).to(hidden_states.dtype)


class ParallelExperts(nn.Module):
    """Takes the place of a model's experts module; holds this rank's experts under the same parameter names.

    Attributes:
        gate_up_proj: [L, 2 * I, H]. down_proj: [L, H, I].
        act_fn: the experts' activation.
        num_experts: over all ranks.
        first: global id of this rank's first expert.
    """

    def __init__(
        self,
        ep: moelink.Communicator,
        *,
        gate_up: nn.Parameter,
        down: nn.Parameter,
        activation: nn.Module,
        first: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = gate_up, down, activation
        self.num_experts, self.first = ep.config.num_experts, first
        self.hidden_dim, self.intermediate_dim = down.shape[1], down.shape[2]
        self._ep, self._group = ep, group

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H], [T, K], [T, K] to [T, H], as transformers calls its experts. Collective."""
        return run_experts(
            self._ep,
            hidden_states,
            top_k_index,
            top_k_weights,
            gate_up=self.gate_up_proj,
            down=self.down_proj,
            activation=self.act_fn,
            group=self._group,
        )

    def extra_repr(self) -> str:
        """The experts here, of how many."""
        last = self.first + self.gate_up_proj.shape[0] - 1
        return f"experts {self.first}-{last} of {self.num_experts}, mode={self._ep.config.mode!r}"
