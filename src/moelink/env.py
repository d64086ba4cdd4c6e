"""Every ``MOELINK_*`` environment variable, declared once: name, default, meaning.

A variable never changes results, only resources and diagnostics. ``moelink env`` prints this table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable. ``default`` is the text used when it is unset."""

    name: str
    default: str
    meaning: str

    def read(self, environ: Mapping[str, str] = os.environ) -> str:
        """The value set in ``environ``, or the default."""
        return environ.get(self.name, self.default)


DEBUG = Variable("MOELINK_DEBUG", "0", "1 checks every access to a workspace region against its bounds")
PROBE_HOST = Variable(
    "MOELINK_PROBE_HOST", "", "address peers probe this rank at; default: the one that reaches MASTER_ADDR"
)

VARIABLES: tuple[Variable, ...] = (DEBUG, PROBE_HOST)
