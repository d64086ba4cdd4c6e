"""Hold the Triton codecs of the formats: the arithmetic of ``moelink.formats``, bit for bit.

:class:`Codec` does not need triton. Each format's file does; ``Format.codec`` imports it on first use.
"""

from __future__ import annotations

from moelink.formats.device.codec import Codec

__all__ = ["Codec"]
