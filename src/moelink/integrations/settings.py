"""Settings that all integrations have, the communicators that their layers share, and the start of a plugin.

Frameworks build a dispatcher for each layer, and layers run one after the other. A communicator for each layer would
multiply the memory, so dispatchers look up theirs here, by process group and arguments.

Engines load every installed plugin in every process. A plugin of moelink does nothing unless its environment variable
is set: "0" or an empty value is off, "1" is on, and ``name=value,name=value`` is on with :class:`Settings`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist

import moelink
from moelink.control.exchange import TIMEOUT, Peers
from moelink.control.handshake import compare
from moelink.control.values import gather_values
from moelink.env import Variable
from moelink.errors import ConfigError, UnsupportedError
from moelink.integrations.versions import require
from moelink.names import TransportName

_READ: dict[str, Callable[[str], Any]] = {
    "transport": str, "num_sms": int, "timeout": float, "batch_invariant": lambda text: bool(("0", "1").index(text)),
}  # fmt: skip
"""By name, the settings that an environment variable may have, and how they are read."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of :func:`moelink.init` that users of an integration choose. The rest follows from the model.

    Attributes:
        transport: "auto", "symmetric" or "collective".
        num_sms: SMs that kernels of moelink may occupy; None leaves the choice to moelink.
        timeout: seconds until a call names the peer that did not arrive.
        batch_invariant: a token's bits depend on the token alone, as far as the framework's parts do.
    """

    transport: TransportName = "auto"
    num_sms: int | None = None
    timeout: float = 60.0
    batch_invariant: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return them as arguments of :func:`moelink.init`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def read(variable: Variable, environ: Mapping[str, str] = os.environ) -> Settings | None:
    """Return the settings in ``variable``, or None if it is off.

    Raises:
        ConfigError: the value is neither 0, 1 nor a list of settings.
    """
    text = variable.read(environ).strip()
    if text in ("", "0"):
        return None
    found: dict[str, Any] = {}
    for part in () if text == "1" else text.split(","):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or key in found or key not in _READ:
            known = ", ".join(f"{name}=" for name in _READ)
            raise ConfigError(variable.name, f"0, 1, or settings, each once, of {known}", text)
        try:
            found[key] = _READ[key](value)
        except ValueError as error:
            raise ConfigError(variable.name, f"a number for {key}", value) from error
    if found.get("transport", "auto") not in get_args(TransportName):
        raise ConfigError(variable.name, f"a transport of {', '.join(get_args(TransportName))}", found["transport"])
    return Settings(**found)


def plugin(
    variable: Variable, package: str, names: Sequence[tuple[str, ...]], environ: Mapping[str, str]
) -> tuple[Settings, str, list[Any]] | None:
    """Start a plugin: return its settings, the release of ``package`` and the owners of ``names``; None if it is off.

    Nothing of ``package`` is imported unless ``variable`` is on and the release is supported.

    Args:
        names: attributes to be replaced: a module, then attributes; the owner is the object that has the last one.

    Raises:
        ConfigError: as :func:`read`.
        UnsupportedError: the release was not tested, or lacks one of ``names``.
    """
    settings = read(variable, environ)
    if settings is None:
        return None
    release = require(package)
    return settings, release, [_owner(each, package, release, variable) for each in names]


def _owner(names: tuple[str, ...], package: str, release: str, variable: Variable) -> Any:
    owner: Any = None
    found: Any = importlib.import_module(names[0])
    for name in names[1:]:
        owner, found = found, None if found is None else getattr(found, name, None)
    if found is None:
        raise UnsupportedError(
            f"{package} {release}: expected {'.'.join(names)}, got no such name; unset {variable.name}, and report it"
        )
    return owner


class SharedCommunicators:
    """Open communicators of one adapter in this process, by process group and arguments."""

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
            options: of the framework, which ranks must agree on and ``init`` does not know; compared by their text.

        Raises:
            ConfigError, ConfigMismatchError, PeerAbortedError, PeerTimeoutError: as :func:`moelink.init`. If an option
                differs between ranks, the error names it and the ranks, on every rank.
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
        """Close all of them, as at the end of training. Later calls of their layers raise ClosedError. Collective."""
        for communicators in list(self._open.values()):
            for ep in communicators.values():
                ep.close()
        self._open.clear()


def device_of(kind: str) -> torch.device:
    """Return this process's device of type ``kind``: the current CUDA device, or the CPU.

    Raises:
        ConfigError: moelink does not support that type of device.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    raise ConfigError("device", "a mesh of cuda or cpu devices", kind)
