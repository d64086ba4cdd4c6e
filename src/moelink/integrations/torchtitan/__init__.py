"""moelink as the expert-parallel token dispatcher of torchtitan.

Name the overrides on the command line, or in ``override.imports`` of a configuration (``docs/torchtitan.md``):

* ``moelink.integrations.torchtitan.overrides.dispatcher``
* ``moelink.integrations.torchtitan.overrides.moe``, for auxiliary losses and padding
* ``moelink.integrations.torchtitan.overrides.selective_checkpointing``

Needs the extra ``moelink[torchtitan]``. This package can be imported without torchtitan; its modules ``overrides``
and ``dispatcher`` raise UnsupportedError then, as they do with a release that was not tested.
"""

from moelink.integrations.torchtitan.settings import COMMUNICATORS, close, set_padding_mask

__all__ = ["COMMUNICATORS", "close", "set_padding_mask"]
