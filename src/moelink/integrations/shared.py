"""Communicators that the layers of a model share: one for each process group and set of arguments.

Frameworks build a dispatcher for each layer, and layers run one after the other. A communicator each would cost its
memory as often as there are layers, so dispatchers find theirs here. Process groups belong to the process, and so does
this registry of theirs; an adapter has one of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import moelink
from moelink.control.exchange import TIMEOUT, Peers
from moelink.control.handshake import compare
from moelink.control.values import gather_values
from moelink.errors import ConfigError


class SharedCommunicators:
    """Open communicators of one adapter, by process group and arguments."""

    def __init__(self) -> None:
        self._open: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, moelink.Communicator]] = (
            weakref.WeakKeyDictionary()
        )

    def get(
        self, group: dist.ProcessGroup, arguments: Mapping[str, Any], options: Mapping[str, object] | None = None
    ) -> moelink.Communicator:
        """Return the communicator over ``group`` with these ``arguments`` of :func:`moelink.init`. Collective if new.

        Args:
            group: the ranks that hold the experts of a layer.
            arguments: of :func:`moelink.init`, without ``group``.
            options: what the adapter itself does otherwise when ranks disagree, and ``init`` does not know of; they are
                compared by their text.

        Raises:
            ConfigError, ConfigMismatchError, PeerAbortedError, PeerTimeoutError: as :func:`moelink.init`. An option
                that ranks were given differently is named with the ranks, on every rank.
        """
        communicators = self._open.setdefault(group, {})
        texts = {name: str(value) for name, value in (options or {}).items()}
        key = (frozenset(arguments.items()), frozenset(texts.items()))
        if key not in communicators:
            if options is not None:
                timeout = arguments.get("timeout", TIMEOUT)
                compare(gather_values(texts, Peers(group, timeout, what="an exchange of options")))
            communicators[key] = moelink.init(group=group, **arguments)
        return communicators[key]

    def close(self) -> None:
        """Close all of them. Layers that used one raise ClosedError from then on. Collective."""
        for communicators in list(self._open.values()):
            for ep in communicators.values():
                ep.close()
        self._open.clear()


def device_of(kind: str) -> torch.device:
    """Return this process's device of type ``kind``: the current CUDA device, or the CPU.

    Raises:
        ConfigError: moelink does not run on devices of that type.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    raise ConfigError("device", "a mesh of cuda or cpu devices", kind)
