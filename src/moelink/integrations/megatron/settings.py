"""Settings and limits of a dispatcher, options that ranks must agree on, and routes. Megatron is not imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moelink.errors import UnsupportedError
from moelink.integrations import settings as common
from moelink.integrations.settings import SharedCommunicators, device_of

COMMUNICATORS = SharedCommunicators()
close = COMMUNICATORS.close
"""Close the communicators of all dispatchers in this process, as at the end of training. Collective."""

FORMATS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.bfloat16: "bf16", torch.float16: "fp32", torch.float32: "fp32", torch.float64: "fp64"}
)
"""By ``params_dtype``, the plain format that carries it exactly."""

COMPARED = (
    "moe_router_topk",
    "moe_router_dtype",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "moe_router_padding_for_quantization",
    "moe_shared_expert_overlap",
    "moe_apply_probs_on_input",
)
"""Options of Megatron that change a rank's rows or results, and that nothing else compares over the ranks."""


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """Arguments of :func:`moelink.init` that users of a layer choose; see there. The rest follows from the model.

    Attributes:
        max_tokens_per_rank: the most tokens of a rank in one forward: sequence length x micro-batch size, divided by
            the sizes of context parallelism and, with sequence parallelism, of tensor parallelism.
        dispatch_format: how rows travel. None: the format that carries ``params_dtype`` exactly.
        device: "cuda" or "cpu". None: CUDA if there is a device.
    """

    max_tokens_per_rank: int
    dispatch_format: str | None = None
    capacity: int | None = None
    pre_reduce: bool | None = None
    device: str | None = None

    def init_arguments(self, config: Any, *, alignment: int) -> dict[str, Any]:
        """Return arguments of :func:`moelink.init`, without the group, for Megatron's TransformerConfig ``config``.

        ``alignment``: rows of an expert are padded to a multiple of it.

        Raises:
            UnsupportedError: ``params_dtype`` is no float that moelink carries.
            ConfigError: ``device`` is neither "cuda" nor "cpu".
        """
        dtype = config.params_dtype
        if dtype not in FORMATS:
            known = ", ".join(map(str, FORMATS))
            raise UnsupportedError(f"params_dtype: expected one of {known}, got {dtype}; set it to one of these")
        return {
            **self.arguments(),
            "num_experts": config.num_moe_experts,
            "topk": config.moe_router_topk,
            "hidden_size": getattr(config, "moe_latent_size", None) or config.hidden_size,
            "dispatch_format": self.dispatch_format or FORMATS[dtype],
            "combine_dtype": dtype,
            "expert_alignment": alignment,
            "device": device_of(self.device or ("cuda" if torch.cuda.is_available() else "cpu")),
        }


def check(config: Any, *, expert_tensor_parallel_size: int) -> None:
    """Refuse options that the dispatcher does not support, before anything is built.

    Args:
        config: Megatron's TransformerConfig.
        expert_tensor_parallel_size: ranks that share an expert.

    Raises:
        UnsupportedError: it names the option and the alternative.
    """
    if expert_tensor_parallel_size > 1:
        raise UnsupportedError(
            "expert_tensor_parallel_size: expected 1, as a token goes to one rank of an expert, got "
            f"{expert_tensor_parallel_size}; pass --expert-tensor-parallel-size 1 and raise "
            "--expert-model-parallel-size, or use Megatron's alltoall dispatcher"
        )
    if config.moe_router_dtype == "fp64" and config.params_dtype != torch.float64:
        raise UnsupportedError(
            "moe_router_dtype: expected fp32 or None, as router weights travel in fp32, got fp64; pass fp32, or use "
            "Megatron's alltoall dispatcher"
        )
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise UnsupportedError(
            "overlap_moe_expert_parallel_comm: expected False, as two batches would be between dispatch and combine of "
            "one layer, got True; switch it off, or use Megatron's alltoall dispatcher"
        )
    if getattr(config, "cuda_graph_impl", "none") != "none":
        scope = [getattr(part, "name", str(part)) for part in config.cuda_graph_scope]
        whole = sorted({"moe", "full_iteration"} & set(scope))
        if whole or not scope:
            raise UnsupportedError(
                "cuda_graph_scope: expected attn, moe_router or moe_preprocess, as Megatron's experts read the counts "
                f"of their rows on the host, got {', '.join(whole) or 'everything'}; leave the experts out of the graph"
            )


def options_of(config: Any) -> dict[str, object]:
    """Return the options of ``config`` that ranks must agree on, by name."""
    return {name: getattr(config, name, None) for name in COMPARED}


def ids_and_weights(probs: Tensor, routing_map: Tensor, topk: int, *, padded: bool = False) -> tuple[Tensor, Tensor]:
    """Return the expert ids and router weights of each token, experts ascending.

    Args:
        probs: [tokens, experts] router probabilities.
        routing_map: [tokens, experts] bool, at most ``topk`` experts of a token, unless ``padded``.
        topk: experts of a token.
        padded: the map has padding tokens up to the experts' capacity (``moe_pad_expert_input_to_capacity``). Their
            probability is 0, so the result does not depend on them, and they are not sent. A chosen expert of
            probability 0 is not distinguishable from padding: its result and its gradient are 0.

    Returns:
        ids [tokens, topk] int64, -1 if the router chose fewer experts or dropped the token; and their probabilities
        [tokens, topk], 0 there. The latter are differentiable in ``probs``.

    Example: with the experts {2, 0} of 3 for one token, ids are [[0, 2]].
    """
    chosen = routing_map & (probs != 0) if padded else routing_map
    experts = probs.shape[1]
    ranks = torch.arange(experts, 0, -1, device=probs.device)  # the lowest id has the highest, so that topk is ordered
    found, ids = torch.where(chosen, ranks, 0).topk(topk, dim=1)
    absent = found == 0
    return ids.masked_fill(absent, -1), probs.gather(1, ids).masked_fill(absent, 0.0)
