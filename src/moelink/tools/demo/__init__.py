"""The demonstration behind ``moelink demo``, as a library: text through an expert-parallel layer, judged.

Example:
    >>> from moelink.tools.demo import DemoConfig
    >>> DemoConfig(ranks=2).formats[0]
    'bf16'
"""

from moelink.tools.demo.config import FORMATS, DemoConfig
from moelink.tools.demo.layer import LayerConfig
from moelink.tools.demo.results import DemoReport, FormatResult
from moelink.tools.demo.run import run_demo

__all__ = ["FORMATS", "DemoConfig", "DemoReport", "FormatResult", "LayerConfig", "run_demo"]
