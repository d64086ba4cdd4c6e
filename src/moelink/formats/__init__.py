"""Name the token formats, which say how rows travel and arrive.

=================  ================  ==================  =====  =============================================
name               payload           scales              group  scale layout ("expert" output)
=================  ================  ==================  =====  =============================================
bf16               bfloat16          none                       none
fp32               float32           none                       none
fp64               float64           none                       none
fp8_block128       float8_e4m3fn     float32             128    transposed [hidden / 128, rows], rows by 4
fp8_block128_e8m0  float8_e4m3fn     int32, 4 of E8M0    128    transposed [ceil(hidden / 512), rows], by 4
fp8_token          float8_e4m3fn     float32             row    row-major [rows, 1]
mxfp8              float8_e4m3fn     float8_e8m0fnu      32     128x4 tiles
nvfp4              uint8, 2 codes    float8_e4m3fn       16     128x4 tiles
mxfp4              uint8, 2 codes    float8_e8m0fnu      32     row-major [rows, hidden / 32]
=================  ================  ==================  =====  =============================================

To add a format, pass an instance of a :class:`Format` subclass to :func:`register_format` on every rank.
Importing this package touches no device and does not import triton; ``Format.codec`` does, on first use.
"""

from __future__ import annotations

from moelink.formats.base import Format, Quantized, ScaleLayout
from moelink.formats.registry import format_names, get_format, register_format

__all__ = ["Format", "Quantized", "ScaleLayout", "format_names", "get_format", "register_format"]
