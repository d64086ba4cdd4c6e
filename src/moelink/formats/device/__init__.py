"""Encode and decode rows in Triton: the arithmetic of ``moelink.formats``, bit for bit.

:class:`Codec`, the compile-time description of a format for kernels, does not need triton. The other files here do;
``Format.codec`` imports them on first use, so that platforms without triton can import all formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Codec:
    """Device functions and constants of one format. A kernel takes ``encode`` and ``decode`` as constexpr arguments.

    Legend: NG groups, GS elements a group, both powers of two; PE = payload elements a group. GS is GROUP, except in
    formats whose rows are not divided (plain ones and fp8_token): these work on blocks of any shape [NG, GS].

    ``encode(x, input_scale, NATIVE)`` -> ``(payload, scale)``:
        x is fp32 [NG, GS], zero where masked; input_scale a scalar fp32 (a value or the number 1.0, ignored by
        formats without a global scale) or, in the activation, fp32 [NG]. payload is unsigned [NG, PE] of ELEMENT_BYTES
        bytes: e4m3 bits, two e2m1 codes a byte (even element low), or the raw bits of a plain format. scale is [NG]:
        fp32 for fp8_block128 and fp8_token, uint8 bits for the other quantised formats, and uint8 zeros, not to be
        stored, for plain ones.
    ``decode(payload, scale, input_scale, NATIVE)`` -> fp32 [NG, GS]:
        the inverse, of the same types. A NaN has unspecified bits.

    NATIVE False uses integer operations in place of narrow casts: the same bits under the stock interpreter and on
    every GPU. NATIVE True uses the conversions of NVIDIA GPUs from sm_89, and gives the same bits there. Where each
    element is one that bf16 has, ``encode`` gets 2 in its place.

    Rows already in a plain format's own dtype are to be copied as bytes, without the codec, which alters NaN payloads.

    Attributes:
        GROUP: elements that are encoded together (``Format.group``).
        ELEMENT_BYTES: bytes of one payload element.
        PAYLOAD_BYTES_PER_GROUP: bytes of one group's payload.
        SCALE_BYTES: bytes of one scale, 0 without scales. Several may share an element of ``Format.scale_dtype``.
        encode, decode: the functions; None for fp64, whose rows travel only as bytes (convert other dtypes before).
    """

    GROUP: int
    ELEMENT_BYTES: int
    PAYLOAD_BYTES_PER_GROUP: int
    SCALE_BYTES: int
    encode: Any
    decode: Any
