"""Encode and decode bf16 and fp32 in Triton, as raw bits of fp32 values. fp64 has no codec."""

import triton
import triton.language as tl

from moelink.formats.device.casts import bf16_to_f32, f32_to_bf16
from moelink.formats.device.codec import Codec


@triton.jit
def bf16_encode(x, input_scale, NATIVE: tl.constexpr):
    return f32_to_bf16(x, NATIVE), tl.zeros([x.shape[0]], tl.uint8)


@triton.jit
def bf16_decode(payload, scale, input_scale, NATIVE: tl.constexpr):
    return bf16_to_f32(payload)


@triton.jit
def fp32_encode(x, input_scale, NATIVE: tl.constexpr):
    return x.to(tl.uint32, bitcast=True), tl.zeros([x.shape[0]], tl.uint8)


@triton.jit
def fp32_decode(payload, scale, input_scale, NATIVE: tl.constexpr):
    return payload.to(tl.float32, bitcast=True)


def _plain(nbytes, encode, decode):
    return Codec(
        GROUP=1, ELEMENT_BYTES=nbytes, PAYLOAD_BYTES_PER_GROUP=nbytes, SCALE_BYTES=0, encode=encode, decode=decode
    )


BF16 = _plain(2, bf16_encode, bf16_decode)
FP32 = _plain(4, fp32_encode, fp32_decode)
FP64 = _plain(8, None, None)
