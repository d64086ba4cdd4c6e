"""Dispatch and combine over ``torch.distributed`` (gloo, NCCL) or, for ranks of one process, plain copies.

One rank's call is a generator that yields what it must tell its peers and receives what they told it (``steps``);
a wire runs it: ``group`` over process groups, ``lockstep`` for all ranks of one process.
"""

from moelink.transports.collective.transport import CollectiveTransport

__all__ = ["CollectiveTransport"]
