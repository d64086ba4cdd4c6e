"""Triton kernels of the symmetric transport: one protocol step a file, the same source compiled and interpreted.

===========  ============================================================================================
signals      publish, wait, give up: the memory order of every signal
routes       who owns an expert; what the tokens before a given one need
numeric      rounding
send         dispatch, sender role: count, quantise, one message per (token, destination rank)
receive      dispatch, receiver role: wait, place rows
plan         ... where they go
padding      ... and the zeros behind each group
dispatch     the two roles as one launch or two
send_back    combine, expert role: ``send_tokens_back``
reduce       combine, home role: ``wait_for_all_arrivals``, ``reduce_and_copy_to_output``
combine      the two roles as one launch or two
spec         what is fixed when a kernel is compiled
cache_keys   so that every process finds what another one has compiled
activation   SiLU and quantise between the two grouped matmuls
epilogues    Triton halves of the ready epilogues
contract     the launchers over caller-owned buffers, under the contract's names; exported here
===========  ============================================================================================

Importing this package does not import triton; its modules do, and so does taking one of the contract's names from it.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """The contract's names, on first use: ``from moelink.kernels import ep_init, ep_fused_dispatch``."""
    if not name.startswith("__") and name != "contract":
        contract = importlib.import_module("moelink.kernels.contract")
        if name in contract.__all__:
            return getattr(contract, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
