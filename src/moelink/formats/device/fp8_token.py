"""Encode and decode fp8_token in Triton: the functions of fp8_block128, with a row in place of 128 elements."""

from moelink.formats.device.codec import Codec
from moelink.formats.device.fp8_block128 import decode, encode

CODEC = Codec(GROUP=16, ELEMENT_BYTES=1, PAYLOAD_BYTES_PER_GROUP=16, SCALE_BYTES=4, encode=encode, decode=decode)
