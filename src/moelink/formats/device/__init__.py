"""The Triton device functions of the formats: the arithmetic of ``moelink.formats``, bit for bit.

:class:`Codec` needs no triton; each format's file does, and is imported by ``Format.codec`` on first use.
"""

from __future__ import annotations

from moelink.formats.device.codec import Codec

__all__ = ["Codec"]
