"""Expert-parallel dispatch and combine for Mixture-of-Experts models.

``init`` makes a communicator, whose ``dispatch`` sends each token to the ranks that own its top-k experts and whose
``combine`` brings the experts' outputs home and sums them. Importing this package touches no device and loads no torch:
the first use of a name imports its module.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from moelink.version import __version__ as __version__

if TYPE_CHECKING:
    from moelink import activation as activation
    from moelink import contract as contract
    from moelink import epilogues as epilogues
    from moelink import metrics as metrics
    from moelink import nn as nn
    from moelink import ops as ops
    from moelink import testing as testing
    from moelink.communicator import Communicator
    from moelink.config import EPConfig, MemoryReport
    from moelink.control.membership import Membership
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
        MembershipError,
        MoelinkError,
        NetworkTimeoutError,
        PeerAbortedError,
        PeerError,
        PeerLeftError,
        PeerLostError,
        PeerTimeoutError,
        PendingError,
        ProtocolError,
        RankMaskedError,
        RoutingError,
        StateError,
        UndeliveredError,
        UnsupportedError,
    )
    from moelink.formats import Format, Quantized, format_names, get_format, register_format
    from moelink.hooks import Hook
    from moelink.initialize import init, join
    from moelink.output import DispatchHandle, DispatchOutput
    from moelink.transports.base import Traffic

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
    "Membership",
    "MembershipError",
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
    "RankMaskedError",
    "RoutingError",
    "StateError",
    "Traffic",
    "UndeliveredError",
    "UnsupportedError",
    "format_names",
    "get_format",
    "init",
    "init_devices",
    "join",
    "register_format",
]

_HOMES = {
    "Communicator": "communicator",
    "DeviceCommunicator": "devices",
    "DispatchHandle": "output",
    "DispatchOutput": "output",
    "EPConfig": "config",
    "Format": "formats",
    "Hook": "hooks",
    "Membership": "control.membership",
    "MemoryReport": "config",
    "Quantized": "formats",
    "Traffic": "transports.base",
    "format_names": "formats",
    "get_format": "formats",
    "init": "initialize",
    "init_devices": "devices",
    "join": "initialize",
    "register_format": "formats",
}
"""The module of each public name; those of errors are in ``errors``."""
_MODULES = (
    "activation",
    "contract",
    "epilogues",
    "errors",
    "formats",
    "integrations",
    "metrics",
    "nn",
    "ops",
    "testing",
)
"""Public modules, which are attributes of this one."""

if not TYPE_CHECKING:  # a type checker takes any name if it sees __getattr__

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of the package, at its first use."""
        if name in __all__:
            value = getattr(importlib.import_module(f"moelink.{_HOMES.get(name, 'errors')}"), name)
        elif not name.startswith("_") and find_spec(f"moelink.{name}"):
            value = importlib.import_module(f"moelink.{name}")
        else:
            raise AttributeError(f"module 'moelink' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Return the public names."""
        return sorted([*__all__, *_MODULES, "__version__"])
