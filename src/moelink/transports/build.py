"""Build a running transport and its session from a configuration: choose it, agree with peers, allocate memory."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from moelink.config import EPConfig
from moelink.control.failure_detector import FailureDetector
from moelink.control.group import World, add_data_group, gather_bytes, setting_up
from moelink.control.handshake import Agreement, agree
from moelink.errors import UnsupportedError
from moelink.memory import Members, NvshmemMemory, PosixMemory, SymmetricMemory, TorchMemory, create_all, protocol
from moelink.memory.absence import fill_in_for
from moelink.memory.cuda_blocks import CudaMemory
from moelink.memory.driver import CudaDriver
from moelink.memory.layout import DispatchMessage, RegionTable
from moelink.memory.nodes.nvshmem import refuse_rocm
from moelink.memory.workspace import Workspace
from moelink.names import TransportName
from moelink.transports.base import Transport
from moelink.transports.collective import CollectiveTransport
from moelink.transports.collective.group_wire import HEADER_FIELDS, GroupWire
from moelink.transports.collective.lockstep import LockstepWire
from moelink.transports.endings import Fate
from moelink.transports.session import Session
from moelink.version import check_pair


@dataclass(frozen=True)
class Built:
    """One rank's part of a running communicator.

    Attributes:
        transport: the transport that moves its rows.
        identity: name of the communicator, the same on every rank.
        detector: finds the rank at fault when a call fails; None for one rank. The transport does not close it.
    """

    transport: Transport
    identity: str
    detector: FailureDetector | None


def open_session(config: EPConfig, device: torch.device, world: World, fate: Fate | None = None) -> Session:
    """Open the session of this rank of ``world``. Collective over it; raises as :func:`build_in_group`.

    ``fate``: that of the session that this one, a further lane or one for gradients, goes with. If a call of either
    meets an error that ends a communicator, both have ended.
    """
    with torch.inference_mode(False):  # calls in any mode write to the tensors that are made here
        built = build_in_group(config, device, world)
    session = Session([config], [device], built.transport, built.identity, built.detector, fate)
    session.masked = masked_in(world, config)
    if session.masked:
        session.transport.begin_without(session.masked)
    return session


def masked_in(world: World, config: EPConfig) -> tuple[int, ...]:
    """Return the ranks of the communicator that are not in ``world``."""
    return () if world.members is None else tuple(r for r in range(config.world_size) if r not in world.members)


def build_in_group(config: EPConfig, device: torch.device, world: World) -> Built:
    """This rank's transport. Collective over ``world``.

    Raises:
        ConfigMismatchError: ranks passed different configurations; raised on every rank.
        UnsupportedError: the transport asked for cannot run here; the message names why.
    """
    if world.world_size == 1 and world.members is None:
        identity = secrets.token_hex(8)
        return Built(build_in_process([config], [device], identity), identity, None)
    with setting_up(world):
        agreement, detector = _agreed(config, world)
        transport = _transport(config, device, world, agreement, detector)
    return Built(transport, agreement.identity, detector)


def _agreed(config: EPConfig, world: World) -> tuple[Agreement, FailureDetector]:
    """Agree with the ranks of ``world``, which are in their meeting, or alone."""
    if world.probe_server is None:
        raise ValueError("expected a world whose ranks have met, got one that never did; use control.group.meet")
    world.probe_server.expect_ranks(config.world_size)
    address, identity = world.probe_server.address, secrets.token_hex(8)
    agreement = agree(world, config, address, identity, layout=layout_digest(config))
    known = dict(zip(world.ranks, agreement.addresses, strict=True))
    detector = FailureDetector(
        rank=config.rank, probe_server=world.probe_server,
        addresses=[known.get(rank) for rank in range(config.world_size)],
        ranks_per_node=config.node_size if config.node_size < config.world_size else None,
    )  # fmt: skip
    return agreement, detector


@dataclass(frozen=True)
class Change:
    """Another membership of a session, which is prepared.

    Attributes:
        commit: lets the session go on with it. Waits for no rank.
        discard: gives it up; nothing has changed.
    """

    commit: Callable[[], None]
    discard: Callable[[], None]


def prepare_change(session: Session, world: World) -> Change:
    """Prepare ``session`` to go on with the ranks of ``world``, some of its own. Collective over them.

    Newcomers open a session meanwhile (:func:`open_session`), in the same exchanges.

    Raises: as :func:`build_in_group`; then nothing has changed.
    """
    config, device = session.configs[0], session.devices[0]
    masked = masked_in(world, config)
    with torch.inference_mode(False), setting_up(world):
        agreement, detector = _agreed(config, world)
        if isinstance(session.transport, CollectiveTransport):
            change = _change_wire(session.transport, config, device, world, agreement, detector)
        else:
            leaving = [rank for rank in masked if rank not in session.masked and rank != config.rank]
            change = _change_blocks(session.transport, config, world, agreement, detector, leaving)

    def commit() -> None:
        with session.reading:  # of counters, which lie in the blocks
            change.commit()
            session.change(agreement.identity, detector, masked)

    return Change(commit, change.discard)


def _change_wire(
    transport: CollectiveTransport, config: EPConfig, device: torch.device, world: World, agreement: Agreement,
    detector: FailureDetector,
) -> Change:  # fmt: skip
    wire = _wire(config, device, world, agreement.identity, detector)
    return Change(partial(transport.change, wire, agreement.identity, masked_in(world, config)), wire.close)


def _change_blocks(
    transport: Any, config: EPConfig, world: World, agreement: Agreement, detector: FailureDetector,
    leaving: Sequence[int],
) -> Change:  # fmt: skip
    """Prepare new blocks. In mode "allreduce" nothing travels, so a rank has only one of its own, which stays."""
    masked = masked_in(world, config)
    change = partial(transport.change, agreement.identity, detector, masked)
    if config.mode == "allreduce":
        return Change(change, lambda: None)
    memory: SymmetricMemory = transport.ranks[0].memory
    fill = partial(fill_in_for, masked, rank=config.rank, workspace=Workspace(config))
    renewal = memory.renew(world.ranks, partial(gather_bytes, world, timeout=config.timeout), fill)

    def commit() -> None:
        transport.end_at(leaving)
        with transport.ranks[0].network.without(masked):
            renewal.commit()
        change()
        if memory.local.is_cuda:
            torch.cuda.synchronize(memory.local.device)  # the next calls may be made on another stream

    return Change(commit, renewal.discard)


def _transport(
    config: EPConfig, device: torch.device, world: World, agreement: Agreement, detector: FailureDetector
) -> Transport:
    if choose_transport(config, [device], machines=len(set(agreement.machines))) == "symmetric":
        check_kernels()
        memory = memory_of_group(config, Workspace(config).nbytes, device, world, name=agreement.identity)
        return _symmetric([config], [memory], agreement.identity, detector)
    wire = _wire(config, device, world, agreement.identity, detector)
    return CollectiveTransport([config], wire, identity=agreement.identity)


def _wire(config: EPConfig, device: torch.device, world: World, identity: str, detector: FailureDetector) -> GroupWire:
    return GroupWire(
        add_data_group(world, device, config.timeout),
        device=device,
        identity=identity,
        timeout=config.timeout,
        detector=detector,
        exchanges=config.mode == "alltoall",
    )


def build_in_process(configs: Sequence[EPConfig], devices: Sequence[torch.device], identity: str) -> Transport:
    """Build the transport of ranks that all live in this process, rank i on ``devices[i]``."""
    if choose_transport(configs[0], devices, machines=1) == "collective":
        return CollectiveTransport(configs, LockstepWire(), identity=identity)
    check_kernels()
    return _symmetric(configs, create_all(devices, Workspace(configs[0]).nbytes), identity)


def memory_of_group(config: EPConfig, nbytes: int, device: torch.device, world: World, *, name: str) -> SymmetricMemory:
    """Allocate a block of ``nbytes`` on every rank of ``world``. Collective; ``name`` is that of the communicator."""
    if config.mode == "allreduce" or (world.world_size == 1 and world.members is None):
        return create_all([device], nbytes)[0]

    if world.members is not None:
        refuse_newcomers("spare_ranks", config)

    def exchange(record: bytes) -> list[bytes]:
        return gather_bytes(world, record, config.timeout)

    if world.members is not None:
        create = (
            PosixMemory.create
            if device.type == "cpu"
            else partial(CudaMemory.create_with, driver=partial(CudaDriver, device))
        )
        return create(
            nbytes, rank=config.rank, world_size=config.world_size, exchange=exchange, members=world.members,
            fill=partial(fill_in_for, masked_in(world, config), rank=config.rank, workspace=Workspace(config)),
        )  # fmt: skip
    if device.type == "cuda":
        group = world.group if world.group is not None else Members(world.rank, world.world_size, world.store, name)
        if config.node_size < config.world_size:
            return NvshmemMemory.create(
                nbytes, device=device, group=group, ranks_per_node=config.node_size, exchange=exchange,
                timeout=config.timeout,
            )  # fmt: skip
        return TorchMemory.create(nbytes, device=device, group=group, exchange=exchange)
    return PosixMemory.create(nbytes, rank=world.rank, world_size=world.world_size, exchange=exchange)


def refuse_newcomers(what: str, config: EPConfig) -> None:
    """Refuse ``what`` where ranks cannot come later: on the symmetric transport between nodes."""
    if config.transport == "symmetric" and config.node_size < config.world_size:
        raise UnsupportedError(
            f"{what}: expected ranks of one node on the symmetric transport, between whose nodes ranks are masked but "
            f"not admitted, got nodes of {config.node_size} ranks; use transport='collective'"
        )


def refuse_nvshmem(what: str, config: EPConfig, device: torch.device) -> None:
    """Refuse ``what``, which masks ranks, on the symmetric transport between nodes of CUDA devices, where rows travel.

    NVSHMEM allocates memory with all processes of the job, so the ranks that go on get no new blocks, and it has no way
    to keep a stopped rank's puts out of the old ones. It also ends the job if a connection fails.
    """
    travels = config.mode == "alltoall" and config.node_size < config.world_size
    if travels and config.transport == "symmetric" and device.type == "cuda":
        raise UnsupportedError(
            f"{what}: expected a network that goes on without some of its ranks, got NVSHMEM between nodes of "
            f"{config.node_size} ranks, which allocates memory with all processes of the job only; use "
            "transport='collective'"
        )


def check_kernels() -> None:
    """Refuse an installation whose torch and Triton cannot run the kernels, before anything is allocated or sent.

    Raises:
        UnsupportedError: names the installed release and the expected ones.
    """
    # Not imported above, because not every platform has it.
    found = import_module("triton").__version__ if find_spec("triton") else None
    check_pair(torch.__version__, found)


def _symmetric(
    configs: Sequence[EPConfig],
    memories: Sequence[SymmetricMemory],
    identity: str,
    detector: FailureDetector | None = None,
) -> Transport:
    # Imported here because its kernels need Triton, which not every platform has.
    from moelink.kernels.launch.device import is_interpreted
    from moelink.transports.symmetric import SymmetricTransport

    if memories[0].local.device.type == "cpu" and not is_interpreted():
        for memory in memories:
            memory.close()
        raise UnsupportedError(
            "transport='symmetric': expected Triton's interpreter for a CPU, got compiled kernels; set "
            "TRITON_INTERPRET=1 before anything imports triton, or use transport='collective'"
        )
    return SymmetricTransport(configs, memories, identity, detector)


def layout_digest(config: EPConfig) -> str:
    """Return 16 hexadecimal digits, equal on ranks whose builds agree about all bytes that go from one to another.

    Ranks compare the digest at init, after versions. Two builds of one version, of different commits say, may lay out a
    message or the block differently. Without the comparison gloo would abort a receiver whose message is longer than it
    expects, and fields in another order would give wrong rows.
    """
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


def choose_transport(config: EPConfig, devices: Sequence[torch.device], machines: int = 1) -> TransportName:
    """Choose the transport for ``config.transport`` and ranks on ``devices``, spread over ``machines`` machines.

    ``"auto"`` is symmetric on CUDA devices of one machine and collective everywhere else.

    Raises:
        UnsupportedError: ``"symmetric"`` was asked for, and no memory or network reaches all ranks.
    """
    nodes = config.world_size // config.node_size
    spread = machines > 1 or nodes > 1
    if config.transport == "symmetric" and config.mode == "alltoall":
        if machines > 1 and nodes == 1:
            raise UnsupportedError(
                f"transport='symmetric': expected ranks_per_node for ranks on {machines} machines, got "
                f"{config.ranks_per_node}; pass the number of ranks that can address each other's memory, or use "
                "transport='collective'"
            )
        if machines > 1 and any(device.type != "cuda" for device in devices):
            raise UnsupportedError(
                f"transport='symmetric': expected all {config.world_size} ranks on one machine for CPUs, got "
                f"{machines} machines; use transport='collective'"
            )
        if nodes > 1 and devices[0].type == "cuda":
            refuse_rocm(config.node_size)
            if config.on_failure == "mask":
                refuse_nvshmem("on_failure='mask'", config, devices[0])
        if nodes > 1 and len(devices) > 1 and devices[0].type == "cuda":
            raise UnsupportedError(
                f"ranks_per_node: expected None for one process, whose {len(devices)} devices are in one node, got "
                f"{config.ranks_per_node}; leave it out, or use transport='collective'"
            )
        if config.two_level and len(devices) > 1:
            raise UnsupportedError(
                f"two_level: expected False for one process with {len(devices)} ranks on CPUs, which run one after the "
                "other and cannot wait for one another's forwarders, got True; start a process for each rank, or leave "
                "it out"
            )
    if config.transport != "auto":
        return config.transport
    on_cuda = all(device.type == "cuda" for device in devices)
    return "symmetric" if on_cuda and not spread else "collective"
