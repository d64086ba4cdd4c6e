"""moelink as the token dispatcher of SGLang's expert parallelism.

Set ``MOELINK_SGLANG=1`` and start SGLang with ``--moe-a2a-backend deepep_v2``, whose format moelink's dispatcher speaks
(``docs/sglang.md``). SGLang finds :func:`moelink.integrations.sglang.plugin.register` by its entry point.

Needs the extra ``moelink[sglang]``. This package can be imported without SGLang; subclasses of its classes are in
:mod:`moelink.integrations.sglang.dispatcher`, which the plugin imports once it has checked the release.
"""

from moelink.integrations.sglang.plugin import register
from moelink.integrations.sglang.settings import COMMUNICATORS, close

__all__ = ["COMMUNICATORS", "close", "register"]
