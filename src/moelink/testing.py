"""Helpers for testing code that uses moelink, and moelink itself: ranks as processes, recomputable data, comparisons.

Data is a function of (seed, rank, token), so that every rank can recompute the data of any other rank.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import socket
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor


class RankFailedError(AssertionError):
    """A rank raised; the message carries its traceback."""


class RankHungError(AssertionError):
    """Ranks did not finish in time; the message names them."""


_PORTS = range(10_000, 32_768)
"""Below those that Linux and macOS give to programs that ask for any."""


def free_port() -> int:
    """A TCP port that was free a moment ago.

    It is none that a system gives to a program that asks for any port, because many programs do so, and the caller may
    take seconds to bind it.

    Raises:
        OSError: no free port was found.
    """
    for port in random.SystemRandom().sample(_PORTS, min(100, len(_PORTS))):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"expected a free port from {_PORTS[0]} to {_PORTS[-1]}, got none")


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, mortal: Collection[int] = ()
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` in ``world_size`` processes and return the results by rank.

    ``fn`` must be importable (a module-level function); torchrun's variables are set, so ``moelink.init`` finds its
    peers. Processes come from a fork server that has torch loaded, so starting them is cheap after the first time; they
    have this process's environment as it is now.
    Ranks in ``mortal`` may die (SIGKILL, say): the others are left alone, and the result of a dead one is None. Rank 0
    hosts the store of the default group, so that goes with it.

    Raises:
        RankFailedError: a rank raised, or died without being ``mortal``; all its peers are stopped.
        RankHungError: some ranks had not finished after ``timeout`` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "moelink.initialize"])
    environment = dict(os.environ)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    # Apart, as what it is made of may import triton, which reads its variables then.
    call = pickle.dumps((fn, args))
    pipes: list[Connection] = []
    processes = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        ranked = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=_rank_main, args=(theirs, ranked, call, rank, world_size), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, timeout, mortal)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _rank_main(pipe: Connection, environment: dict[str, str], call: bytes, rank: int, world_size: int) -> None:
    # Until here it is that of the fork server, which was started by the first test that wanted ranks.
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads(call)
        answer = (True, fn(rank, world_size, *args))
    except BaseException:  # noqa: BLE001 - whatever ends a rank must reach the parent
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()


def _collect(pipes: Sequence[Connection], timeout: float, mortal: Collection[int]) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(enumerate(pipes))
    while waiting and not (failures and time.monotonic() > deadline):
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                ok, value = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                ok, value = rank in mortal, "the process ended without an answer"
                value = None if ok else value
            (results if ok else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + 5)
    if failures:
        raise RankFailedError("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())))
    if waiting:
        raise RankHungError(f"ranks {sorted(waiting)} had not finished after {timeout} s")
    return [results[rank] for rank in range(len(pipes))]


@dataclass(frozen=True)
class RankData:
    """One rank's inputs.

    Attributes:
        x: [num_tokens, hidden_size].
        topk_ids: [num_tokens, topk] int32.
        topk_weights: [num_tokens, topk] fp32.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


def rank_data(
    *, seed: int, rank: int, num_tokens: int, hidden_size: int, num_experts: int, topk: int, skew: float = 0.0,
    holes: float = 0.0, repeats: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> RankData:  # fmt: skip
    """Inputs of one rank, a function of the arguments alone.

    ``skew`` is the exponent of a Zipf law over experts (0 is uniform), ``holes`` the share of slots set to -1, and
    ``repeats`` lets one token name an expert twice (needed when topk exceeds num_experts).
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    x = torch.randn(num_tokens, hidden_size, generator=generator, device="cpu").to(dtype)
    popularity = torch.arange(1, num_experts + 1, dtype=torch.float64, device="cpu") ** -skew
    ids = torch.empty(num_tokens, topk, dtype=torch.int32, device="cpu")
    if num_tokens:
        draws = popularity.expand(num_tokens, -1)
        ids = torch.multinomial(draws, topk, replacement=repeats or topk > num_experts, generator=generator).int()
    ids[torch.rand(ids.shape, generator=generator, device="cpu") < holes] = -1
    weights = torch.rand(num_tokens, topk, generator=generator, device="cpu")
    return RankData(x=x, topk_ids=ids, topk_weights=weights)


def assert_bitwise_equal(got: Tensor | None, expected: Tensor | None, what: str = "tensor") -> None:
    """Same dtype, shape and bytes; the message counts the differences and shows the first."""
    if got is None or expected is None:
        assert got is expected, f"{what}: got {got}, expected {expected}"
        return
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: shape {list(got.shape)}, expected {list(expected.shape)}"
    if got.numel() == 0:
        return
    a, b = (
        t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).view(-1, t.element_size()) for t in (got, expected)
    )
    different = (a != b).any(1).nonzero()
    if len(different):
        first = int(different[0])
        where = torch.unravel_index(torch.tensor(first, device="cpu"), got.shape)
        left, right = (t.detach().cpu().contiguous().reshape(-1)[first].to(torch.float64) for t in (got, expected))
        raise AssertionError(
            f"{what}: {len(different)} of {got.numel()} elements differ, first at {[int(i) for i in where]}: "
            f"got {left.item()}, expected {right.item()}"
        )
