"""Mixture-of-Experts layers on moelink, as ``torch.nn`` modules. ``docs/moe-layer.md`` shows their use.

===================  ==================================================================================================
``moe``              the layer, and its load as JSON
``router``           the experts of each token, and their weights
``aux_loss``         auxiliary losses of routers
``placed_experts``   the experts of a rank, in the layer's dtype, in fp8 and in mxfp4
``experts``          grouped matrix products over received rows; the dense block, for shared experts
``block_quantized``  weights in fp8 and the product; ``mxfp4`` weights in 4 bits; ``expert_backends`` chooses a product
``load``             tokens per expert and rank
``placement``        experts on ranks, by load; ``balance`` moves them
``survival``         experts that outlive their ranks, by ``host_copies`` and replicas
``steps``            exchanges of weights that happen on all ranks or on none
``owned``            the parts of a model that one rank alone has, for DistributedDataParallel and others
``parallel``         gradients, router biases and state_dicts of models
``checkpoint``       models and optimizers for torch.distributed.checkpoint
``parameters``       first weights, the same on any number of ranks; buffers that casts leave alone
===================  ==================================================================================================
"""

from moelink.nn.aux_loss import AuxLossConfig, AuxLosses, add_aux_losses
from moelink.nn.balance import Balancer, LayerBalance
from moelink.nn.block_quantized import BlockQuantized, dequantize_weight, grouped_fp8, quantize_weight
from moelink.nn.checkpoint import TrainingState
from moelink.nn.experts import GatedMLP, grouped_experts
from moelink.nn.load import LoadMeter, LoadStats
from moelink.nn.moe import MoE, load_report, save_load
from moelink.nn.mxfp4 import Mxfp4Weight, quantize_mxfp4
from moelink.nn.owned import fully_shard, mark_experts
from moelink.nn.parallel import (
    all_reduce_gradients,
    clip_grad_norm_,
    local_state_dict,
    merge_state_dicts,
    update_router_bias,
)
from moelink.nn.placed_experts import Experts, QuantizedExperts
from moelink.nn.placement import Placement, place_experts
from moelink.nn.router import Router, RouterConfig, Routing, route
from moelink.nn.survival import RestoredExperts, refresh_host_copies, restore_experts
from moelink.rows.dequantize import dequantized

__all__ = [
    "AuxLossConfig",
    "AuxLosses",
    "Balancer",
    "BlockQuantized",
    "Experts",
    "GatedMLP",
    "LayerBalance",
    "LoadMeter",
    "LoadStats",
    "MoE",
    "Mxfp4Weight",
    "Placement",
    "QuantizedExperts",
    "RestoredExperts",
    "Router",
    "RouterConfig",
    "Routing",
    "TrainingState",
    "add_aux_losses",
    "all_reduce_gradients",
    "clip_grad_norm_",
    "dequantize_weight",
    "dequantized",
    "fully_shard",
    "grouped_experts",
    "grouped_fp8",
    "load_report",
    "local_state_dict",
    "mark_experts",
    "merge_state_dicts",
    "place_experts",
    "quantize_mxfp4",
    "quantize_weight",
    "refresh_host_copies",
    "restore_experts",
    "route",
    "save_load",
    "update_router_bias",
]
