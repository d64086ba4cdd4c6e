"""The whole Mixture-of-Experts layer, from tokens to output: ``moelink bench --preset layer``.

* ``plan``: shapes, cases, presets
* ``data``: weights, inputs, and the truth that outputs are compared with
* ``contenders``: their interface, and moelink's own; ``peers``: the others
* ``run``: the program of each rank
* ``result``: figures, verdicts, the document, and its tables in Markdown
"""

from moelink.tools.results import LAYER_BENCHMARK
from moelink_bench.layer.plan import LAYER_PRESETS, LayerCase, LayerPlan, Shape, make_layer_plan
from moelink_bench.layer.run import run_layer_bench

__all__ = [
    "LAYER_BENCHMARK",
    "LAYER_PRESETS",
    "LayerCase",
    "LayerPlan",
    "Shape",
    "make_layer_plan",
    "run_layer_bench",
]
