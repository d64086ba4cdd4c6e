"""The gated activation between the two grouped products, quantised for the second one (``rows.activation``)."""

from moelink.rows.activation import ActivationOutput, Clamp, exp, gated_silu, silu_and_quantize

__all__ = ["ActivationOutput", "Clamp", "exp", "gated_silu", "silu_and_quantize"]
