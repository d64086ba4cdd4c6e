"""The symmetric transport: kernels over memory that all ranks can address (GPUs of a node; CPUs, interpreted)."""

from moelink.transports.symmetric.transport import SymmetricTransport

__all__ = ["SymmetricTransport"]
