"""Trace pairs of dispatch and combine on ranks of this machine."""

from moelink.tools.trace.run import TraceConfig, TraceRun, run_trace

__all__ = ["TraceConfig", "TraceRun", "run_trace"]
