"""The plugin that vLLM loads in each of its processes (entry point ``vllm.general_plugins``).

vLLM 0.33 has no registry of all-to-all backends, and ``--all2all-backend`` takes a closed list of names. Every layer of
experts, whatever its quantisation, ends in the constructor of ``FusedMoEKernel``, which joins what communicates to what
computes. :func:`register` wraps that constructor: one name, which all modules look up on the class. With a registry of
vLLM's own (vllm#50556) it will hand over :func:`moelink.integrations.vllm.prepare_finalize.make` instead.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

from moelink import env
from moelink.errors import UnsupportedError
from moelink.integrations import switch
from moelink.integrations.versions import require

_KERNEL = ("vllm.model_executor.layers.fused_moe.modular_kernel", "FusedMoEKernel", "__init__")
_GATHERS = (
    ("vllm.distributed.device_communicators.all2all", "AgRsAll2AllManager", "dispatch"),
    ("vllm.distributed.device_communicators.all2all", "AgRsAll2AllManager", "dispatch_router_logits"),
)
_MARK = "moelink_settings"
_log = logging.getLogger("moelink")


def register(environ: Mapping[str, str] = os.environ) -> bool:
    """Let the experts of this process communicate over moelink, if ``MOELINK_VLLM`` asks. Return whether it does.

    A second call does nothing. Nothing of vLLM is imported, let alone patched, unless the variable asks for it.

    Raises:
        ConfigError: the variable is neither 0, 1 nor settings.
        UnsupportedError: this release of vLLM was not tested, or lacks a name to be patched. Nothing is patched.
    """
    settings = switch.read(env.VLLM, environ)
    if settings is None:
        return False
    release = require("vllm")
    found = {names: _find(*names, release=release) for names in (_KERNEL, *_GATHERS)}
    kernel, init = found[_KERNEL]
    if hasattr(init, _MARK):
        return True
    from moelink.integrations.vllm.prepare_finalize import make

    @functools.wraps(init)
    def over_moelink(self: Any, prepare_finalize: Any, fused_experts: Any) -> None:
        init(self, make(fused_experts, settings), fused_experts)

    setattr(over_moelink, _MARK, settings)
    kernel.__init__ = over_moelink
    for names in _GATHERS:
        setattr(found[names][0], names[-1], _refuse_gather)
    _log.info("vLLM %s: experts communicate over moelink, %s", release, settings)
    return True


def _refuse_gather(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for the all-gather of vLLM, which a layer without a ``FusedMoEKernel`` would fall back to."""
    raise UnsupportedError(
        "quantization: expected a method that vLLM runs in its modular kernel, got one that gathers the tokens of all "
        f"ranks by itself; choose another quantisation, or unset {env.VLLM.name}"
    )


def _find(module: str, owner: str, name: str, *, release: str) -> tuple[Any, Any]:
    """Return a class of vLLM and its attribute ``name``."""
    cls = getattr(importlib.import_module(module), owner, None)
    attribute = getattr(cls, name, None)
    if attribute is None:
        raise UnsupportedError(
            f"vllm {release}: expected {module}.{owner}.{name}, got no such name; unset {env.VLLM.name}, and report it"
        )
    return cls, attribute
