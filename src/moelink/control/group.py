"""Find the peers: from torchrun's variables, or a ProcessGroup, to a store and process groups of moelink's own."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from moelink.control.meeting import Meeting
from moelink.control.probe import ProbeServer
from moelink.control.process import await_release, naming_refusals, require_files, start_daemon
from moelink.control.stores import LauncherStore
from moelink.errors import ConfigError, PeerAbortedError, PeerError, PeerTimeoutError, UnsupportedError

_LIMIT = 1 << 20
_DECLINED = -1
"""In place of a size: this rank takes no part in the exchange."""
_PAUSE_SECONDS = 2e-4
_GRACE_SECONDS = 0.25
"""Seconds that a rank goes on with an exchange after a peer has given up: it may have all that it needs."""
_LINGER_SECONDS = 1.0
"""Seconds that a rank which gave up answers probes and serves its store."""


@dataclass(frozen=True)
class World:
    """This rank among its peers.

    Attributes:
        rank, world_size: position and size; 0 and 1 without a launcher.
        control: gloo group, used by moelink alone, for headers and set-up; None for one rank.
        data: group that rows travel over, None until :func:`add_data_group`.
        group: the caller's group; None for one rank, and for survivors, which form no group of torch's.
        store: store that only these ranks use: a prefix of the default group's store, or a store of one survivor.
        meeting: the ranks' :class:`~moelink.control.meeting.Meeting`, which lasts until they have set up; else None.
        probe_server: this rank's.
        made_group: the default group was made here, not by the caller.
        launched: the launcher's store, which this process may host.
        members: numbers of these ranks in a communicator of more, ascending; None: they are all of it.
    """

    rank: int
    world_size: int
    control: Any = None
    data: Any = None
    group: Any = None
    store: Any = None
    meeting: Meeting | None = None
    probe_server: ProbeServer | None = None
    made_group: bool = False
    launched: tuple[Any, ...] = ()
    members: tuple[int, ...] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their numbers in the communicator."""
        return tuple(range(self.world_size)) if self.members is None else self.members

    def alone(self) -> World:
        """Return the world of one rank, and end its meeting."""
        if self.meeting is not None:
            self.meeting.finish()
        if self.probe_server is not None:
            self.probe_server.close()
        return World(rank=0, world_size=1, launched=self.launched)


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if a launcher (torchrun) started this process as one rank of several."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def plain_device(device: torch.device | str) -> torch.device:
    """Return ``device`` as its tensors name it: with an index on CUDA, without one on CPUs.

    Raises:
        ConfigError: this machine has no such device.
    """
    try:
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            "device", "a device of this machine, 'cpu' or 'cuda:0' say", f"{device!r} ({reason})"
        ) from error
    return torch.device("cpu") if place.type == "cpu" else place


