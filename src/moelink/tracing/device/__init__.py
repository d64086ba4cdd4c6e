"""The part of a trace that kernels write: its layout, their stamps, the ranks' clocks, and the buffer that holds it.

========  ==============================================================================================================
layout    words of a trace buffer: roles, calls, moments
stamps    kernels' stores there; empty functions without a trace
clocks    the kernel in which ranks compare their clocks
buffer    the buffers of a communicator, opened and closed
========  ==============================================================================================================
"""
