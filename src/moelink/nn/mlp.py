"""The dense gated feed-forward block, for shared experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.nn.experts import Activation
from moelink.nn.initial import SHARED, draw


class GatedMLP(torch.nn.Module):
    """``down (activation(gate x) * (up x))`` with ``[gate | up] = gate_up_proj``; no biases.

    Args:
        hidden_size, intermediate_size: sizes of a token and of what is between the two products.
        activation: what is applied to the gate.
        seed: of :meth:`reset_parameters`.
        device, dtype: of the parameters.

    Attributes:
        gate_up_proj: [2 * intermediate_size, hidden_size], rows of gate before rows of up.
        down_proj: [hidden_size, intermediate_size].
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = torch.nn.functional.silu,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.seed = activation, seed
        new = {"device": device, "dtype": dtype}
        self.gate_up_proj = torch.nn.Parameter(torch.empty(2 * intermediate_size, hidden_size, **new))  # type: ignore[arg-type]
        self.down_proj = torch.nn.Parameter(torch.empty(hidden_size, intermediate_size, **new))  # type: ignore[arg-type]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weights that ``seed`` gives, on any number of ranks."""
        draw(self.gate_up_proj, seed=self.seed, stream=SHARED)
        draw(self.down_proj, seed=self.seed, stream=SHARED + 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] to the same."""
        gate, up = torch.nn.functional.linear(x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.nn.functional.linear(self.activation(gate) * up, self.down_proj)
