"""moelink as the token dispatcher of Megatron-core's Mixture-of-Experts layers.

:func:`moelink.integrations.megatron.spec.with_moelink` puts it into a layer spec (``docs/megatron.md``).

Needs the extra ``moelink[megatron]``. This package can be imported without Megatron-core; its modules ``spec`` and
``layer`` raise UnsupportedError then, as they do with a release that was not tested.
"""

from moelink.integrations.megatron.settings import COMMUNICATORS, Settings, close

__all__ = ["COMMUNICATORS", "Settings", "close"]
