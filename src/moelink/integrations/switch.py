"""Read the environment variable that switches a plugin of an engine on, with the settings in it.

Engines load every plugin that is installed, in every process. moelink's do nothing unless their variable asks: "0" or
nothing is off, "1" is on, and ``name=value,name=value`` is on with settings of :func:`moelink.init`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from moelink.config import TransportName
from moelink.env import Variable
from moelink.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """Arguments of :func:`moelink.init` that a variable may set.

    Attributes:
        transport: "auto", "symmetric" or "collective".
        num_sms: SMs that kernels of moelink may occupy; None leaves the choice to moelink.
        timeout: seconds until a call names the peer that did not arrive.
    """

    transport: TransportName = "auto"
    num_sms: int | None = None
    timeout: float = 60.0

    def arguments(self) -> dict[str, Any]:
        """Return them as arguments of :func:`moelink.init`."""
        return {"transport": self.transport, "num_sms": self.num_sms, "timeout": self.timeout}


def read(variable: Variable, environ: Mapping[str, str] = os.environ) -> Settings | None:
    """Return the settings in ``variable``, or None where it is off.

    Raises:
        ConfigError: it is neither 0, 1 nor a list of settings.
    """
    text = variable.read(environ).strip()
    if text in ("", "0"):
        return None
    return Settings() if text == "1" else _parse(variable.name, text)


def _parse(name: str, text: str) -> Settings:
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or key in found or key not in Settings.__dataclass_fields__:
            known = ", ".join(f"{field}=" for field in Settings.__dataclass_fields__)
            raise ConfigError(name, f"0, 1, or settings, each once, of {known}", text)
        try:
            found[key] = {"transport": str, "num_sms": int, "timeout": float}[key](value)
        except ValueError as error:
            raise ConfigError(name, f"a number for {key}", value) from error
    if found.get("transport", "auto") not in get_args(TransportName):
        raise ConfigError(name, f"a transport of {', '.join(get_args(TransportName))}", found["transport"])
    return Settings(**found)
