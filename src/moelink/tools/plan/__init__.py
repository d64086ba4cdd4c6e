"""``moelink plan``: memory, bytes and time of dispatch and combine at sizes that one does not have yet.

From bottom to top: ``routing`` (how many ranks and nodes a token reaches), ``traffic`` (bytes by link), ``model``
(bytes to microseconds), ``experts`` (the grouped products), ``report`` (all sizes in one document); ``fit`` and
``experts_fit`` make constants of results of ``moelink bench``; ``fit`` and ``check_layer`` compare the model with them.

Example:
    >>> from moelink.tools.plan import Layer, make_plan, parse_ranks, Uniform
    >>> layer = Layer(num_experts=256, topk=8, hidden_size=7168, tokens=128)
    >>> plan = make_plan(layer, parse_ranks("8..16"), ranks_per_node=8, routing=Uniform(256, 8))
    >>> [round(size.statistics.ranks_per_token, 2) for size in plan.sizes]
    [5.29, 6.52]
"""

from moelink.tools.plan.experts import MachineExperts, load_expert_constants, packaged_expert_constants
from moelink.tools.plan.model import Constants, load_constants, packaged_constants
from moelink.tools.plan.report import Plan, make_plan, to_document
from moelink.tools.plan.routing import Routing, Trace, Uniform, Zipf, make_routing
from moelink.tools.plan.traffic import Layer, parse_ranks

__all__ = [
    "Constants",
    "Layer",
    "MachineExperts",
    "Plan",
    "Routing",
    "Trace",
    "Uniform",
    "Zipf",
    "load_constants",
    "load_expert_constants",
    "make_plan",
    "make_routing",
    "packaged_constants",
    "packaged_expert_constants",
    "parse_ranks",
    "to_document",
]
