"""Examine all ranks: the steps in order, each only if those before it found nothing that would make it hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from moelink.control.group import is_launched
from moelink.control.probe import ProbeServer, probe_all
from moelink.control.stores import BoundedError, LauncherStore, bounded
from moelink.errors import ConfigError, UnsupportedError
from moelink.formats import format_names
from moelink.names import TransportName
from moelink.testing import run_ranks
from moelink.tools.common import Progress, Steps, followed, rank_device
from moelink.tools.doctor.board import Board
from moelink.tools.doctor.diagnosis import Examination, slow_pairs
from moelink.tools.doctor.facts import facts_of
from moelink.tools.doctor.formats import FORMATS, round_trips
from moelink.tools.doctor.pairs import GroupWire, Pair, Wire, measure, rounds

SECONDS = 60.0
SLOW_AGAIN = 2
"""Repeats for a pair that looks slow: other load of a machine slows a sample down, not the link."""
_SILENCE_SECONDS = 5.0
"""How long a rank that does not answer is asked again: its machine may be busy."""
_LAST_SECONDS = 2.0
"""How long the rank that hosts the store stays for the others, at most."""


def run_doctor(
    ranks: int | None, *, device: str, formats: Sequence[str] = FORMATS, transport: TransportName = "auto",
    timeout: float = SECONDS, progress: Progress = lambda message: None,
) -> Examination | None:  # fmt: skip
    """Examine the ranks of a launcher, or ``ranks`` processes started here. None on a launcher's ranks but the first
    that a rank has heard of. ``progress`` gets the steps of ranks that were started here.

    Raises:
        ConfigError: the launcher's variables are incomplete, or a format has no such name.
        UnsupportedError: the store of the launcher cannot be reached.
    """
    for name in formats:
        if name not in format_names():
            raise ConfigError("format", f"one of {', '.join(format_names())}", name)
    if is_launched():
        launcher = LauncherStore()
        found = rank_main(launcher.rank, launcher.world_size, device, tuple(formats), transport, timeout)
        first = next(rank for rank, facts in enumerate(found.facts) if facts is not None or rank == launcher.rank)
        return found if launcher.rank == first else None
    with followed(progress) as path:
        return run_ranks(  # type: ignore[no-any-return]
            rank_main, ranks or 1, device, tuple(formats), transport, timeout, path, timeout=timeout + 30
        )[0]


def rank_main(
    rank: int, world_size: int, device: str, formats: Sequence[str], transport: TransportName, timeout: float,
    path: str | None = None,
) -> Examination:  # fmt: skip
    """Run one rank of the examination, as torchrun's variables number it. Rank 0 writes steps to ``path``."""
    deadline = time.monotonic() + timeout
    place = rank_device(device, interprets=transport == "symmetric")
    launcher = LauncherStore()
    try:
        store = bounded(lambda: launcher.open(deadline, timeout), deadline)
    except (BoundedError, RuntimeError) as error:
        raise UnsupportedError(
            f"rank {rank}: expected the store at {launcher.host}:{launcher.port}, which rank 0 or the launcher serves, "
            f"got {str(error) or 'no answer'}; set MASTER_ADDR and MASTER_PORT to it, and open the port"
        ) from error
    board = Board(PrefixStore("moelink-doctor", store), rank=rank, world_size=world_size, deadline=deadline)
    steps = Steps(path if rank == 0 else None, 2 + (world_size > 1) + len(rounds(world_size)) + len(formats))
    try:
        return examine(board, place, store=store, formats=formats, transport=transport, step=steps.end)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if launcher.host_rank == rank:
            board.share("done", True, _LAST_SECONDS)
        else:
            board.write("done", True)


def examine(
    board: Board,
    device: torch.device,
    *,
    store: Any,
    formats: Sequence[str] = FORMATS,
    transport: TransportName = "auto",
    make_wire: Callable[[torch.device], Wire] = GroupWire,
    step: Progress = lambda name: None,
) -> Examination:
    """Examine the ranks of ``board``. Collective; every rank returns what all found. ``step`` gets the name of each
    step that has ended."""
    found: dict[str, Any] = {}

    def ended() -> Examination:
        return Examination(**found, odd=board.odd)

    found["facts"] = board.share("facts", facts_of(device), (board.deadline - time.monotonic()) / 3)
    step("facts of ranks")
    if None in found["facts"]:
        return ended()
    found["times"] = board.share("times", time.time())
    found["reached"] = _reach(board)
    step("connections of ranks")
    if board.world_size > 1:
        if any(each is None or set(each.values()) - {"answers"} for each in found["reached"]):
            return ended()
        found["mesh"] = board.share("mesh", _connect(board, device, store))
        step("process group")
        if set(found["mesh"]) != {"ok"}:
            return ended()
        found["pairs"], found["broken"] = _measure_all(board, device, make_wire(device), found["facts"], step)
        if found["broken"]:
            return ended()
    left = [each for each in board.share("seconds", board.deadline - time.monotonic()) if each is not None]
    timeout = max(1.0, min(left) / 2)  # init compares it over the ranks
    said = round_trips(
        formats, rank=board.rank, world_size=board.world_size, device=device, transport=transport, timeout=timeout,
        step=step,
    )  # fmt: skip
    found["formats"] = board.share("formats", said)
    return ended()


