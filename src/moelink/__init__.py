"""Expert-parallel dispatch and combine for Mixture-of-Experts models.

``init`` makes a communicator, whose ``dispatch`` sends each token to the ranks that own its top-k experts and whose
``combine`` brings the experts' outputs home and sums them. Importing this package touches no device.
"""

from moelink.communicator import Communicator
from moelink.config import EPConfig, MemoryReport
from moelink.devices import DeviceCommunicator, init_devices
from moelink.errors import (
    ArgumentError,
    CapacityError,
    ClosedError,
    ConcurrencyError,
    ConfigError,
    ConfigMismatchError,
    ExpiredRowsError,
    ForeignHandleError,
    ForkedError,
    MoelinkError,
    NetworkTimeoutError,
    PeerAbortedError,
    PeerError,
    PeerLeftError,
    PeerLostError,
    PeerTimeoutError,
    PendingError,
    ProtocolError,
    RoutingError,
    StateError,
    UndeliveredError,
    UnsupportedError,
)
from moelink.formats import Format, Quantized, format_names, get_format, register_format
from moelink.hooks import Hook
from moelink.initialize import init
from moelink.output import DispatchHandle, DispatchOutput
from moelink.transports.base import Traffic
from moelink.version import __version__ as __version__

__all__ = [
    "ArgumentError",
    "CapacityError",
    "ClosedError",
    "Communicator",
    "ConcurrencyError",
    "ConfigError",
    "ConfigMismatchError",
    "DeviceCommunicator",
    "DispatchHandle",
    "DispatchOutput",
    "EPConfig",
    "ExpiredRowsError",
    "ForeignHandleError",
    "ForkedError",
    "Format",
    "Hook",
    "MemoryReport",
    "MoelinkError",
    "NetworkTimeoutError",
    "PeerAbortedError",
    "PeerError",
    "PeerLeftError",
    "PeerLostError",
    "PeerTimeoutError",
    "PendingError",
    "ProtocolError",
    "Quantized",
    "RoutingError",
    "StateError",
    "Traffic",
    "UndeliveredError",
    "UnsupportedError",
    "format_names",
    "get_format",
    "init",
    "init_devices",
    "register_format",
]
