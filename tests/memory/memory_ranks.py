"""Ranks as processes for the tests of memory: started by a fork server, exchanging small records through the test."""

import multiprocessing
import time
import traceback
from multiprocessing.connection import wait

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "triton", "triton.language", "moelink.memory"])


class RankLostError(Exception):
    """What a rank's exchange raises when another rank is gone: the bounded answer that the interface asks for."""


def run_ranks(world_size, worker, *args, timeout=120.0):
    """Run ``worker(rank, world_size, exchange, *args)`` on every rank.

    Returns what each returned, by rank: ``("done", value)``, ``("error", name, text)`` or ``("killed",)``.
    """
    pipes = [CONTEXT.Pipe() for _ in range(world_size)]
    processes = [
        CONTEXT.Process(target=_rank, args=(worker, rank, world_size, child, args), daemon=True)
        for rank, (_, child) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    ends = {parent: rank for rank, (parent, _) in enumerate(pipes)}
    for _, child in pipes:
        child.close()
    results, offers, deadline = {}, {}, time.monotonic() + timeout
    try:
        while len(results) < world_size:
            ready = wait(list(ends), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(world_size)) - set(results))
                raise TimeoutError(f"ranks {missing} did not end in {timeout} s; offered: {sorted(offers)}")
            for end in ready:
                rank = ends[end]
                try:
                    kind, *value = end.recv()
                except (EOFError, ConnectionResetError):
                    del ends[end]
                    results.setdefault(rank, ("killed",))
                    continue
                if kind == "offer":
                    offers[rank] = value[0]
                else:
                    results[rank] = (kind, *value)
            parents = {rank: parent for rank, (parent, _) in enumerate(pipes)}
            if offers and set(offers) | set(results) == set(range(world_size)):
                everybody = len(offers) == world_size
                for rank in sorted(offers):
                    parents[rank].send([offers[r] for r in range(world_size)] if everybody else None)
                offers = {}
    finally:
        for process in processes:
            if not deadline - time.monotonic() > 0:
                process.kill()
            process.join(10)
    return [results[rank] for rank in range(world_size)]


def _rank(worker, rank, world_size, pipe, args):
    import torch

    torch.set_num_threads(1)

    def exchange(record):
        pipe.send(("offer", record))
        answer = pipe.recv()
        if answer is None:
            raise RankLostError("a rank did not answer")
        return answer

    try:
        result = ("done", worker(rank, world_size, exchange, *args))
    except BaseException as error:  # noqa: BLE001 - whatever a rank raises is its result
        traceback.print_exc()
        result = ("error", type(error).__name__, str(error))
    pipe.send(result)


def values(results):
    """The values that all ranks returned; fails with the error of the first that did not."""
    for rank, result in enumerate(results):
        assert result[0] == "done", f"rank {rank}: {result}"
    return [result[1] for result in results]
