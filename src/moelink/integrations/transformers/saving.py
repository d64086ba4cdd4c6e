"""The whole model on one rank again, to be written to files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moelink.control.exchange import Peers, all_to_all
from moelink.integrations.transformers.experts import ParallelExperts
from moelink.routing import ExpertMap


def gathered_state_dict(
    model: nn.Module, experts: Mapping[str, ParallelExperts], *, peers: Peers | None, rank: int
) -> dict[str, Tensor] | None:
    """``model.state_dict()`` with all experts, on the CPU of rank 0; None on the others. Collective."""
    state: dict[str, Tensor] | None = {} if rank == 0 else None
    for name, tensor in model.state_dict().items():
        owner, _, own = name.rpartition(".")
        module = experts.get(owner)
        if module is not None and own in module.stacked:
            value = _gather(tensor, module, peers=peers, rank=rank)
        else:
            value = tensor
        if state is not None and value is not None:
            state[name] = value.detach().cpu()
    return state


def _gather(local: Tensor, module: ParallelExperts, *, peers: Peers | None, rank: int) -> Tensor | None:
    """The ranks' blocks of experts, in order, on the CPU of rank 0. One block at a time is on its device."""
    if peers is None:
        return local
    world_size = peers.own.size()
    owned = ExpertMap(module.num_experts, world_size)
    mine, nothing = local.detach().contiguous().view(-1).view(torch.uint8), [0] * world_size
    blocks = [local.detach().cpu()] if rank == 0 else []
    for peer in range(1, world_size):
        shape = (owned.num_local(peer), *local.shape[1:])
        block = torch.empty(shape if rank == 0 else 0, dtype=local.dtype, device=local.device)
        received = block.view(-1).view(torch.uint8)
        counts = [received.numel() if source == peer else 0 for source in range(world_size)]
        to = [mine.numel(), *nothing[1:]] if rank == peer else nothing
        all_to_all(received, mine if rank == peer else mine[:0], counts, to, peers)
        blocks += [block.cpu()] if rank == 0 else []
    return torch.cat(blocks) if rank == 0 else None
