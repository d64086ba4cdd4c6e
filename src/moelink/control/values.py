"""Gather small values of all ranks over a caller's process group, as JSON: nothing that a peer sends is unpickled.

``torch.distributed.all_gather_object`` unpickles what peers send, and a pickle runs code. Here a value is JSON text, in
which a byte string stands as ``{"bytes": "<hexadecimal>"}``. Sizes are exchanged and checked before the text.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from moelink.control.exchange import Peers, all_gather
from moelink.errors import ProtocolError, UnsupportedError

MAX_VALUE_BYTES = 1 << 26
"""No rank's text is longer."""

_PHASE = "an exchange of values"


def gather_values(value: Any, peers: Peers | dist.ProcessGroup | None = None) -> list[Any]:
    """Gather ``value`` of every rank, by rank. Collective over ``peers``, None for the default group.

    Args:
        value: None, bool, int, float, str, bytes, and lists, tuples and dicts with text keys of these. Tuples arrive as
            lists.
        peers: the ranks and their time; a group is :class:`~moelink.control.exchange.Peers` with the default time.

    Raises:
        TypeError: the value has another type; before any communication.
        UnsupportedError: a rank's text is longer than ``MAX_VALUE_BYTES``; on every rank.
        ProtocolError: a peer's text is malformed; it names the peer.
        PeerTimeoutError: a rank did not come in time, or (PeerLostError) its process is gone.
    """
    peers = peers if isinstance(peers, Peers) else Peers(peers, what=_PHASE)
    group = peers.own
    text = json.dumps(value, default=_hexadecimal).encode()
    rank = group.rank()
    device = _device(group)

    sizes = [int(size) for size in all_gather(torch.tensor([len(text)], device=device), peers)]
    longest = max(sizes)
    if longest > MAX_VALUE_BYTES or min(sizes) < 1:
        raise UnsupportedError(
            f"{_PHASE}: expected 1 to {MAX_VALUE_BYTES} bytes from each rank, got {sizes}; pass less at a time"
        )
    padded = torch.frombuffer(bytearray(text.ljust(longest, b" ")), dtype=torch.uint8).to(device)
    return [
        _decode(part[:size].numpy().tobytes(), rank=rank, peer=peer)
        for peer, (part, size) in enumerate(zip(all_gather(padded, peers), sizes, strict=True))
    ]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the CPU if the group has a backend for it, else this process's CUDA device (a group of NCCL alone)."""
    backends = dist.get_backend_config(group)
    if "cuda" in backends and "cpu" not in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _hexadecimal(value: object) -> dict[str, str]:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    raise TypeError(f"expected values of JSON or bytes, got {type(value).__name__}; gather a simpler value")


def _bytes_of(said: dict[str, Any]) -> Any:
    return bytes.fromhex(said["bytes"]) if said.keys() == {"bytes"} else said


def _decode(text: bytes, *, rank: int, peer: int) -> Any:
    try:
        return json.loads(text, object_hook=_bytes_of)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(
            f"rank {rank}: expected a JSON value from rank {peer} in {_PHASE}, got a malformed one "
            f"({type(error).__name__}: {error}); install the same moelink version on every rank",
            rank=rank, peer=peer, phase="init", call=0,
        ) from error  # fmt: skip
