"""Mixture-of-Experts layers on moelink, as ``torch.nn`` modules. ``docs/moe-layer.md`` shows their use.

=============  ========================================================================================================
``moe``        the layer                            ``experts``   grouped matrix products over received rows
``router``     which experts, with which weights    ``mlp``       the dense block, for shared experts
``load``       tokens per expert and rank           ``report``    them as JSON      ``plots``    them as a picture
``placement``  which expert is where, by load   ``balance``   moving experts between ranks
``owned``      which parts of a model are a rank's alone, for DistributedDataParallel and others
``parallel``   gradients and state_dicts of models  ``initial``   first weights, the same on any number of ranks
``checkpoint``  models and optimizers for torch.distributed.checkpoint
``plain_state``  values of a state_dict that it would lose, and that refuse
``quantized_experts``, ``block_quantized``          experts in fp8; their weights and products
``expert_backends``                                 what multiplies rows that travelled in fp8
=============  ========================================================================================================
"""

from moelink.nn.balance import Balancer, LayerBalance
from moelink.nn.block_quantized import BlockQuantized, dequantize_weight, grouped_fp8, quantize_weight
from moelink.nn.checkpoint import TrainingState
from moelink.nn.experts import dequantized, grouped_experts
from moelink.nn.load import LoadMeter, LoadStats
from moelink.nn.mlp import GatedMLP
from moelink.nn.moe import Experts, MoE
from moelink.nn.owned import fully_shard, mark_experts
from moelink.nn.parallel import all_reduce_gradients, clip_grad_norm_, local_state_dict, merge_state_dicts
from moelink.nn.placement import Placement, place_experts
from moelink.nn.quantized_experts import QuantizedExperts
from moelink.nn.report import load_report, save_load
from moelink.nn.router import Router, RouterConfig, Routing, route

__all__ = [
    "Balancer",
    "BlockQuantized",
    "Experts",
    "GatedMLP",
    "LayerBalance",
    "LoadMeter",
    "LoadStats",
    "MoE",
    "Placement",
    "QuantizedExperts",
    "Router",
    "RouterConfig",
    "Routing",
    "TrainingState",
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
    "quantize_weight",
    "route",
    "save_load",
]
