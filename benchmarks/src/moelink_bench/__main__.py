"""``python -m moelink_bench``: the command ``moelink bench``, also where the distribution is not installed."""

from __future__ import annotations

import sys

from moelink.tools.cli.app import run
from moelink_bench.command import bench_app

sys.exit(run(bench_app))
