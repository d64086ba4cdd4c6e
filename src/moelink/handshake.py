"""What ranks tell each other once, at init: configurations, identity, and where to ask who is alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moelink.config import EPConfig
from moelink.errors import ConfigMismatchError, PeerAbortedError
from moelink.group import World, decode_fields, encode_fields, gather_bytes
from moelink.liveness import Address
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
    peers = [decode_fields(answer) for answer in answers]
    compare([decode_fields(bytes.fromhex(peer["fields"])) for peer in peers])
    addresses = tuple(Address.decode(bytes.fromhex(peer["address"])) for peer in peers)
    machines = tuple(peer["machine"] for peer in peers)
    return Agreement(identity=peers[0]["identity"], addresses=addresses, machines=machines)


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
