"""One rank of the symmetric transport: its block, its launches, and what its error record says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelink.arith import ceil_div
from moelink.config import EPConfig
from moelink.env import DEBUG
from moelink.errors import MoelinkError, PeerAbortedError, PeerTimeoutError, ProtocolError
from moelink.kernels.spec import clock_ticks
from moelink.memory import SymmetricMemory
from moelink.protocol import ABORT_RECORD, CODE_OPTIONS, INVALID_IDS, OVERFLOW, PHASES, RECORD_WORDS
from moelink.routing import ExpertMap
from moelink.transports.symmetric.budget import SM_BUDGET
from moelink.workspace import Workspace

CHUNKS_PER_PROGRAM = 4
"""Chunks of a sender with many tokens: receivers start on the first while the last is still on the wire."""


@dataclass(frozen=True)
class Programs:
    """Programs of a launch. ``send`` move rows (one more counts), ``receive`` place or sum them."""

    send: int
    receive: int

    @classmethod
    def of(cls, config: EPConfig, device: torch.device) -> Programs:
        """As many as ``num_sms`` (default: all multiprocessors of the device) for each role; two on a CPU."""
        if device.type == "cpu":
            return cls(2, 2)
        sms = config.num_sms or multiprocessors(device)
        return cls(max(1, sms - 1), sms)


@dataclass(frozen=True)
class Chunks:
    """How a sender cuts its tokens: ``count`` chunks of ``size`` tokens, ``per_program`` consecutive ones each.

    Example: 10 tokens, 2 programs, 1024 flags: chunks of 2 tokens, 5 of them, 3 for the first program.
    """

    size: int
    count: int
    per_program: int

    @classmethod
    def cut(cls, num_tokens: int, *, programs: int, flags: int) -> Chunks:
        """Cut ``num_tokens`` for ``programs`` programs, within ``flags`` chunks."""
        size = max(1, ceil_div(ceil_div(num_tokens, programs), CHUNKS_PER_PROGRAM), ceil_div(num_tokens, flags))
        count = ceil_div(num_tokens, size)
        return cls(size, count, max(1, ceil_div(count, programs)))


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Rank:
    """One local rank: what every launch passes, and the streams it runs on."""

    def __init__(self, config: EPConfig, memory: SymmetricMemory, workspace: Workspace) -> None:
        self.config, self.memory, self.workspace = config, memory, workspace
        self.device = memory.local.device
        self.me = 0 if config.mode == "allreduce" else config.rank
        self.first = ExpertMap(config.num_experts, config.world_size).first(config.rank)
        self.table = memory.pointers if config.mode == "alltoall" else memory.pointers[config.rank : config.rank + 1]
        if config.mode == "allreduce" and memory.world_size == 1:
            self.table = memory.pointers
        self.control = workspace.regions["control"].view(memory.local)
        # The kernels write it; the host reads it at every call without synchronising.
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.nothing = torch.zeros(2 * (workspace.world_size + 1), dtype=torch.int32, device=self.device)
        self.programs = Programs.of(config, self.device)
        self.limit = clock_ticks(config.timeout, self.device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self.device.type == "cuda":
            SM_BUDGET.claim(self, self.device, config.num_sms, available=multiprocessors(self.device))
        self._preparing = False
        self._ready: set[tuple[Any, Any]] = set()

    def optional(self, tensor: Tensor | None) -> Tensor:
        """``tensor``, or in place of None some pointer that the kernel will not follow."""
        return self.table if tensor is None else tensor

    @contextmanager
    def launching(self) -> Iterator[None]:
        """On CUDA: this rank's device and its own stream, which continues after the work of the current one."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                yield

    def join(self) -> None:
        """On CUDA: the current stream continues after this rank's own. The host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """On CUDA: launches inside only compile their kernel and load it onto the device, each kernel once.

        Compiling and loading may synchronise a device, which must not happen while a kernel there waits for a peer
        that this process is still to launch.
        """
        self._preparing = self.stream is not None
        try:
            with torch.cuda.device(self.device) if self._preparing else nullcontext():
                yield
        finally:
            self._preparing = False

    def launch(self, kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        """Launch ``kernel`` over ``programs`` programs."""
        if self.device.type == "cuda":
            options = {"num_warps": 8, **options}
        args = (self.table, self.record, self.control, *args)
        if not self._preparing:
            with self._guard():
                kernel[(programs,)](*args, **options)
        elif (kernel, options["S"]) not in self._ready:
            compiled = kernel.warmup(*args, grid=(programs,), **options)
            compiled._init_handles()
            self._ready.add((kernel, options["S"]))

    def _guard(self) -> AbstractContextManager[None]:
        """In debug mode interpreted kernels may touch nothing but the regions of the blocks and their arguments."""
        if self.device.type != "cpu" or DEBUG.read() != "1":
            return nullcontext()
        from moelink.memory.bounds import guard_accesses, region_ranges

        return guard_accesses(region_ranges(self.workspace.regions, self.memory))

    def close(self) -> None:
        """Release the block, after what is under way unless the communicator is poisoned."""
        if not self.poisoned:
            self.synchronize()
        SM_BUDGET.release(self)
        self.memory.close()

    def synchronize(self) -> None:
        """The host waits for this rank's kernels."""
        if self.stream is not None:
            self.stream.synchronize()

    @property
    def poisoned(self) -> bool:
        """A wait of this communicator expired, here or at a peer that said so."""
        return int(self.record[0]) != 0

    @property
    def aborted(self) -> bool:
        """A peer refused a call, and this rank has not raised that yet."""
        return int(self.record[ABORT_RECORD]) != 0

    def error(self) -> MoelinkError | None:
        """What the record says: the first expired wait, or (once) a peer's refusal."""
        words = self.record.tolist()
        if words[0]:
            rank, peer, phase, call, expected, got = words[1:7]
            detail = "" if rank == self.config.rank else f"told by rank {rank}"
            return PeerTimeoutError(
                rank=rank, peer=peer, phase=PHASES[phase], call=call, expected=expected, got=got, detail=detail
            )
        if words[ABORT_RECORD]:
            self.record[ABORT_RECORD:] = 0
            _, peer, phase, call = words[ABORT_RECORD + 1 : ABORT_RECORD + 5]
            if words[ABORT_RECORD] == CODE_OPTIONS:
                return ProtocolError(
                    f"rank {self.config.rank}: rank {peer} calls {PHASES[phase]} (call {call}) with other options than "
                    "most ranks (weights or reduce passed on some ranks only)",
                    rank=self.config.rank, peer=peer, phase=PHASES[phase], call=call,
                )  # fmt: skip
            return PeerAbortedError(rank=self.config.rank, peer=peer, phase=PHASES[phase], call=call)
        return None

    def take_losses(self) -> tuple[int, int]:
        """Rows dropped for ``capacity`` and ids out of range since the last time. Synchronises."""
        dropped, invalid = int(self.control[OVERFLOW]), int(self.control[INVALID_IDS])
        if dropped or invalid:
            self.control[INVALID_IDS : OVERFLOW + 1] = 0
        return dropped, invalid
