"""The symmetric transport: Triton kernels over memory that all ranks can address (GPUs of one node; CPUs interpreted)."""

from moelink.transports.symmetric.transport import SymmetricTransport

__all__ = ["SymmetricTransport"]
