"""Trace the calls of a session: open and close the ranks' buffers, and gather all records on one clock."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from moelink.config import EPConfig
from moelink.control.group import World, decline, gather_bytes
from moelink.errors import PeerTimeoutError
from moelink.tracing.records import Rows, read_rows, rows_of
from moelink.tracing.trace import Trace
from moelink.transports.session import Session

PHASE = "trace"
_PIECE = 1 << 19
"""Bytes of an exchange; one of the control group carries 1 MiB."""


@contextmanager
def tracing(session: Session, world: World) -> Iterator[Trace]:
    """Return a context that traces the calls of ``session`` made inside. Leaving it is collective over ``world``.

    Raises:
        UnsupportedError: kernels of this communicator cannot be traced.
        StateError: a trace is open.
        PeerTimeoutError: a peer does not leave its block within ``timeout``.
        PeerAbortedError: an exception left a peer's block. The communicator and later traces are as before.
    """
    transport, config = session.transport, session.configs[0]
    transport.open_trace()
    trace = Trace(*_unit_and_facts(session))
    try:
        yield trace
    except BaseException:
        try:
            transport.close_trace()
        finally:
            decline(world, config.timeout)
        raise
    buffers = [buffer.numpy() for buffer in transport.close_trace()]
    rows = [rows_of(buffer) for buffer in buffers]
    # Before the comparison, so that no rank's kernel waits for one that has not come.
    _gather(world, b"here", config)
    clocks = transport.compare_clocks()
    if clocks is None:
        raise PeerTimeoutError(
            rank=config.rank, peer=-1, phase=PHASE, call=0, expected=0, got=None, detail="to compare clocks"
        )
    by_rank = rows if world.control is None else [_unpack(each) for each in _exchange(world, _pack(rows[0]), session)]
    if world.control is not None:
        offsets = np.array(clocks, dtype=np.int64).tobytes()
        of_rank_0 = np.frombuffer(_gather(world, offsets, config)[0], dtype=np.int64)
        clocks = [(int(ahead), int(error)) for ahead, error in of_rank_0.reshape(-1, 2)]
    records = [
        record
        for rank, (each, (ahead, _)) in enumerate(zip(by_rank, clocks, strict=True))
        for record in read_rows(each, rank, ahead)
    ]
    trace.complete(records, tuple(int(error) for _, error in clocks))


def _unit_and_facts(session: Session) -> tuple[str, dict[str, object]]:
    config, device = session.configs[0], session.devices[0]
    on_gpu = device.type == "cuda"
    facts = {
        "world_size": config.world_size, "hidden_size": config.hidden_size, "num_experts": config.num_experts,
        "topk": config.topk, "max_tokens_per_rank": config.max_tokens_per_rank,
        "dispatch_format": config.dispatch_format, "layout": config.layout,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu (interpreted)",
    }  # fmt: skip
    return "ns" if on_gpu else "steps", facts


def _pack(rows: Rows) -> bytes:
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return zlib.compress(file.getvalue(), 1)


def _unpack(data: bytes) -> Rows:
    return np.load(io.BytesIO(zlib.decompress(data)), allow_pickle=False)  # type: ignore[no-any-return]


def _gather(world: World, payload: bytes, config: EPConfig) -> list[bytes]:
    """Gather every rank's ``payload``, by rank. A rank that does not come is late in this phase."""
    try:
        return gather_bytes(world, payload, config.timeout, phase=PHASE)
    except PeerTimeoutError as error:
        raise PeerTimeoutError(rank=config.rank, peer=error.peer, phase=PHASE, call=0, expected=0, got=None) from error


def _exchange(world: World, payload: bytes, session: Session) -> Sequence[bytes]:
    """Gather every rank's ``payload`` of any size, by rank."""
    config = session.configs[0]
    sizes = [int(size) for size in _gather(world, str(len(payload)).encode(), config)]
    parts: list[list[bytes]] = [[] for _ in sizes]
    for begin in range(0, max(sizes), _PIECE):
        for part, piece in zip(parts, _gather(world, payload[begin : begin + _PIECE], config), strict=True):
            part.append(piece)
    return [b"".join(part) for part in parts]
