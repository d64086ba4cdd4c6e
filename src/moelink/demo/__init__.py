"""The demonstration behind ``moelink demo``, as a library: text through an expert-parallel layer, judged.

Example:
    >>> from moelink.demo import DemoConfig
    >>> DemoConfig(ranks=2).formats[0]
    'bf16'
"""

from moelink.demo.config import FORMATS, DemoConfig
from moelink.demo.layer import LayerConfig
from moelink.demo.results import DemoReport, FormatResult
from moelink.demo.run import run_demo

__all__ = ["FORMATS", "DemoConfig", "DemoReport", "FormatResult", "LayerConfig", "run_demo"]
