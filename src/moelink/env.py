"""Every ``MOELINK_*`` environment variable, declared once: name, default, meaning.

A variable never changes results, only resources and diagnostics; those that switch a plugin on put moelink in the place
of what a framework would have used. ``moelink env --full`` prints this table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from moelink.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """One environment variable. ``default`` is the text used when it is unset."""

    name: str
    default: str
    meaning: str

    def read(self, environ: Mapping[str, str] = os.environ) -> str:
        """The value set in ``environ``, or the default."""
        return environ.get(self.name, self.default)

    def is_on(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether a variable that is 0 or 1 is 1. Raises ConfigError for another value, such as "true"."""
        value = self.read(environ)
        if value not in ("", "0", "1"):
            raise ConfigError(self.name, "0 or 1 in the environment", value)
        return value == "1"


DEBUG = Variable(
    "MOELINK_DEBUG", "0",
    "1 checks every access to a workspace region against its bounds, overwrites rows in place that have ended, and "
    "compares what ranks of a transformers model pass in mode 'allreduce'",
)  # fmt: skip
PROBE_HOST = Variable(
    "MOELINK_PROBE_HOST", "", "address peers probe this rank at; default: the one that reaches MASTER_ADDR"
)
METRICS = Variable(
    "MOELINK_METRICS", "",
    "port, or HOST:PORT, at which each process serves the numbers of its communicators to Prometheus: rank 0; rank r "
    "serves at PORT + r",
)  # fmt: skip

_SETTINGS = (
    "1 lets its experts communicate over moelink; settings instead of 1: transport=symmetric,num_sms=24,timeout=60"
)
VLLM = Variable("MOELINK_VLLM", "0", f"plugin of vLLM: {_SETTINGS}")
SGLANG = Variable("MOELINK_SGLANG", "0", f"plugin of SGLang: {_SETTINGS}")

VARIABLES: tuple[Variable, ...] = (DEBUG, PROBE_HOST, METRICS, VLLM, SGLANG)
