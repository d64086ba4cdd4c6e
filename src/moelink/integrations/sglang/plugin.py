"""The plugin that SGLang loads in each of its processes (entry point ``sglang.srt.plugins``).

SGLang makes the dispatcher of every layer of experts in ``create_moe_dispatcher``, and its ``HookRegistry`` puts a
function of ours around it. ``--moe-a2a-backend`` takes a closed list of names; moelink stands for ``deepep_v2``.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

from moelink import env
from moelink.errors import MoelinkError, UnsupportedError
from moelink.integrations import switch
from moelink.integrations.switch import Settings
from moelink.integrations.versions import require

TARGET = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"
"""What the hook is around."""

_log = logging.getLogger("moelink")


def register(environ: Mapping[str, str] = os.environ) -> bool:
    """Let the experts of this process communicate over moelink, if ``MOELINK_SGLANG`` asks. Return whether it does.

    A second call does nothing. Nothing of SGLang is imported, let alone hooked, unless the variable asks for it.

    Raises:
        ConfigError: the variable is neither 0, 1 nor settings.
        UnsupportedError: this release of SGLang was not tested, or lacks the name to be hooked. Nothing is hooked.
    """
    settings = switch.read(env.SGLANG, environ)
    if settings is None:
        return False
    release = require("sglang")
    module, _, name = TARGET.rpartition(".")
    if not hasattr(importlib.import_module(module), name):
        raise UnsupportedError(
            f"sglang {release}: expected {TARGET}, got no such name; unset {env.SGLANG.name}, and report it"
        )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = HookRegistry._hooks.get(TARGET, ())
    if not any(getattr(hook, "func", None) is around for _, hook, _ in hooks):
        HookRegistry.register(TARGET, functools.partial(around, settings), HookType.AROUND)
        _log.info("SGLang %s: experts communicate over moelink, %s", release, settings)
    return True


def load() -> None:
    """Do :func:`register`; the entry point. SGLang only logs what a plugin raises, and would go on without moelink.

    Raises:
        SystemExit: :func:`register` has raised; the message is that of its error.
    """
    try:
        register()
    except MoelinkError as error:
        raise SystemExit(f"moelink: {error}") from error


def around(settings: Settings, original: Any, moe_runner_config: Any, quant_method: Any) -> Any:
    """Return moelink's dispatcher for a layer, in place of the one that ``original`` would make."""
    from moelink.integrations.sglang.dispatcher import make

    return make(moe_runner_config, quant_method, settings)
