"""The plugin that SGLang loads in each of its processes (entry point ``sglang.srt.plugins``).

SGLang makes the dispatcher of every layer of experts in ``create_moe_dispatcher``, and its ``HookRegistry`` wraps that
function in one of moelink. ``--moe-a2a-backend`` takes a closed list of names; moelink replaces ``deepep_v2``.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from moelink import env
from moelink.errors import MoelinkError
from moelink.integrations.settings import Settings, plugin

TARGET = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"
"""The function that is wrapped."""

_log = logging.getLogger("moelink")


def register(environ: Mapping[str, str] = os.environ) -> bool:
    """Let the experts of this process communicate over moelink if ``MOELINK_SGLANG`` is on. Return whether it is.

    A second call does nothing. Nothing of SGLang is imported or hooked unless the variable is on.

    Raises:
        ConfigError: the variable is neither 0, 1 nor settings.
        UnsupportedError: this release of SGLang was not tested, or lacks the name to be hooked. Nothing is hooked.
    """
    module, _, name = TARGET.rpartition(".")
    found = plugin(env.SGLANG, "sglang", ((module, name),), environ)
    if found is None:
        return False
    settings, release, _owners = found
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = HookRegistry._hooks.get(TARGET, ())
    if not any(getattr(hook, "func", None) is around for _, hook, _ in hooks):
        HookRegistry.register(TARGET, functools.partial(around, settings), HookType.AROUND)
        _log.info("SGLang %s: experts communicate over moelink, %s", release, settings)
    return True


def load() -> None:
    """Call :func:`register`; the entry point. SGLang only logs errors of a plugin and would continue without moelink.

    Raises:
        SystemExit: an error of :func:`register`, with its message.
    """
    try:
        register()
    except MoelinkError as error:
        raise SystemExit(f"moelink: {error}") from error


def around(settings: Settings, original: Any, moe_runner_config: Any, quant_method: Any) -> Any:
    """Return moelink's dispatcher for a layer, in place of the result of ``original``."""
    from moelink.integrations.sglang.dispatcher import make

    return make(moe_runner_config, quant_method, settings)
