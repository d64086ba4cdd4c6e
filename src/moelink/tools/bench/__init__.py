"""``moelink bench``: dispatch and combine, found correct, measured against their peers and against the wire."""

from moelink.tools.bench.presets import PRESETS, Case, Plan, Settings, make_plan
from moelink.tools.bench.run import run_bench

__all__ = ["PRESETS", "Case", "Plan", "Settings", "make_plan", "run_bench"]
