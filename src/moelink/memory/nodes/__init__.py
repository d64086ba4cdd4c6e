"""Memory of several nodes, and the network between them.

================  ======================================================================================================
nvshmem           blocks of GPUs on several nodes: NVSHMEM's symmetric memory
network           carries bytes from block to block
network_proxy     the network of CPUs: nodes are processes of one machine, and a thread carries the bytes
watchdog          bounds waits inside a library without time limits
================  ======================================================================================================
"""
