"""Digest all layouts in which ranks of one communicator read each other's bytes.

Ranks compare the digest at init, after versions. Two builds of one version, of different commits say, may lay out a
message or the block otherwise; without the comparison gloo would abort a receiver whose message is longer than it
expects, and fields in another order would give wrong rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from moelink.config import EPConfig
from moelink.memory import protocol
from moelink.memory.layout import DispatchMessage, RegionTable
from moelink.memory.workspace import Workspace
from moelink.transports.collective.group_wire import HEADER_FIELDS


def layout_digest(config: EPConfig) -> str:
    """Return 16 hexadecimal digits, equal on ranks whose builds agree about all bytes that go from one to another."""
    return blake2b("\n".join(_layouts(config)).encode(), digest_size=8).hexdigest()


def _layouts(config: EPConfig) -> Iterator[str]:
    """Describe headers, messages, the block of symmetric memory, and the numbers that its words have."""
    yield f"headers {HEADER_FIELDS}"
    for with_ids in (True, False):
        for weight_dtype in (config.weight_dtype, None):
            message = DispatchMessage(
                config.format, config.hidden_size, config.topk, with_ids=with_ids, weight_dtype=weight_dtype
            )
            yield f"message of {message.nbytes} bytes: {_regions(message.parts)}"
    yield f"message home of {config.home_message_bytes} bytes: {_regions(config.home_row.parts)}"
    workspace = Workspace(config)
    yield f"block of {workspace.nbytes} bytes: {_regions(workspace.regions)}"
    yield f"numbers {sorted((name, value) for name, value in vars(protocol).items() if name.isupper())}"


def _regions(table: RegionTable) -> str:
    return ", ".join(f"{r.name} {r.dtype} {tuple(r.shape)} at {r.offset}" for r in table)
