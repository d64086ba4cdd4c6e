"""Change the ranks of a running communicator: mask some, admit some. Communicators and graphs of the others stay.

Both changes have the same three steps.

1. *Agree and meet.* ``mask``: the ranks that go on agree as those of ``recover`` do (:mod:`moelink.control.recovery`),
   which needs no answer of the others. ``admit``: they and the newcomers meet in a store
   (:mod:`moelink.control.admission`). The result is a *world*: new connections, new probe servers with new tokens.
2. *Prepare*, for every lane (:func:`moelink.transports.build.prepare_change`): versions, settings and layouts are
   compared; on the symmetric transport each rank makes a new block and opens those of the others. Nothing that calls
   use has changed. Any failure so far leaves the old membership in place on the ranks that it reaches.
3. *Commit*, without waiting for a rank: the new connections replace the old ones, and the new blocks are mapped at the
   addresses of the old ones.

Why no call mixes two memberships: a call of this rank is either before its commit or after it, because one thread makes
both. A membership has connections, blocks, probe servers and an identity of its own, which headers carry and handles
are checked for. So nothing that a rank sends in one of them can reach a rank that is in the other, and an output of
one is refused in the other. All ranks number calls anew from 1 after a change, so they change at the same call number.

Why a late write of a rank left out cannot be taken for a new one's: it has mapped the old files and opened the old
connections, and the new ones only if it is invited. Its stores end in files that no member maps any more. Between
nodes a network carries puts of a rank after its call. A member's own network stops and forgets them before the new
blocks are mapped (:meth:`moelink.memory.nodes.network.Network.without`).

If a rank dies in a change: before the last exchange of step 2, all others raise an error that names it, with the old
membership, and repeat the change without it. In the last exchange some may commit and others not, as at ``init``; a
rank that did not reads at the old probe server of one that did (:func:`moelink.control.recovery.go_on`) that it was
left behind, raises an error that names itself, and may come back by ``admit``. Those that did miss it in their next
call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from moelink.control.admission import arrive, named, receive
from moelink.control.failure_detector import FailureDetector
from moelink.control.group import World, alone_of, decline, meet_again
from moelink.control.membership import Membership, check_admitted, check_masked
from moelink.control.recovery import LINGER_SECONDS, Surroundings, go_on, named_as_before, regroup
from moelink.errors import ArgumentError, PeerTimeoutError, PendingError
from moelink.ops.lanes import Lanes
from moelink.transports.build import Change, prepare_change, refuse_newcomers, refuse_nvshmem

_log = logging.getLogger("moelink")


def mask(lanes: Lanes, ranks: Iterable[int], experts: Sequence[int] | None = None) -> Membership:
    """Go on without ``ranks`` (:meth:`moelink.Communicator.mask`)."""
    begin, detector, around = _start(lanes, "mask")
    session = lanes.contexts[0].session
    config = session.configs[0]
    leaving = check_masked(ranks, config, session.masked, experts)
    if detector.left_out is not None:
        raise detector.left_out
    survivors = tuple(r for r in range(config.world_size) if r not in session.masked and r not in leaving)
    try:
        if len(survivors) > 1:
            world = replace(regroup(around, survivors, config.timeout), members=survivors)
        else:
            world = alone_of(config.rank)
        with named_as_before(around, survivors):
            changes = _prepared(lanes, world)
    except PeerTimeoutError as error:
        if error.peer == config.rank:
            detector.left_out = error
        raise
    detector.tell_masked(leaving)
    return _commit(lanes, changes, detector, begin, lambda: go_on(around, survivors))


def admit(lanes: Lanes, ranks: Iterable[int], store: Any) -> Membership:
    """Let masked ranks take part again (:meth:`moelink.Communicator.admit`)."""
    begin, detector, around = _start(lanes, "admit")
    session = lanes.contexts[0].session
    config = session.configs[0]
    given = list(ranks)
    if given == [config.rank]:
        if not detector.masked and detector.left_out is None:
            raise ArgumentError("ranks", "ranks that are masked, not this one, which is not", given)
        world = arrive(config.rank, store, config.timeout)
    else:
        world = lanes.contexts[0].world
        session.raise_fate()
        try:
            newcomers = check_admitted(given, config, session.masked)
        except ArgumentError:
            decline(world, config.timeout)
            raise
        world = receive(world, newcomers, store, config.timeout)
    with named(world.ranks, config.rank):
        changes = _prepared(lanes, world)
    return _commit(lanes, changes, detector, begin, lambda: go_on(around, world.ranks))


def _start(lanes: Lanes, what: str) -> tuple[float, FailureDetector, Surroundings]:
    """Check that a change is possible now. Returns the time, and what is known of the other ranks."""
    begin = time.monotonic()
    session = lanes.contexts[0].session
    session.require_open(what)
    config, detector = session.configs[0], session.detector
    if detector is None:
        raise ArgumentError("ranks", "other ranks in this communicator, which has one", "none")
    if what == "admit":
        refuse_newcomers(what, config)
    refuse_nvshmem(what, config, session.devices[0])
    for lane in lanes.contexts:
        if lane.session.fate.error is None and lane.session.has_pending:
            raise PendingError(f"{what}: expected no pending call, got one without wait(); call its wait() first")
    return begin, detector, Surroundings(detector, what)


def _prepared(lanes: Lanes, world: World) -> list[tuple[World, Change]]:
    """Prepare the change of every lane, or of none."""
    changes: list[tuple[World, Change]] = []
    with ExitStack() as prepared:
        for lane in lanes.contexts:
            own = world if not changes else meet_again(world, lane.session.configs[0].timeout)
            changes.append((own, prepare_change(lane.session, own)))
            prepared.callback(changes[-1][1].discard)
        prepared.pop_all()
    return changes


def _commit(
    lanes: Lanes, changes: list[tuple[World, Change]], old: FailureDetector, begin: float, tell: Callable[[], None]
) -> Membership:
    """Change all lanes, and say so to ranks that were left behind."""
    session = lanes.contexts[0].session
    config, call = session.configs[0], old.probe_server.call
    for place, (lane, (world, change)) in enumerate(zip(lanes.contexts, changes, strict=True)):
        before = lane.session.detector
        try:
            change.commit()
        except BaseException:
            session.end(None)  # blocks may be of neither membership
            for _, later in changes[place + 1 :]:
                later.discard()
            raise
        lane.change(world)
        if before is not None:
            before.close(after=3 * config.timeout + LINGER_SECONDS)
    tell()
    present = tuple(rank for rank in range(config.world_size) if rank not in session.masked)
    made = Membership(present, session.masked, call, time.monotonic() - begin)
    _log.info("rank %d: ranks %s take part from now, after %.3f s", config.rank, list(present), made.seconds)
    return made
