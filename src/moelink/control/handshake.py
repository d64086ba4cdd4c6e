"""What ranks tell each other once, at init: configurations, identity, and where to ask who is alive."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from moelink.config import EPConfig
from moelink.control.group import World, decode_fields, encode_fields, gather_bytes
from moelink.control.probe import Address
from moelink.errors import ConfigMismatchError, PeerAbortedError, ProtocolError
from moelink.memory.setup import machine_id

_REFUSED = b"refused"


@dataclass(frozen=True)
class Agreement:
    """The outcome of a handshake.

    Attributes:
        identity: hexadecimal name of this communicator, the same on every rank.
        addresses: where each rank's beacon listens.
        machines: name of the machine each rank runs on; equal for ranks that can share memory.
    """

    identity: str
    addresses: tuple[Address, ...]
    machines: tuple[str, ...]


def agree(world: World, config: EPConfig, address: Address, proposal: str) -> Agreement:
    """Compare configurations and exchange addresses; rank 0's ``proposal`` becomes the identity.

    Raises:
        ConfigMismatchError: on every rank, naming the first field that differs and the ranks.
        PeerAbortedError: a peer found its own arguments unacceptable (it raises ConfigError itself).
        ProtocolError: what a peer sent is malformed.
    """
    parts = {
        "fields": encode_fields(config.shared_fields()).hex(),
        "address": address.encode().hex(),
        "machine": machine_id(),
        "identity": proposal,
    }
    answers = gather_bytes(world, encode_fields(parts), config.timeout)
    for peer, answer in enumerate(answers):
        if answer == _REFUSED:
            raise PeerAbortedError(rank=world.rank, peer=peer, phase="init", call=0)
    said = [_Said.decode(answer, rank=world.rank, peer=peer) for peer, answer in enumerate(answers)]
    compare([peer.fields for peer in said])
    addresses, machines = tuple(peer.address for peer in said), tuple(peer.machine for peer in said)
    return Agreement(identity=said[0].identity, addresses=addresses, machines=machines)


@dataclass(frozen=True)
class _Said:
    """One rank's part of the handshake."""

    fields: dict[str, str]
    address: Address
    machine: str
    identity: str

    @classmethod
    def decode(cls, answer: bytes, *, rank: int, peer: int) -> _Said:
        """Raises ProtocolError, naming ``peer``, for anything but what :func:`agree` sends."""
        try:
            parts = decode_fields(answer)
            return cls(
                fields=decode_fields(bytes.fromhex(parts["fields"])),
                address=Address.decode(bytes.fromhex(parts["address"])),
                machine=parts["machine"],
                identity=parts["identity"],
            )
        except (ValueError, KeyError, struct.error) as error:  # malformed text is a ValueError, too
            raise ProtocolError(
                f"rank {rank}: what rank {peer} sent in init is malformed ({type(error).__name__})",
                rank=rank,
                peer=peer,
                phase="init",
                call=0,
            ) from error


def refuse(world: World, timeout: float) -> None:
    """Tell peers that this rank's arguments were refused, so that none of them waits."""
    gather_bytes(world, _REFUSED, timeout)


def compare(fields: Sequence[dict[str, str]]) -> None:
    """Raise ConfigMismatchError for the first field whose text is not the same in every entry."""
    for name in fields[0]:
        ranks: dict[str, list[int]] = {}
        for rank, entry in enumerate(fields):
            ranks.setdefault(entry.get(name, "(absent)"), []).append(rank)
        if len(ranks) > 1:
            raise ConfigMismatchError(name, dict(ranks))
