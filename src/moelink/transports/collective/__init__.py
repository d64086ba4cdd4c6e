"""Dispatch and combine over ``torch.distributed`` (gloo, NCCL) or, for ranks of one process, by plain copies.

One rank's call is a generator (``wire.Steps``): it yields the counts and rows for its peers, and receives theirs. A
*wire* runs the generator: ``group_wire`` over process groups, ``lockstep`` for all ranks of one process.

=============  =================================================================================
``transport``  the transport: starts calls on a wire, and counts lost rows and ids out of range
``dispatch``   the generator of one rank's dispatch
``combine``    the generator of one rank's combine
``plan``       the routing as a dispatch has learnt it, for combine and for ``routing=``
``outputs``    lays received messages out as a DispatchOutput, and keeps staging memory between calls
``sums``       the sums of a combine, in a fixed order
=============  =================================================================================
"""

from moelink.transports.collective.transport import CollectiveTransport

__all__ = ["CollectiveTransport"]
