"""Mixture-of-Experts layers on moelink, as ``torch.nn`` modules. ``docs/moe-layer.md`` shows their use.

=============  ========================================================================================================
``moe``        the layer                            ``experts``   grouped matrix products over received rows
``router``     which experts, with which weights    ``mlp``       the dense block, for shared experts
``load``       tokens per expert and rank           ``report``    them as JSON      ``plots``    them as a picture
``parallel``   gradients and checkpoints of models  ``initial``   first weights, the same on any number of ranks
=============  ========================================================================================================
"""

from moelink.nn.experts import dequantized, grouped_experts
from moelink.nn.load import LoadMeter, LoadStats
from moelink.nn.mlp import GatedMLP
from moelink.nn.moe import Experts, MoE
from moelink.nn.parallel import all_reduce_gradients, local_state_dict, merge_state_dicts
from moelink.nn.report import load_report, save_load
from moelink.nn.router import Router, RouterConfig, Routing, route

__all__ = [
    "Experts",
    "GatedMLP",
    "LoadMeter",
    "LoadStats",
    "MoE",
    "Router",
    "RouterConfig",
    "Routing",
    "all_reduce_gradients",
    "dequantized",
    "grouped_experts",
    "load_report",
    "local_state_dict",
    "merge_state_dicts",
    "route",
    "save_load",
]
