"""Traces of calls: kernels stamp them (``device``), ranks gather them, and summarise or write them for Perfetto.

========  ============================================================================================================
session   open a trace of a communicator; gather the records of all ranks, on one clock
records   read the words of a trace buffer
trace     the trace itself, as :meth:`moelink.Communicator.trace` returns it
summary   median and worst of each moment, slowest peers
chrome    events of Chrome's trace format, which Perfetto reads
========  ============================================================================================================
"""

from moelink.tracing.summary import MomentSummary, Summary
from moelink.tracing.trace import Trace

__all__ = ["MomentSummary", "Summary", "Trace"]
