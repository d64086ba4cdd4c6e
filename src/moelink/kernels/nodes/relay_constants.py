"""Gather launch constants between nodes: of relays, which go there where the transport has two levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from moelink.kernels.launch.cache_keys import Constants
from moelink.kernels.launch.grid import relaying_ctas
from moelink.memory.workspace import Workspace

_REGIONS = ("marks_flag", "marks", "relay_flag", "relays", "staged_marks", "staged_relays")
_MOST_MARKED = 4096


@dataclass(frozen=True, repr=False, eq=False)
class RelayConstants(Constants):
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
    OFFSET_MARKS_FLAG: int
    OFFSET_MARKS: int
    OFFSET_RELAY_FLAG: int
    OFFSET_RELAYS: int
    OFFSET_STAGED_MARKS: int
    OFFSET_STAGED_RELAYS: int


def relay_constants(workspace: Workspace, device: torch.device, max_block: int) -> dict[str, int]:
    """Return the fields of :class:`RelayConstants`. At most ``max_block`` words are copied at a time."""
    if not workspace.two_level:
        return dict.fromkeys(RelayConstants.__dataclass_fields__, 0)
    regions, relay, power = workspace.regions, workspace.relay, triton.next_power_of_2
    config, tokens = workspace.config, max(1, workspace.config.max_tokens_per_rank)
    head, tail = relay["ids"].offset // 4, (relay["experts"].offset - relay["positions"].offset) // 4
    marked = min(power(tokens), max(1, _MOST_MARKED // max(power(config.topk), power(workspace.world_size))))
    return {
        "RELAY_BYTES": workspace.relay_bytes, "RELAY_EXPERTS": relay["experts"].offset,
        "RELAY_SLOTS": relay["slots"].offset, "MARKS_BYTES": regions["marks"].shape[1],
        "MARKED_AT_ONCE": 4 if device.type == "cpu" else marked, "FORWARDERS": relaying_ctas(workspace, device),
        "FORWARD_BLOCK": min(power(head), max_block), "FORWARD_TAIL": power(tail),
        **{f"OFFSET_{name.upper()}": regions[name].offset for name in _REGIONS},
    }  # fmt: skip


def inter_node_offset(workspace: Workspace, name: str) -> int:
    """Return the offset of a region that exists between nodes only, or only with one or two levels there; where it does
    not, 0, which no kernel uses."""
    return next((region.offset for region in workspace.regions if region.name == name), 0)
