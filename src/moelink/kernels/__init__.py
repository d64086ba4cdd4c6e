"""Triton kernels of the symmetric transport: one protocol step a file, the same source compiled and interpreted.

======================  =================================================================================
dispatch                the two roles of dispatch as one launch or two
send                    its sender role: which program does what; send_cached: over an earlier call's routing
routes, counts          who owns an expert, what comes before a token; the program that tells how much comes
send_one, send_run      a program that sends one token, or a run of them, whose counts tallies shares
message, payload        a message: its place, what is small in it, its row
receive                 its receiver role: wait, place rows
plan                    where rows go, from the counts of all sources
place                   messages to their rows
padding, scale_layout   the zeros behind each group; scales of many tokens, in a launch of their own
combine                 the two roles of combine as one launch or two
send_back               its expert role: ``send_tokens_back``
reduce, finish          its home role: ``wait_for_all_arrivals``, ``reduce_and_copy_to_output``; the last steps
======================  =================================================================================

What they are built of:

======================  =================================================================================
signals                 publish, wait, give up: the memory order of every signal
ll_word                  words that are their own signal
small_calls, small_rows calls whose sums go home without flags: which these are; rows that are their own signal
drained                 when what lies in a peer's block may be overwritten
network, swallow        ranks of other nodes; what a rank that refused a call waits for there
numeric                 rounding
spec, combine_spec      what is fixed when a kernel is compiled
cut, turns              how a launch is cut into programs; which of these do what, with a budget of multiprocessors
cache_keys              so that every process finds what another one has compiled
activation, epilogues   SiLU and quantise between the two grouped matmuls; Triton halves of ready epilogues
contract                the launchers over caller-owned buffers, under the contract's names; exported here
======================  =================================================================================

Importing this package does not import triton; its modules do, and so does taking one of the contract's names from it.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """The contract's names, on first use: ``from moelink.kernels import ep_init, ep_fused_dispatch``."""
    if not name.startswith("__") and name != "contract":
        contract = importlib.import_module("moelink.contract")
        if name in contract.__all__:
            return getattr(contract, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
