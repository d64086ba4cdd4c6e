"""From Megatron's router, which says a table of all experts, to the ids and weights of each token. No Megatron here."""

from __future__ import annotations

import torch
from torch import Tensor


def ids_and_weights(probs: Tensor, routing_map: Tensor, topk: int, *, padded: bool = False) -> tuple[Tensor, Tensor]:
    """Return the expert ids and router weights of each token, experts ascending.

    Args:
        probs: [tokens, experts] router probabilities.
        routing_map: [tokens, experts] bool, at most ``topk`` experts of a token, unless ``padded``.
        topk: experts of a token.
        padded: the map also has tokens that fill experts up to their capacity (``moe_pad_expert_input_to_capacity``).
            They have probability 0, so the result does not depend on them, and they are left at home. A chosen expert
            whose probability is 0 cannot be told from them; its result is 0 as well, and so is then its gradient.

    Returns:
        ids [tokens, topk] int64, -1 where the router chose fewer experts or dropped the token; and their probabilities
        [tokens, topk], 0 there. The latter are differentiable in ``probs``.

    Example: with the experts {2, 0} of 3 for one token, ids are [[0, 2]].
    """
    chosen = routing_map & (probs != 0) if padded else routing_map
    experts = probs.shape[1]
    ranks = torch.arange(experts, 0, -1, device=probs.device)  # the lowest id has the highest, so that topk is ordered
    found, ids = torch.where(chosen, ranks, 0).topk(topk, dim=1)
    absent = found == 0
    return ids.masked_fill(absent, -1), probs.gather(1, ids).masked_fill(absent, 0.0)
