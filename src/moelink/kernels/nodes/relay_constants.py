"""Gather launch constants between nodes: of relays, which go there where the transport has two levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from moelink.kernels.launch.cache_keys import OFFSET, Constants
from moelink.kernels.launch.grid import relaying_ctas
from moelink.memory.workspace import Workspace

_REGIONS = ("marks_flag", "marks", "relay_flag", "relays", "staged_marks", "staged_relays")
_MOST_MARKED = 4096


@dataclass(frozen=True, repr=False, eq=False)
class RelayConstants(Constants, regions=_REGIONS):
    """What dispatch needs for relays; zeros with one level.

    Attributes:
        RELAY_BYTES: bytes of a relay. RELAY_*: first byte of a part behind its message. MARKS_BYTES: bytes of a node's
            marks. MARKED_AT_ONCE: tokens whose marks are found at a time. FORWARDERS: forwarding CTAs.
        FORWARD_BLOCK, FORWARD_TAIL: words of a message that are copied at a time, before and after its ids.
        OFFSET_*: first byte of a region in a block (``memory.workspace``).
    """

    RELAY_BYTES: int
    RELAY_EXPERTS: int
    RELAY_SLOTS: int
    MARKS_BYTES: int
    MARKED_AT_ONCE: int
    FORWARDERS: int
    FORWARD_BLOCK: int
    FORWARD_TAIL: int


def relay_constants(workspace: Workspace, device: torch.device, max_block: int) -> dict[str, int]:
    """Return the fields of :class:`RelayConstants` but offsets. At most ``max_block`` words are copied at a time."""
    if not workspace.two_level:
        return {name: 0 for name in RelayConstants.__dataclass_fields__ if not name.startswith(OFFSET)}
    regions, relay, power = workspace.regions, workspace.relay, triton.next_power_of_2
    config, tokens = workspace.config, max(1, workspace.config.max_tokens_per_rank)
    head, tail = relay["ids"].offset // 4, (relay["experts"].offset - relay["positions"].offset) // 4
    marked = min(power(tokens), max(1, _MOST_MARKED // max(power(config.topk), power(workspace.world_size))))
    return {
        "RELAY_BYTES": workspace.relay_bytes, "RELAY_EXPERTS": relay["experts"].offset,
        "RELAY_SLOTS": relay["slots"].offset, "MARKS_BYTES": regions["marks"].shape[1],
        "MARKED_AT_ONCE": 4 if device.type == "cpu" else marked, "FORWARDERS": relaying_ctas(workspace, device),
        "FORWARD_BLOCK": min(power(head), max_block), "FORWARD_TAIL": power(tail),
    }  # fmt: skip
