"""Open communicators by name: an operator's arguments are tensors, numbers and strings, so it names its communicator.

This is the one registry of the package besides the budget of multiprocessors that is not reached from a communicator:
a compiled graph outlives every Python object that was around when it was traced. It holds nothing alive.

A name counts the communicators of this process and ends in a digest of the configuration. It is part of compiled
graphs, so it must be the same when a program runs again (or no compilation cache would ever hit), and another when
sizes differ (or a cached graph for other sizes would).
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.errors import ClosedError

if TYPE_CHECKING:
    from moelink.ops.endpoint import Endpoint


class Registry:
    """Endpoints of open communicators by name, and what orders their operators."""

    def __init__(self) -> None:
        self._endpoints: weakref.WeakValueDictionary[str, Endpoint] = weakref.WeakValueDictionary()
        self._orders: weakref.WeakValueDictionary[torch.device, Tensor] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def add(self, endpoint: Endpoint, config: EPConfig) -> str:
        """Enter ``endpoint`` and return its name, like ``"0:9f86d081"``."""
        text = f"{config.shared_fields()} {config.rank}"
        name = f"{next(self._numbers)}:{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        self._endpoints[name] = endpoint
        return name

    def find(self, name: str, what: str) -> Endpoint:
        """The endpoint called ``name``; ClosedError naming ``what`` when its communicator is gone."""
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            raise ClosedError(what)
        return endpoint

    def order(self, device: torch.device) -> Tensor:
        """The tensor that every operator on ``device`` declares to write: see :mod:`moelink.ops.library`."""
        order = self._orders.get(device)
        if order is None:
            order = self._orders[device] = torch.zeros(1, device=device)
        return order


REGISTRY = Registry()