def _reach(board: Board) -> list[dict[int, str] | None]:
    """Probe every rank from every rank, at the address where failures would be found out."""
    server = ProbeServer()
    try:
        said = board.share("addresses", server.address.encode().hex())
        peers = [rank for rank, place in enumerate(said) if place is not None and rank != board.rank]
        places = [place or server.address for place in said]
        results = probe_all(places, peers) if peers else {}
        until = time.monotonic() + _SILENCE_SECONDS
        while time.monotonic() < until and any(result.call is None and not result.lost for result in results.values()):
            silent = [rank for rank, result in results.items() if result.call is None and not result.lost]
            results |= probe_all(places, silent)
        mine = {
            str(rank): "refuses" if result.lost else "is silent" if result.call is None else "answers"
            for rank, result in results.items()
        }
        mine |= {str(rank): "is silent" for rank, place in enumerate(said) if place is None}
        return board.share("reached", mine)  # nobody closes its server before all have asked
    finally:
        server.close()


def _connect(board: Board, device: torch.device, store: Any) -> str:
    """Make the default process group. Returns "ok", or the reason of a failure."""
    left = board.deadline - time.monotonic()
    try:
        bounded(
            lambda: dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo", store=PrefixStore("moelink-doctor-group", store),
                rank=board.rank, world_size=board.world_size, timeout=timedelta(seconds=max(1.0, left / 2)),
                device_id=device if device.type == "cuda" else None,
            ),
            time.monotonic() + left / 2,
        )  # fmt: skip
    except BoundedError:
        return "no connection in time"
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "ok"


def _measure_all(
    board: Board, device: torch.device, wire: Wire, facts: Sequence[Any], step: Progress
) -> tuple[list[Pair], dict[tuple[int, int], str]]:
    """Measure all pairs, and pairs that look slow again; their best measurement counts.

    After a failure the rest is not measured, because ranks may be out of step. All ranks measure the same pairs again,
    as they look at the same figures.
    """
    best: dict[tuple[int, int], Pair] = {}
    chosen = {pair for together in rounds(board.world_size) for pair in together}
    for attempt in range(1 + SLOW_AGAIN):
        pairs, broken = _measure_some(board, device, wire, chosen, attempt, step)
        for pair in pairs:
            place = pair.first, pair.second
            best[place] = pair.better(best[place]) if place in best else pair
        found = sorted(best.values(), key=lambda pair: (pair.first, pair.second))
        chosen = {(pair.first, pair.second) for pair, _ in slow_pairs(found, facts)}
        if broken or not chosen:
            break
    return found, broken


def _measure_some(
    board: Board, device: torch.device, wire: Wire, chosen: set[tuple[int, int]], attempt: int, step: Progress
) -> tuple[list[Pair], dict[tuple[int, int], str]]:
    pairs: list[Pair] = []
    broken: dict[tuple[int, int], str] = {}
    all_rounds = [kept for together in rounds(board.world_size) if (kept := [p for p in together if p in chosen])]
    for number, together in enumerate(all_rounds):
        mine = next((pair for pair in together if board.rank in pair), None)
        share = (board.deadline - time.monotonic()) / (len(all_rounds) - number + 1)
        said: Any = None
        if mine is not None:
            peer = mine[1 - mine.index(board.rank)]
            try:
                until = time.monotonic() + share
                said = asdict(bounded(lambda peer=peer: measure(wire, board.rank, peer, device), until))  # type: ignore[misc]
            except BoundedError:
                said = f"no end within {share:.0f} s"
            except RuntimeError as error:
                said = str(error).splitlines()[0]
        results = board.share(f"pairs {attempt}.{number}", said)
        step("pairs of ranks" if attempt == 0 else "slow pairs, measured again")
        for pair in together:
            ends = [results[rank] for rank in pair]
            if all(isinstance(end, dict) for end in ends):
                pairs.append(Pair(*pair, ends[0]["latency_us"], min(end["gb_per_s"] for end in ends)))
            else:
                broken[pair] = next((end for end in ends if isinstance(end, str)), "no word in time")
        if broken:
            break
    return pairs, broken
