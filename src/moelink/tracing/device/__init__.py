"""The part of a trace that kernels write: its layout, their stamps, the ranks' clocks, and the buffer that holds it.

========  ==============================================================================================================
layout    words of a trace buffer: roles, calls, moments
stamps    what kernels store there; empty functions where no trace is compiled in
clocks    the kernel in which ranks compare their clocks
buffer    the buffers of a communicator, opened and closed
========  ==============================================================================================================
"""
