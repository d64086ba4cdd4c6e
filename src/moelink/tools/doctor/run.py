"""Examine all ranks: the steps in order, each only if those before it found nothing that would make it hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from moelink.config import TransportName
from moelink.control.group import is_launched
from moelink.control.probe import Address, ProbeServer, probe_all
from moelink.control.stores import BoundedError, LauncherStore, bounded
from moelink.errors import UnsupportedError
from moelink.testing import run_ranks
from moelink.tools.doctor.board import Board
from moelink.tools.doctor.diagnosis import Examination
from moelink.tools.doctor.facts import facts_of
from moelink.tools.doctor.formats import FORMATS, round_trips
from moelink.tools.doctor.pairs import GroupWire, Pair, Wire, measure, rounds

SECONDS = 60.0
_SILENCE_SECONDS = 5.0
"""How long a rank that does not answer is asked again: its machine may be busy."""
_LAST_SECONDS = 2.0
"""How long the rank that hosts the store stays for the others, at most."""


def run_doctor(
    ranks: int | None, *, device: str, formats: Sequence[str] = FORMATS, transport: TransportName = "auto",
    timeout: float = SECONDS,
) -> Examination | None:  # fmt: skip
    """Examine the ranks of a launcher, or ``ranks`` processes started here. None on a launcher's ranks but the first.

    Raises:
        ConfigError: the launcher's variables are incomplete.
        UnsupportedError: the store of the launcher cannot be reached.
    """
    if is_launched():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        found = rank_main(rank, world_size, device, tuple(formats), transport, timeout)
        return found if rank == 0 else None
    return run_ranks(  # type: ignore[no-any-return]
        rank_main, ranks or 1, device, tuple(formats), transport, timeout, timeout=timeout + 30
    )[0]


def rank_main(
    rank: int, world_size: int, device: str, formats: Sequence[str], transport: TransportName, timeout: float
) -> Examination:
    """Run one rank of the examination, as torchrun's variables number it."""
    deadline = time.monotonic() + timeout
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    elif transport == "symmetric":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    launcher = LauncherStore()
    try:
        store = bounded(lambda: launcher.open(deadline, timeout), deadline)
    except (BoundedError, RuntimeError) as error:
        raise UnsupportedError(
            f"rank {rank}: expected the store at {launcher.host}:{launcher.port}, which rank 0 or the launcher serves, "
            f"got {error or 'no answer'}; set MASTER_ADDR and MASTER_PORT to it, and open the port"
        ) from error
    board = Board(PrefixStore("moelink-doctor", store), rank=rank, world_size=world_size, deadline=deadline)
    try:
        return examine(board, place, store=store, formats=formats, transport=transport)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if launcher.host_rank == rank:
            board.share("done", True, _LAST_SECONDS)
        else:
            with suppress(RuntimeError):
                board.write("done", True)


def examine(
    board: Board,
    device: torch.device,
    *,
    store: Any,
    formats: Sequence[str] = FORMATS,
    transport: TransportName = "auto",
    make_wire: Callable[[torch.device], Wire] = GroupWire,
) -> Examination:
    """Examine the ranks of ``board``. Collective; every rank returns what all found."""
    facts = board.share("facts", facts_of(device), (board.deadline - time.monotonic()) / 3)
    found: dict[str, Any] = {"facts": facts}
    if None in facts:
        return Examination(**found)
    found["times"] = board.share("times", time.time())
    found["reached"] = _reach(board)
    if board.world_size > 1:
        if any(each is None or set(each.values()) - {"answers"} for each in found["reached"]):
            return Examination(**found)
        found["mesh"] = board.share("mesh", _connect(board, device, store))
        if set(found["mesh"]) != {"ok"}:
            return Examination(**found)
        found["pairs"], found["broken"] = _measure_all(board, device, make_wire(device))
        if found["broken"]:
            return Examination(**found)
    left = [each for each in board.share("seconds", board.deadline - time.monotonic()) if each is not None]
    timeout = max(1.0, min(left) / 2)  # of which init wants the same on all ranks
    said = round_trips(
        formats, rank=board.rank, world_size=board.world_size, device=device, transport=transport, timeout=timeout
    )
    found["formats"] = board.share("formats", said)
    return Examination(**found)


def _reach(board: Board) -> list[dict[int, str] | None]:
    """Probe every rank from every rank, at the address where failures would be found out."""
    server = ProbeServer()
    try:
        texts = board.share("addresses", server.address.encode().hex())
        peers = [rank for rank, text in enumerate(texts) if text is not None and rank != board.rank]
        places = [server.address if text is None else Address.decode(bytes.fromhex(text)) for text in texts]
        results = probe_all(places, peers) if peers else {}
        until = time.monotonic() + _SILENCE_SECONDS
        while time.monotonic() < until and any(result.call is None and not result.lost for result in results.values()):
            silent = [rank for rank, result in results.items() if result.call is None and not result.lost]
            results |= probe_all(places, silent)
        mine = {
            str(rank): "refuses" if result.lost else "is silent" if result.call is None else "answers"
            for rank, result in results.items()
        }
        mine |= {str(rank): "is silent" for rank, text in enumerate(texts) if text is None}
        said = board.share("reached", mine)  # nobody closes its server before all have asked
    finally:
        server.close()
    return [None if each is None else {int(peer): word for peer, word in each.items()} for each in said]


def _connect(board: Board, device: torch.device, store: Any) -> str:
    """Make the default process group. Returns "ok", or why it could not be made."""
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


def _measure_all(board: Board, device: torch.device, wire: Wire) -> tuple[list[Pair], dict[tuple[int, int], str]]:
    """Measure all pairs. After a failure the rest is not measured, because ranks may be out of step."""
    pairs: list[Pair] = []
    broken: dict[tuple[int, int], str] = {}
    all_rounds = rounds(board.world_size)
    for number, together in enumerate(all_rounds):
        mine = next((pair for pair in together if board.rank in pair), None)
        share = (board.deadline - time.monotonic()) / (len(all_rounds) - number + 1)
        said: Any = {}
        if mine is not None:
            peer = mine[1 - mine.index(board.rank)]
            try:
                until = time.monotonic() + share
                said = asdict(bounded(lambda peer=peer: measure(wire, board.rank, peer, device), until))  # type: ignore[misc]
            except BoundedError:
                said = f"no end within {share:.0f} s"
            except RuntimeError as error:
                said = str(error).splitlines()[0]
        results = board.share(f"round {number}", said)
        for pair in together:
            ends = [results[rank] for rank in pair]
            if all(isinstance(end, dict) for end in ends):
                pairs.append(Pair(**{**ends[0], "gb_per_s": min(end["gb_per_s"] for end in ends)}))
            else:
                broken[pair] = next((end for end in ends if isinstance(end, str)), "no word in time")
        if broken:
            break
    return sorted(pairs, key=lambda pair: (pair.first, pair.second)), broken
