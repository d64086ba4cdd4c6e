"""Move bytes with Triton kernels over memory that all ranks of a node can address (GPUs; CPUs, interpreted)."""

from moelink.transports.symmetric.transport import SymmetricTransport

__all__ = ["SymmetricTransport"]
