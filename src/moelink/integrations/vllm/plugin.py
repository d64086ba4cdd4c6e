"""The plugin that vLLM loads in each of its processes (entry point ``vllm.general_plugins``).

vLLM has no registry of all-to-all backends, and ``--all2all-backend`` takes a closed list of names. Every layer of
experts, in any quantisation, ends in the constructor of ``FusedMoEKernel``, which joins communication and computation.
:func:`register` wraps that constructor: one name, which all modules look up on the class. With a registry in vLLM
(vllm#50556) it will register :func:`moelink.integrations.vllm.prepare_finalize.make` instead.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from moelink import env
from moelink.errors import UnsupportedError
from moelink.integrations.settings import plugin

_KERNEL = ("vllm.model_executor.layers.fused_moe.modular_kernel", "FusedMoEKernel", "__init__")
_MANAGER = ("vllm.distributed.device_communicators.all2all", "AgRsAll2AllManager")
_GATHERS = ("dispatch", "dispatch_router_logits")
_MARK = "moelink_settings"
_log = logging.getLogger("vllm.moelink")  # vLLM configures "vllm" alone


def register(environ: Mapping[str, str] = os.environ) -> bool:
    """Let the experts of this process communicate over moelink if ``MOELINK_VLLM`` is on. Return whether it is.

    A second call does nothing. Nothing of vLLM is imported or patched unless the variable is on.

    Raises:
        ConfigError: the variable is neither 0, 1 nor settings.
        UnsupportedError: this release of vLLM was not tested, or lacks a name to be patched. Nothing is patched.
    """
    found = plugin(env.VLLM, "vllm", (_KERNEL, *((*_MANAGER, name) for name in _GATHERS)), environ)
    if found is None:
        return False
    settings, release, (kernel, manager, _) = found
    init = kernel.__init__
    if hasattr(init, _MARK):
        return True
    from moelink.integrations.vllm.prepare_finalize import make

    @functools.wraps(init)
    def over_moelink(self: Any, prepare_finalize: Any, fused_experts: Any) -> None:
        init(self, make(fused_experts, settings), fused_experts)

    setattr(over_moelink, _MARK, settings)
    kernel.__init__ = over_moelink
    for name in _GATHERS:
        setattr(manager, name, _refuse_gather)
    _log.info("vLLM %s: experts communicate over moelink, %s", release, settings)
    return True


def _refuse_gather(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the all-gather of vLLM, the fallback of layers without a ``FusedMoEKernel``."""
    raise UnsupportedError(
        "quantization: expected a method that vLLM runs in its modular kernel, got one that gathers the tokens of all "
        f"ranks by itself; choose another quantisation, or unset {env.VLLM.name}"
    )
