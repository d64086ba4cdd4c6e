"""Exchange configurations and addresses once, at init, and compare them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from moelink import env
from moelink.config import EPConfig
from moelink.control.group import World, gather_bytes
from moelink.control.probe import Address, probe_all
from moelink.errors import ConfigMismatchError, PeerAbortedError, ProtocolError, UnsupportedError
from moelink.memory.setup import machine_id
from moelink.version import __version__

_REFUSED = b"refused"


@dataclass(frozen=True)
class Agreement:
    """The outcome of a handshake.

    Attributes:
        identity: hexadecimal name of this communicator, the same on every rank.
        addresses: the address of each rank's probe server.
        machines: name of the machine each rank runs on; equal for ranks that can share memory.
    """

    identity: str
    addresses: tuple[Address, ...]
    machines: tuple[str, ...]


@dataclass(frozen=True)
class Hello:
    """The handshake data of one rank, as one JSON object.

    Attributes:
        fields: the configuration's shared fields, as text.
        address: the address of the rank's probe server.
        machine: name of the rank's machine.
        identity: the identity that the rank proposes; rank 0's is taken.
        version: the rank's version of moelink.
        layout: a digest of the layouts in which ranks read each other's bytes.
    """

    fields: dict[str, str]
    address: Address
    machine: str
    identity: str
    version: str
    layout: str

    def encode(self) -> bytes:
        """Encode as JSON, the address in hexadecimal."""
        return json.dumps({**vars(self), "address": self.address.encode().hex()}).encode()

    @classmethod
    def decode(cls, message: bytes, *, rank: int, peer: int) -> Hello:
        """Decode the message of rank ``peer`` to rank ``rank``. Every type is checked.

        Raises:
            ProtocolError: the message is malformed; the error names ``peer``.
        """
        try:
            said = json.loads(message)
            if not isinstance(said, dict) or said.keys() != cls.__dataclass_fields__.keys():
                raise ValueError(f"expected an object with {', '.join(cls.__dataclass_fields__)}")
            fields = said["fields"]
            names = ("address", "machine", "identity", "version", "layout")
            texts = [*fields.values(), *(said[name] for name in names)]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("expected text for every value")
            address = Address.decode(bytes.fromhex(said["address"]))
            return cls(**{**said, "address": address})
        except (ValueError, AttributeError, RecursionError) as error:  # malformed JSON and text are ValueErrors
            raise ProtocolError(
                f"rank {rank}: expected a handshake of this moelink version from rank {peer} in init, got a malformed "
                f"message ({type(error).__name__}: {error}); install the same version on every rank",
                rank=rank, peer=peer, phase="init", call=0,
            ) from error  # fmt: skip


def agree(world: World, config: EPConfig, address: Address, proposal: str, *, layout: str) -> Agreement:
    """Compare builds and configurations and exchange addresses; rank 0's ``proposal`` becomes the identity.

    Another version is refused even with the same ``layout``: a version also decides waits and rounding, which no digest
    shows. Builds of one version with different layouts are also refused.

    Raises:
        ConfigMismatchError: on every rank, naming the first field that differs and the ranks; ``moelink`` for builds.
        PeerAbortedError: a peer refused its own arguments (it raises ConfigError itself).
        ProtocolError: a peer's message is malformed.
        UnsupportedError: a rank does not reach the probe server of another one; on every rank, naming both.
    """
    hello = Hello(config.shared_fields(), address, machine_id(), proposal, __version__, layout)
    messages, ranks = gather_bytes(world, hello.encode(), config.timeout), world.ranks
    me = ranks[world.rank]
    for peer, message in zip(ranks, messages, strict=True):
        if message == _REFUSED:
            raise PeerAbortedError(rank=me, peer=peer, phase="init", call=0)
    hellos = [Hello.decode(message, rank=me, peer=peer) for peer, message in zip(ranks, messages, strict=True)]
    compare([{"moelink": f"version {peer.version}"} for peer in hellos], ranks)
    compare([peer.fields for peer in hellos], ranks)
    # Layouts follow from the configuration, which has been compared.
    compare([{"moelink": f"a build with layout {peer.layout}"} for peer in hellos], ranks)
    addresses, machines = tuple(peer.address for peer in hellos), tuple(peer.machine for peer in hellos)
    require_reach(world, addresses, machines, config.timeout)
    return Agreement(identity=hellos[0].identity, addresses=addresses, machines=machines)


def require_reach(world: World, addresses: Sequence[Address], machines: Sequence[str], timeout: float) -> None:
    """Refuse an address that leads peers elsewhere, as a loopback address does on other hosts. Collective.

    A peer that cannot reach the probe server of a late rank would report it as gone. All ranks have just taken part in
    an exchange, so a rank that does not answer now has a wrong address. Ranks of one machine with one address do not
    ask.

    Raises:
        UnsupportedError: a rank does not reach another one; on every rank, for the same two.
    """
    if len(set(machines)) == 1 and len({address.host for address in addresses}) == 1:
        return
    results = probe_all(addresses, [rank for rank in range(world.world_size) if rank != world.rank])
    missed = next((rank for rank, result in results.items() if result.call is None and not result.stopped), -1)
    for rank, answer in enumerate(gather_bytes(world, struct.pack("<i", missed), timeout)):
        (peer,) = struct.unpack("<i", answer[:4].ljust(4, b"\xff"))
        if peer in range(world.world_size):
            host = addresses[peer].host
            raise UnsupportedError(
                f"{env.PROBE_HOST.name}: expected an address at which every rank reaches rank {peer}, got {host!r}, at "
                f"which rank {rank} finds no probe server of it; set the variable on rank {peer} to the address of an "
                "interface that all hosts reach, and open its ports"
            )


def refuse(world: World, timeout: float) -> None:
    """Take part in the handshake with a refusal, so that no peer waits for this rank."""
    gather_bytes(world, _REFUSED, timeout)


def compare(fields: Sequence[dict[str, str]], numbers: Sequence[int] | None = None) -> None:
    """Raise ConfigMismatchError for the first field whose text is not the same in every entry. ``numbers``: of the
    entries' ranks, if these are not all."""
    for name in dict.fromkeys(name for entry in fields for name in entry):
        ranks: dict[str, list[int]] = {}
        for rank, entry in zip(numbers or range(len(fields)), fields, strict=True):
            ranks.setdefault(entry.get(name, "(absent)"), []).append(rank)
        if len(ranks) > 1:
            raise ConfigMismatchError(name, dict(ranks))
