"""The demonstration behind ``moelink demo``, as a library: text through an expert-parallel layer, judged.

Example:
    >>> from moelink.tools.demo import DemoConfig
    >>> DemoConfig(ranks=2).formats[0]
    'bf16'
"""

from moelink.tools.demo.layer import LayerConfig
from moelink.tools.demo.report import FORMATS, DemoConfig, DemoReport, FormatResult
from moelink.tools.demo.run import bundled_text, run_demo

__all__ = ["FORMATS", "DemoConfig", "DemoReport", "FormatResult", "LayerConfig", "bundled_text", "run_demo"]
