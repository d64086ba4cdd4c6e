"""moelink as the all-to-all of vLLM's expert parallelism.

Set ``MOELINK_VLLM=1`` and start vLLM with ``--enable-expert-parallel`` and more than one data-parallel rank
(``docs/vllm.md``). vLLM finds :func:`moelink.integrations.vllm.plugin.register` by its entry point.

Needs the extra ``moelink[vllm]``. This package can be imported without vLLM; subclasses of its classes are in
:mod:`moelink.integrations.vllm.prepare_finalize`, which the plugin imports once it has checked the release.
"""

from moelink.integrations.vllm.plugin import register
from moelink.integrations.vllm.settings import COMMUNICATORS, close

__all__ = ["COMMUNICATORS", "close", "register"]
