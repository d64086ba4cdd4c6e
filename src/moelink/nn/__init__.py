"""Mixture-of-Experts layers on moelink, as ``torch.nn`` modules."""

from moelink.nn.experts import dequantized, grouped_experts

__all__ = ["dequantized", "grouped_experts"]
