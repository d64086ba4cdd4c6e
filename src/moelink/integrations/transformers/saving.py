"""The whole model on one rank again, to be written to files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moelink.integrations.transformers.experts import ParallelExperts
from moelink.routing import ExpertMap


def gathered_state_dict(
    model: nn.Module, experts: Mapping[str, ParallelExperts], *, group: dist.ProcessGroup | None, rank: int
) -> dict[str, Tensor] | None:
    """``model.state_dict()`` with all experts, on the CPU of rank 0; None on the others. Collective."""
    state: dict[str, Tensor] | None = {} if rank == 0 else None
    for name, tensor in model.state_dict().items():
        owner, _, own = name.rpartition(".")
        module = experts.get(owner)
        if module is not None and own in module.stacked:
            value = _gather(tensor, module, group=group, rank=rank)
        else:
            value = tensor
        if state is not None and value is not None:
            state[name] = value.detach().cpu()
    return state


def _gather(local: Tensor, module: ParallelExperts, *, group: dist.ProcessGroup | None, rank: int) -> Tensor | None:
    """The ranks' blocks of experts, in order, on the CPU of rank 0. One block at a time is on its device."""
    if group is None:
        return local
    ranks = dist.get_process_group_ranks(group)
    if rank:
        dist.send(local.detach().contiguous(), dst=ranks[0], group=group)
        return None
    owned = ExpertMap(module.num_experts, len(ranks))
    blocks = [local.detach().cpu()]
    for peer in range(1, len(ranks)):
        block = torch.empty(owned.num_local(peer), *local.shape[1:], dtype=local.dtype, device=local.device)
        dist.recv(block, src=ranks[peer], group=group)
        blocks.append(block.cpu())
    return torch.cat(blocks)
