"""Kernels compiled before GPU tests start, by as many processes as there are processors.

Ranks are as few as devices, and would compile one kernel after the other for minutes while a machine's other processors
wait. What is compiled here they find in the cache that all processes share. A test says what it launches with the
marker ``kernels``; all that were selected are compiled at once (``conftest.py``), as starting so many
processes takes seconds, too.

    @pytest.mark.kernels(of=lambda tokens: kernels_of(fields(tokens), WORLD))
    @pytest.mark.parametrize("tokens", [1, 32])
    def test_something(tokens): ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import pytest
import torch

import moelink
from moelink.kernels.launch.grid import bounds_of_kernels
from moelink.memory import create_all
from moelink.memory.workspace import Workspace
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.symmetric.combine import Combine
from moelink.transports.symmetric.dispatch import Dispatch
from moelink.transports.symmetric.rank import Rank

MAX_WORKERS = 60
FUSED = ("dispatch", "combine")
UNIMPORTANT = ("capacity", "rows_per_expert", "timeout", "transport")
"""Fields of ``moelink.init`` that kernels do not depend on."""
MASKED_ROWS = 128
"""Rows of an expert in layout "masked": whole tiles of scales, as kernels are told that they are."""
HALVES = ("dispatch_async", "dispatch_wait", "combine_async", "combine_wait")
HALVES_OVER_ROUTING = ("over_routing_async", "over_routing_wait")


def over_routing(dispatch: Dispatch) -> Dispatch:
    """The same dispatch over the routing of ``dispatch``."""
    request = dataclasses.replace(dispatch.request, routing=dispatch.output)
    return Dispatch(dispatch.rank, request, "compile")


PARTS: Mapping[str, Callable[[Dispatch, Combine], None]] = MappingProxyType({
    "dispatch": lambda dispatch, _: dispatch.send_and_receive(),
    "combine": lambda _, combine: combine.send_and_receive(combine.passes[0]),
    "dispatch_async": lambda dispatch, _: dispatch.send(),
    "dispatch_wait": lambda dispatch, _: dispatch.receive(),
    "combine_async": lambda _, combine: combine.send(combine.passes[0]),
    "combine_wait": lambda _, combine: combine.receive(combine.passes[0]),
    "over_routing": lambda dispatch, _: over_routing(dispatch).send_and_receive(),
    "over_routing_async": lambda dispatch, _: over_routing(dispatch).send(),
    "over_routing_wait": lambda dispatch, _: over_routing(dispatch).receive(),
})  # fmt: skip


class Task(Protocol):
    """What a process compiles; two that are equal are compiled once."""

    def compile(self) -> None:
        """Compile it on the current device, and leave nothing behind there."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of one configuration.

    It depends on dtypes and on what is given, not on the rank, the capacity or the number of tokens.

    Attributes:
        fields: of ``moelink.init``.
        part: one of :data:`PARTS`.
        weights: the call that router weights are given to: "dispatch", "combine" or "none".
        input_dtype: of rows; None for what the format is usually fed.
        traced: it stamps, as while a trace is open.
        max_tokens: the bound of the dispatch, by which its kernel is chosen.
    """

    fields: tuple[tuple[str, Any], ...]
    world_size: int
    part: str
    weights: str = "dispatch"
    input_dtype: torch.dtype | None = None
    id_dtype: torch.dtype = torch.int32
    traced: bool = False
    max_tokens: int | None = None

    @property
    def config(self) -> moelink.EPConfig:
        """The configuration, with room for few rows."""
        fields = dict(self.fields)
        masked, stay = fields.get("layout") == "masked", fields.get("zero_copy", False)
        fields |= {"rows_per_expert": MASKED_ROWS} if masked else {} if stay else {"capacity": 1}
        return moelink.EPConfig(**fields, world_size=self.world_size)

    def compile(self) -> None:
        """As its calls launch it; nothing is launched."""
        dispatch, combine = calls_of(self, torch.device("cuda", torch.cuda.current_device()))
        with dispatch.rank.launcher.preparing():
            PARTS[self.part](dispatch, combine)
        dispatch.rank.close()


def kernels_of(fields: Mapping[str, Any], world_size: int, parts: Iterable[str] = FUSED, **more: Any) -> list[Kernel]:
    """The kernels of one setup. ``more``: the other fields of :class:`Kernel`."""
    # Two levels are refused without the transport that has them.
    kept = {"transport"} if fields.get("two_level") else set()
    deciding = tuple((name, value) for name, value in fields.items() if name in kept or name not in UNIMPORTANT)
    return [Kernel(deciding, world_size, part, **more) for part in parts]


def kernels_of_all(setups: Iterable[Mapping[str, Any]], world_size: int) -> list[Kernel]:
    """The fused kernels of several setups."""
    return [kernel for fields in setups for kernel in kernels_of(fields, world_size)]


def warmup_kernels(fields: Mapping[str, Any], world_size: int) -> list[Kernel]:
    """What ``warmup()`` of a communicator compiles."""
    config = kernels_of(fields, max(1, world_size))[0].config
    return [
        kernel
        for weights in ("dispatch", "none")
        for bound in bounds_of_kernels(config, torch.device("cuda"))
        for kernel in kernels_of(fields, world_size, (*FUSED, *HALVES), weights=weights, max_tokens=bound)
    ]


def gpu_tests(paths: Iterable[str]) -> list[Any]:
    """The GPU tests of the files and folders ``paths``, pytest's items in order, in a process that runs no tests.

    Raises:
        SystemExit: pytest cannot collect them; the message is what it printed.
    """
    found: list[Any] = []

    class Collected:
        def pytest_collection_finish(self, session: Any) -> None:
            found.extend(session.items)

    printed = io.StringIO()
    arguments = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", *paths]
    with contextlib.redirect_stdout(printed):
        status = pytest.main(arguments, plugins=[Collected()])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"GPU tests cannot be collected:\n{printed.getvalue()}")
    return found


def ahead(tests: Iterable[Any]) -> list[Task]:
    """What ``tests``, pytest's items, launch: what their markers ``kernels`` return. Tests that will be skipped launch
    nothing."""
    found: list[Task] = []
    for test in tests:
        marker = test.get_closest_marker("kernels")
        if marker is not None and not any(mark.args[0] for mark in test.iter_markers("skipif")):
            found += named_by(marker, test)
    return found


def named_by(marker: Any, test: Any) -> list[Task]:
    """What ``marker`` names for ``test``: its function ``of`` takes the parameters that it has names for."""
    function = marker.kwargs["of"]
    parameters = test.callspec.params if hasattr(test, "callspec") else {}
    return list(function(**{name: parameters[name] for name in inspect.signature(function).parameters}))


def compile_all(given: Sequence[Task], *, timeout: float = 900.0) -> float:
    """Compile what is ``given``, each of it once, on the CUDA devices in turn. Returns the seconds it took.

    Afterwards the processes are gone, and so is what they held on the devices.

    Raises:
        RuntimeError: something cannot be compiled; the message names it.
    """
    start = time.monotonic()
    for _, error in compile_in_turn([given], timeout=timeout):
        if error is not None:
            raise error
    return time.monotonic() - start


def compile_in_turn(
    groups: Sequence[Sequence[Task]], *, timeout: float = 900.0
) -> Iterator[tuple[int, RuntimeError | None]]:
    """Compile ``groups`` of tasks, each task once, and yield the number of each group when all of it is compiled, or
    with the first error of it. Groups that come first are compiled first; after the last, the processes are gone.

    Compiling gives way to other processes of this machine, such as the tests of a group that is compiled.

    Raises:
        TimeoutError: a group was not compiled ``timeout`` seconds after this began.
    """
    start = time.monotonic()
    tasks = list(dict.fromkeys(task for group in groups for task in group))
    if not tasks:
        yield from ((number, None) for number in range(len(groups)))
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "moelink"])
    workers = min(len(tasks), len(os.sched_getaffinity(0)), MAX_WORKERS)
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=take_device, initargs=(context.Value("i", 0),)
    ) as pool:
        ends = {task: pool.submit(compile_task, task) for task in tasks}
        for number, group in enumerate(groups):
            error = None
            for task in group:
                try:
                    ends[task].result(max(0.0, start + timeout - time.monotonic()))
                except RuntimeError as raised:
                    error = error or raised
            yield number, error
    seconds = time.monotonic() - start
    print(f"{len(tasks)} kernels, or sets of them, compiled by {workers} processes in {seconds:.1f} s", flush=True)


def take_device(turn: Any) -> None:
    """A worker's first act: the next device in turn is its own, and other processes go first."""
    os.nice(10)
    torch.set_num_threads(1)
    with turn.get_lock():
        turn.value += 1
        torch.cuda.set_device(turn.value % torch.cuda.device_count())