def default_device() -> torch.device:
    """Choose this rank's device: the CUDA device of LOCAL_RANK, or the CPU without CUDA."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def connect(group: dist.ProcessGroup | None, device: torch.device, timeout: float) -> World:
    """Find the peers. Collective over ``group``, or over torchrun's world; without either this rank is alone.

    An initialised default group is used and never destroyed. Without one, torchrun's world gets one. The groups made
    here for moelink are not registered with torch, so a failed call leaves the caller's groups intact, and closing one
    communicator cannot disturb another. How ranks meet: :mod:`moelink.control.meeting`.

    Raises:
        PeerTimeoutError: a rank did not arrive within ``timeout`` seconds.
        UnsupportedError: this process is not in ``group``.
        ConfigError: torchrun's variables are incomplete, or torch does not know ``group``.
    """
    deadline = time.monotonic() + timeout
    if group is None and not dist.is_initialized():
        LauncherStore.require_both()
        if not is_launched():
            return World(rank=0, world_size=1)
        launcher = LauncherStore()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        world = _meet_launched(launcher, backend, timeout, deadline)
        return world if world.world_size > 1 else world.alone()
    try:
        ranks = dist.get_process_group_ranks(group)
        rank, world_size = dist.get_rank(group), len(ranks)
    except (KeyError, TypeError, ValueError):
        outside: object = dist.GroupMember.NON_GROUP_MEMBER
        if group != outside:
            expected = "a process group of torch.distributed, such as get_group() of a DeviceMesh returns"
            raise ConfigError("group", expected, group) from None
        rank = -1
    if rank < 0:
        raise UnsupportedError(
            "group: expected a group with this process in it, got one without; call init on the members of the group "
            "only"
        )
    if world_size == 1:
        return World(rank=0, world_size=1)
    default = dist.distributed_c10d._get_default_store()
    named = LauncherStore() if LauncherStore.is_named() else None
    root = named.root_of(default) if named is not None else None
    host_rank = ranks.index(0) if named is not None and root is not None and named.host_rank in ranks else -1
    base = PrefixStore(_place(ranks), default if root is None else root)
    return meet(
        base, rank, world_size, timeout, deadline=deadline, group=group or dist.group.WORLD, host_rank=host_rank
    )


def _place(ranks: Sequence[int]) -> str:
    """Name the prefix in which these ranks of the default group meet."""
    return f"moelink/{'.'.join(map(str, ranks))}"


def _meet_launched(launcher: LauncherStore, backend: str, timeout: float, deadline: float) -> World:
    """Meet the ranks that the launcher started, and make the default group."""
    held: list[Any] = []
    default = _DefaultGroup()

    def open_store() -> Any:
        held[:] = [launcher.open(deadline, timeout)]
        return PrefixStore(_place(range(launcher.world_size)), held[0])

    def connect_all(room: Any, _left: threading.Event) -> Any:
        control = _connect_gloo(room, launcher.rank, launcher.world_size, timeout, deadline)
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.05))
        default.make(backend, PrefixStore("default", room), launcher.rank, launcher.world_size, left)
        default.set_timeout(timedelta(seconds=timeout))
        return control

    try:
        world = _meet(
            open_store, connect_all, launcher.rank, launcher.world_size, deadline,
            has_group=False, host_rank=launcher.host_rank, reopens=True,
        )  # fmt: skip
    except BaseException:  # an interrupt, or the exception of a signal's handler: no group may be left of them either
        _keep(held)
        default.forget()
        raise
    # The group uses a clone of the store, which does not keep the store's server alive. The group outlives the world.
    weakref.finalize(dist.group.WORLD, tuple, held).atexit = False
    return dataclasses.replace(world, group=dist.group.WORLD, made_group=True, launched=tuple(held))


class _DefaultGroup:
    """The default group of one ``init``. The thread that makes it may be left behind; then the group is destroyed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: Any = None
        self._unwanted = False

    def make(self, backend: str, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make the group, and destroy it if it is not wanted any more."""
        with self._lock:
            if self._unwanted:
                return
            _number_groups_anew()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        with self._lock:
            self._group = dist.group.WORLD
            if self._unwanted:
                self._destroy()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the group's operations."""
        with self._lock:
            if self._group is not None and not self._unwanted:
                self._group.set_timeout(timeout)

    def forget(self) -> None:
        """Destroy the group, now or when it is made."""
        with self._lock:
            self._unwanted = True
            self._destroy()
            _number_groups_anew()

    def _destroy(self) -> None:
        if self._group is not None and dist.group.WORLD is self._group:
            dist.destroy_process_group()


def _number_groups_anew() -> None:
    """Let the next default group have the first number on this rank, as in a new process.

    Ranks meet under the number that torch counts for every default group of a process, and a group that was not
    connected keeps its number. So ranks that failed in different places would wait under different numbers.
    """
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def meet(
    store: Any, rank: int, world_size: int, timeout: float, *, deadline: float | None = None, group: Any = None,
    host_rank: int = -1,
) -> World:  # fmt: skip
    """Meet the ranks that share ``store``, a prefix that is theirs alone. Collective over them.

    Args:
        store, rank, world_size, host_rank: as for :class:`~moelink.control.meeting.Meeting`.
        timeout: of the groups that are made.
        deadline: of the meeting; None: in ``timeout`` seconds.
        group: the caller's group of these ranks.

    Raises:
        PeerTimeoutError: a rank did not arrive in time, or (PeerLostError) its process is gone.
    """
    end = time.monotonic() + timeout if deadline is None else deadline

    def connect_all(room: Any, _left: threading.Event) -> Any:
        return _connect_gloo(room, rank, world_size, timeout, end)

    world = _meet(lambda: store, connect_all, rank, world_size, end, host_rank=host_rank)
    return dataclasses.replace(world, group=group)


def _meet(
    open_store: Callable[[], Any],
    connect_all: Callable[[Any, threading.Event], Any],
    rank: int,
    world_size: int,
    deadline: float,
    **options: Any,
) -> World:
    require_files(world_size, meshes=1 if options.get("has_group", True) else 2)
    with naming_refusals():
        probe_server = ProbeServer(world_size)
    meeting = Meeting(
        open_store, connect_all, rank=rank, world_size=world_size, address=probe_server.address, deadline=deadline,
        **options,
    )  # fmt: skip
    try:
        control = meeting.wait()
    except BaseException as error:
        meeting.abandon(error)
        probe_server.close(after=_LINGER_SECONDS)
        raise
    return World(rank, world_size, control=control, store=meeting.room, meeting=meeting, probe_server=probe_server)


def _connect_gloo(room: Any, rank: int, world_size: int, timeout: float, deadline: float) -> Any:
    """Connect gloo's mesh by ``deadline``; after that its calls may take ``timeout`` seconds."""
    left = timedelta(seconds=max(deadline - time.monotonic(), 0.05))
    mesh: Any = dist.ProcessGroupGloo(PrefixStore("control", room), rank, world_size, left)
    mesh._set_default_timeout(timedelta(seconds=timeout))
    return mesh


def _keep(things: Sequence[Any]) -> None:
    """Hold ``things``, such as a store that this process serves, until peers have read the reason of a failure."""
    timer = threading.Timer(_LINGER_SECONDS, lambda _: None, [tuple(things)])
    timer.daemon = True
    timer.start()


def meet_again(world: World, timeout: float) -> World:
    """Make another world of the same ranks, under a prefix of their store. Collective; raises as :func:`meet`."""
    if world.members is not None and world.world_size == 1:
        return alone_of(world.members[0])
    if world.store is None:
        return World(rank=0, world_size=1)
    again = meet(PrefixStore("again", world.store), world.rank, world.world_size, timeout, group=world.group)
    return dataclasses.replace(again, members=world.members)


def alone_of(rank: int) -> World:
    """Return the world of ``rank``, the only one left of a communicator of several."""
    store = HashStore()
    control: Any = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
    return World(0, 1, control=control, store=store, probe_server=ProbeServer(), members=(rank,))


def with_spare(world: World, spare_ranks: int) -> World:
    """Return ``world`` as the first ranks of a communicator that has ``spare_ranks`` more, which are masked."""
    if spare_ranks == 0:
        return world
    first = world if world.control is not None else dataclasses.replace(alone_of(0), launched=world.launched)
    return dataclasses.replace(first, members=tuple(range(world.world_size)))


def add_data_group(world: World, device: torch.device, timeout: float) -> World:
    """Add the group that rows travel over: the control group on CPU, an NCCL group on CUDA."""
    if device.type != "cuda" or world.control is None:
        return dataclasses.replace(world, data=world.control)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    data = dist.ProcessGroupNCCL(PrefixStore("data", world.store), world.rank, world.world_size, options)
    return dataclasses.replace(world, data=data)


def gather_bytes(world: World, payload: bytes, timeout: float, *, phase: str = "init") -> list[bytes]:
    """Gather every rank's ``payload`` (at most 1 MiB), by rank. Sizes are exchanged and checked before the bytes.

    Raises:
        PeerTimeoutError: a rank did not take part within ``timeout`` seconds.
        UnsupportedError: a rank's payload is larger than 1 MiB.
        PeerAbortedError: a rank takes no part (:func:`decline`); raised on all others, in ``phase``.
    """
    if world.control is None:
        return [payload]
    deadline = time.monotonic() + timeout

    def gather(mine: torch.Tensor) -> list[torch.Tensor]:
        everyone = [torch.empty_like(mine) for _ in range(world.world_size)]
        _await(world.control.allgather([everyone], [mine]), world, deadline)
        await_release([*everyone, mine])
        return everyone

    sizes = [int(size) for size in gather(torch.tensor([len(payload)], device="cpu"))]
    if _DECLINED in sizes:
        ranks = world.ranks
        raise PeerAbortedError(rank=ranks[world.rank], peer=ranks[sizes.index(_DECLINED)], phase=phase, call=0)
    if max(sizes) > _LIMIT or min(sizes) < 0:
        raise UnsupportedError(
            f"init: expected at most {_LIMIT} bytes from each rank, got {sizes}; install one moelink version everywhere"
        )
    padded = torch.frombuffer(bytearray(payload.ljust(max(sizes) + 1, b"\0")), dtype=torch.uint8)
    return [bytes(data[:size].numpy().tobytes()) for data, size in zip(gather(padded), sizes, strict=True)]


def decline(world: World, timeout: float) -> None:
    """Take no part in the next :func:`gather_bytes` of the others, and wait for no rank.

    This rank sends ``_DECLINED`` as its size, which ends the exchange on all ranks after the sizes, so that later
    exchanges match. Gloo holds the tensors until the others come, and a thread waits for that.
    """
    if world.control is None:
        return
    mine = torch.tensor([_DECLINED], device="cpu")
    everyone = [torch.empty_like(mine) for _ in range(world.world_size)]
    work = world.control.allgather([everyone], [mine])
    end = time.monotonic() + timeout

    def outlive() -> None:
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(_GRACE_SECONDS / 5)
        await_release([*everyone, mine])

    start_daemon(outlive, "moelink-declined")


def _await(work: Any, world: World, deadline: float) -> None:
    """Wait for an exchange of the set-up: until it is over, a peer says that it failed, or the deadline."""
    told: float | None = None
    try:
        while not work.is_completed():
            now = time.monotonic()
            failure = world.meeting.failure() if world.meeting is not None else None
            told = told or (now if failure is not None else None)
            if failure is not None and told is not None and now > told + _GRACE_SECONDS:
                raise failure
            if now > deadline:
                raise _late(world, "it did not take part in the set-up")
            time.sleep(_PAUSE_SECONDS)
        work.wait()
    except PeerError:
        raise
    except RuntimeError as error:
        raise _late(world, str(error)) from error


def _late(world: World, detail: str) -> PeerTimeoutError:
    if world.meeting is not None:
        return world.meeting.fail(detail)
    return PeerTimeoutError(rank=world.rank, peer=-1, phase="init", call=0, expected=0, got=None, detail=detail[:200])


@contextmanager
def setting_up(world: World) -> Iterator[None]:
    """Set up a communicator in the block. At its end the meeting is over; peers learn of an error."""
    try:
        with naming_refusals():
            yield
        if world.meeting is not None:
            world.meeting.finish()
    except BaseException as error:
        leave(world, error)
        raise


def part(world: World) -> None:
    """Give up a world whose meeting is over. Its probe server lingers, because peers may be probing it."""
    if world.probe_server is not None:
        _keep([world.probe_server])  # it stops when nothing refers to it


def leave(world: World, error: BaseException | None) -> None:
    """End the set-up that failed with ``error``: tell the peers, and close everything of the meeting."""
    if world.meeting is not None:
        world.meeting.abandon(error)
    if world.probe_server is not None:
        world.probe_server.close(after=_LINGER_SECONDS)
    if world.made_group and dist.is_initialized():
        _keep([world.launched, dist.distributed_c10d._get_default_store()])
        dist.destroy_process_group()


def release(world: World) -> None:
    """Shut down the data group that :func:`add_data_group` made. The caller's group is left alone."""
    if world.data is not None and world.data is not world.control:
        world.data.shutdown()
