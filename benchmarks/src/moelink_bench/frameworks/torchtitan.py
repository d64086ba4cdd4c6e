"""torchtitan's AllToAll dispatcher and moelink's, with torchtitan's experts between dispatch and combine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelink_bench.frameworks.dispatchers import Case, Dispatcher, Layer, trained

NOTE = (
    "torchtitan's dispatcher was made for torch 2.13; with this one it had all_to_all_single_autograd in place of "
    "all_to_all_single, which has no gradient here, and was told that nothing is traced"
)


def make_layer(case: Case, rank: int, ranks: int) -> Layer:
    """Return torchtitan's layer over its own dispatcher and over moelink. Collective.

    Raises:
        UnsupportedError: torchtitan is not installed, or not a release that moelink supports.
    """
    from moelink.integrations.torchtitan.overrides import dispatcher  # refuses other releases

    # isort: split

    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    set_spmd_backend("default")
    note, (tokens,) = _suit_older_torch(), case.tokens
    mesh = init_device_mesh(case.device, (ranks,), mesh_dim_names=("ep",))
    config = AllToAllTokenDispatcher.Config(num_experts=case.num_experts, top_k=case.topk)
    given: dict[str, Any] = {"hidden_dim": case.hidden_size, "num_max_tokens_per_rank": tokens}
    made = {
        "torchtitan AllToAll": config,
        "moelink": dispatcher(config, capacity=case.capacity, timeout=120.0, **given),
    }
    mine = case.num_experts // ranks
    experts = GroupedExperts(
        GroupedExperts.Config(dim=case.hidden_size, hidden_dim=case.intermediate_size, num_experts=mine)
    ).to(case.device, torch.bfloat16)
    generator = torch.Generator().manual_seed(1 + rank)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    x = torch.randn(tokens, case.hidden_size, generator=generator).to(case.device, torch.bfloat16)
    scores, ids = torch.randn(tokens, case.num_experts, generator=generator).softmax(-1).topk(case.topk)
    scores, ids = scores.to(case.device), ids.to(case.device)
    heard = torch.randn(tokens, case.hidden_size, generator=generator).to(x)
    counts = torch.bincount(ids.view(-1), minlength=case.num_experts)

    def contender(name: str, used: Any) -> Dispatcher:
        used.wire_meshes(ep_mesh=mesh)

        def layer(x: Tensor, scores: Tensor) -> Tensor:
            rows, received, metadata = used.dispatch(x, scores, ids, counts)
            out: Tensor = used.combine(experts(rows, received), metadata, x)
            return out

        return trained(name, layer, {"x": x, "scores": scores}, heard, experts, used)

    return Layer([contender(name, config.build()) for name, config in made.items()], note, _close)


def _suit_older_torch() -> str:
    """Let torchtitan's dispatcher run with a torch before 2.13; return a note, or "" where that one is installed."""
    from torch.distributed import _functional_collectives as collectives
    from torchtitan.models.common import token_dispatcher

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13):
        return ""
    token_dispatcher.all_to_all_single = collectives.all_to_all_single_autograd
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):
        torch.compiler._is_non_strict_tracing = lambda: False
    return NOTE


def _close() -> None:
    """Close moelink's communicators. Collective."""
    from moelink.integrations.torchtitan import close as close_all

    close_all()