def compile_task(task: Task) -> None:
    """Compile ``task`` on the current device; an error names it."""
    try:
        task.compile()
    except Exception as error:
        raise RuntimeError(f"{task}: {type(error).__name__}: {error}") from error


def calls_of(kernel: Kernel, device: torch.device) -> tuple[Dispatch, Combine]:
    """A dispatch and a combine of one token on a rank that has no peers."""
    config = kernel.config
    nbytes = Workspace(config).nbytes if config.zero_copy else 1 << 20  # rows that stay are views of the whole block
    memory = create_all([device] * (1 if config.mode == "allreduce" else kernel.world_size), nbytes)
    # In turn: with the credits that ranks of one device grant after a receiving half.
    rank = Rank(config, memory[0], Workspace(config), in_turn=True)
    rank.network.load = lambda compiled: None  # what carries puts is started with the first communicator
    if kernel.traced:
        rank.open_trace()
    usual = {"fp32": torch.float32, "fp64": torch.float64}.get(config.dispatch_format, torch.bfloat16)
    zeros = functools.partial(torch.zeros, device=device)
    weights = zeros(1, config.topk, dtype=config.weight_dtype)
    given = {call: weights if kernel.weights == call else None for call in FUSED}
    x = zeros(1, config.hidden_size, dtype=kernel.input_dtype or usual)
    ids = zeros(1, config.topk, dtype=kernel.id_dtype)
    dispatch = Dispatch(rank, DispatchRequest(x, ids, given["dispatch"], max_tokens=kernel.max_tokens), "compile")
    groups = (config.num_groups,) * config.rows_by_group
    y = zeros(*groups, config.row_capacity, config.hidden_size, dtype=config.combine_dtype)
    return dispatch, Combine(rank, CombineRequest(y, dispatch.output, given["combine"]))
