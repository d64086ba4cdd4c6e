"""First weights that depend on a seed and on what they belong to, never on how many ranks there are.

Each matrix has a random stream of its own, drawn on the CPU. So a rank draws its own experts and nothing else, and a
layer on any number of ranks, on any device, starts as the layer on one rank does.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUTER = 0
SHARED = 1
EXPERTS = 4
"""Streams: the router's, the shared expert's first, the first expert's. Each expert takes two."""


def draw(weight: Tensor, *, seed: int, stream: int) -> None:
    """Fill ``weight`` [..., fan_in] in place, uniform in +-1 / sqrt(fan_in), as ``torch.nn.Linear`` does.

    A tensor on the meta device stays as it is.
    """
    if weight.is_meta:
        return
    generator = torch.Generator().manual_seed(seed * 1_000_003 + stream)
    bound = weight.shape[-1] ** -0.5
    with torch.no_grad():
        values = torch.rand(weight.shape, generator=generator, dtype=torch.float32, device=generator.device)
        weight.copy_(values.mul_(2 * bound).sub_(bound))
