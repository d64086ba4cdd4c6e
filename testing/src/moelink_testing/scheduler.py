"""Interpreted kernels under seeded schedules: all programs of all ranks in one process, switched at every atomic and
every volatile load.

What the stock interpreter cannot show and this can:

* programs of a launch, and launches of different ranks, interleave in any order: a wait for a later program works;
* a wait that nobody satisfies raises :class:`Deadlock`, naming who waits where, instead of hanging;
* plain stores may sit in a per-program *store buffer* until that program releases (or ends): a missing release, or one
  that comes before its stores, leaves the reader with old bytes;
* a store buffer drains at random moments in random order of addresses, so that nothing but a release orders stores. A
  program sees its own: what it loads or changes atomically drains first, and nothing else does;
* with ``speed`` (name of a program -> how often it runs) what is slow stays slow: a rank that is a call ahead, a sender
  that has hardly begun when all others have ended. Choosing alike among all programs hardly ever shows such schedules.

It cannot show a missing ``debug_barrier`` (a program is one thread here), a wrong scope, or a missing acquire (loads
happen where they stand): :mod:`moelink_testing.lowering` reads those from PTX. A program that computes without ever
touching memory is never left.

Programs are greenlets; Triton's interpreter keeps the current program's id in one place, which a context variable per
greenlet replaces.
"""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import triton
from triton.runtime import interpreter

from moelink_testing.interpreter import is_interpreted

_INDEX: contextvars.ContextVar[tuple[int, int, int]] = contextvars.ContextVar("grid_idx")
_GRID: contextvars.ContextVar[tuple[int, int, int]] = contextvars.ContextVar("grid_dim")
_BUILDER = interpreter.InterpreterBuilder
_RELEASES = (interpreter._ir.MEM_SEMANTIC.RELEASE, interpreter._ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_LIBRARIES = tuple(str(Path(str(file)).parent) + os.sep for file in (__file__, triton.__file__, np.__file__))
"""Folders whose functions a :class:`Deadlock` does not name, unless it is asked to."""
_NAMED_FRAMES = 3
_SPINS = 1000
"""Plain loads, without a store or an atomic in between, after which a program is taken for one that waits."""


class Deadlock(AssertionError):
    """Every live program waits, and nothing changed for a long time."""


class FailedSchedule(AssertionError):
    """A schedule of :func:`explore_schedules` failed, for the reason that ``__cause__`` is.

    Attributes:
        seed: that of the schedule.
    """

    def __init__(self, seed: int, error: BaseException) -> None:
        again = f"run_ranks(make_ranks(), seed={seed}) with the same options repeats it"
        super().__init__(f"the schedule of seed {seed} failed ({again}): {type(error).__name__}: {error}")
        self.seed = seed


def run_ranks(
    ranks: Sequence[Callable[[], Any]],
    *,
    seed: int = 0,
    store_buffer: bool = True,
    drain: float = 0.05,
    patience: int = 300,
    speed: Callable[[str], float] | None = None,
    packages: Sequence[str | Path] = (),
) -> list[Any]:
    """Run one function per rank in this process, under one schedule.

    A rank is a function without arguments. It launches interpreted kernels as usual, ``kernel[grid](...)``; a launch
    ends before its function goes on. Programs switch at every atomic and every volatile load. Memory is whatever the
    functions share: tensors on the CPU.

    Args:
        ranks: functions; number i is called ``rank<i>``, and programs of its launches ``rank<i>:<kernel>[<program>]``.
        seed: of the schedule. The same functions and the same seed give the same schedule.
        store_buffer: whether plain stores may become visible late, and in any order, unless a release follows them.
        drain: probability, at each switch, that one store of a program becomes visible. 0: not before its release.
        patience: switches for each live program, without anything having changed, that are a deadlock; twenty times as
            many with ``speed``.
        speed: relative frequency with which a program runs, given its name; None: all run equally often.
        packages: folders whose functions a deadlock names; empty: every function that is not Triton's, NumPy's or of
            this package.

    Returns:
        What each function returned, by rank.

    Raises:
        Deadlock: every live program waits. The message names each program, and its innermost functions with file and
            line.
        RuntimeError: kernels are compiled in this process.
        TypeError: a kernel got a tensor that is not on the CPU.
        Exception: what a function or a kernel raised; kernels' own errors are Triton's ``InterpreterError``.

    Example: in ``talk.py`` of the README rank 0 sends four numbers and a flag, but its exchange is relaxed; rank 1
    waits for the flag and loads them.

    >>> from talk import receive, send
    >>> def come(seed):
    ...     data, out, flag = torch.zeros(4), torch.zeros(4), torch.zeros(1, dtype=torch.int32)
    ...     run_ranks([lambda: send[(1,)](data, flag, 4), lambda: receive[(1,)](data, flag, out, 4)], seed=seed)
    ...     return out.tolist()
    >>> come(seed=0), come(seed=1)
    ([7.0, 7.0, 7.0, 7.0], [0.0, 0.0, 0.0, 0.0])
    """
    scheduler = Scheduler(
        seed, store_buffer=store_buffer, drain=drain, patience=patience, speed=speed, packages=packages
    )
    return scheduler.run(ranks)


def explore_schedules(
    make_ranks: Callable[[], Sequence[Callable[[], Any]]],
    seeds: Iterable[int],
    *,
    check: Callable[[list[Any]], object] | None = None,
    **options: Any,
) -> None:
    """Run the ranks that ``make_ranks`` makes under the schedule of each seed.

    Args:
        make_ranks: returns the functions of :func:`run_ranks`, over fresh memory at each call. A rank may assert what
            it got.
        seeds: of the schedules, such as ``range(100)``.
        check: gets what the functions returned, by rank, after all of them have ended; it raises if that is wrong.
        options: of :func:`run_ranks`, except ``seed``.

    Raises:
        FailedSchedule: a schedule raised, or ``check`` did. The message names the seed, and ``__cause__`` is the error.
            Later seeds are not run.
        RuntimeError: kernels are compiled in this process.

    Example: ``make_ranks`` of ``talk.py`` in the README makes the memory and the two ranks.

    >>> from talk import make_ranks
    >>> explore_schedules(make_ranks, range(20))
    Traceback (most recent call last):
    moelink_testing.scheduler.FailedSchedule: the schedule of seed 1 failed (run_ranks(make_ranks(), seed=1) with ...
    >>> explore_schedules(make_ranks, range(20), store_buffer=False)
    """
    _require_interpreter()
    for seed in seeds:
        try:
            results = run_ranks(make_ranks(), seed=seed, **options)
            if check is not None:
                check(results)
        except Exception as error:  # noqa: BLE001 - whatever a fault leads to
            raise FailedSchedule(seed, error) from error


class Scheduler:
    """One schedule, as :func:`run_ranks` describes it; its arguments are those.

    A subclass may override :meth:`pause`, to keep a clock, to stop a rank, or to end waits. Host code of a rank that
    waits for another one calls it, too.

    Attributes:
        switches: how often a program has run until it paused.
    """

    def __init__(
        self,
        seed: int,
        *,
        store_buffer: bool = True,
        patience: int = 300,
        drain: float = 0.05,
        speed: Callable[[str], float] | None = None,
        packages: Sequence[str | Path] = (),
    ) -> None:
        # Here, as a GPU machine may have nothing but torch and pytest, and its tests import modules with schedules.
        from greenlet import getcurrent, greenlet

        self._current, self._greenlet = getcurrent, greenlet
        self._random = random.Random(seed)
        self._store_buffer, self._patience, self._drain_chance = store_buffer, patience, drain
        self._speed, self._packages = speed, tuple(packages)
        if speed is not None:
            self._patience *= 20
        self._live: list[Any] = []
        self._idle = 0
        self.switches = 0

    def run(self, ranks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per rank, which launch kernels, until all have ended. Return what they returned."""
        _require_interpreter()
        results: list[Any] = [None] * len(ranks)

        def main_of(number: int, function: Callable[[], Any]) -> Callable[[], None]:
            def main() -> None:
                results[number] = function()

            return main

        with _interleaved(self):
            self._main = self._current()
            for number, function in enumerate(ranks):
                self._spawn(main_of(number, function), f"rank{number}")
            while self._live:
                program = self._next()
                self.switches += 1
                program.switch()
                if program.dead:
                    self._live.remove(program)
                    self._idle = 0
                elif self._idle > self._patience * len(self._live):
                    waiting = "; ".join(f"{p.name} {place_of(p.gr_frame, self._packages)}" for p in self._live)
                    raise Deadlock(f"no progress after {self.switches} switches; waiting: {waiting}")
                for other in self._live:
                    if other.stores and self._random.random() < self._drain_chance:
                        self._drain_one(other)
        return results

    def _next(self) -> Any:
        # Now and then everybody gets a turn, so that whoever waits for a slow program is not taken for stuck.
        if self._speed is None or self.switches % 500 == 0:
            return self._random.choice(self._live)
        return self._random.choices(self._live, [self._speed(program.name) for program in self._live])[0]

    def _spawn(self, function: Callable[[], None], name: str) -> None:
        program = self._greenlet(function, self._main)
        program.stores, program.name, program.loads = [], name, 0
        program.gr_context = contextvars.copy_context()
        self._live.append(program)

    def pause(self, progress: bool) -> None:
        """Let another program run. ``progress``: memory changed."""
        self._idle = 0 if progress else self._idle + 1
        self._main.switch()

    def store(self, pointer: Any, value: Any, mask: Any) -> None:
        """A plain store: one buffered entry per call, or straight to memory."""
        program = self._current()
        program.loads = 0
        entry = _Store(np.array(pointer), np.array(value), np.array(mask))
        if not self._store_buffer:
            self._idle = 0
            interpreter._interpreter.store(entry.pointer, entry.value, entry.mask)
        elif len(entry.words):
            program.stores.append(entry)

    def _drain_one(self, program: Any, index: int | None = None) -> None:
        """Any store of ``program`` becomes visible, but earlier ones to the same address first."""
        stores = program.stores
        found = self._random.randrange(len(stores)) if index is None else index
        index = None
        while index != found:
            index, words = found, stores[found].words
            found = next(i for i, earlier in enumerate(stores) if i == index or earlier.overlaps(words))
        entry = stores.pop(found)
        interpreter._interpreter.store(entry.pointer, entry.value, entry.mask)
        self._idle = 0

    def drain(self) -> None:
        """The current program's stores become visible."""
        program = self._current()
        while program.stores:
            self._drain_one(program)

    def see(self, pointer: Any, mask: Any, itemsize: int) -> None:
        """The current program is about to load, or to change atomically: it sees its own stores."""
        program = self._current()
        if program.stores:
            words = _words(np.array(pointer), np.array(mask), itemsize)
            while (index := next((i for i, s in enumerate(program.stores) if s.overlaps(words)), None)) is not None:
                self._drain_one(program, index)

    def loaded(self, volatile: bool) -> None:
        """The current program has loaded. It pauses if the load is volatile, or one of very many in a row."""
        program = self._current()
        program.loads += 1
        if volatile or program.loads > _SPINS:
            self.pause(False)

    def changed(self, progress: bool) -> None:
        """The current program has done an atomic, and pauses."""
        self._current().loads = 0
        self.pause(progress)

    def launch(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a grid: its programs join the schedule, the launching rank sleeps until they have ended."""
        names = inspect.getfullargspec(executor.fn).args
        kwargs = {name: value for name, value in kwargs.items() if name in names}
        for hook in executor.pre_run_hooks:
            hook(*args, **kwargs)
        interpreter._patch_lang(executor.fn)
        bound = inspect.getcallargs(executor.fn, *args, **kwargs)
        for name, value in bound.items():
            _require_cpu(f"{executor.fn.__name__}, {name}", value)
        bound = {k: v if k in executor.constexprs else interpreter._implicit_cvt(v) for k, v in bound.items()}
        grid = executor.grid(bound) if callable(executor.grid) else executor.grid
        dimensions = len(grid)
        x, y, z = grid = (*grid, 1, 1, 1)[:3]
        left = list(itertools.product(range(x), range(y), range(z)))
        if not left:
            return
        rank = self._current()

        def program(index: tuple[int, int, int]) -> Callable[[], None]:
            def run() -> None:
                _GRID.set(grid)
                _INDEX.set(index)
                executor.fn(**bound)
                self.drain()
                left.remove(index)
                if not left:
                    self._live.append(rank)

            return run

        for index in list(left):
            self._spawn(
                program(index), f"{rank.name}:{executor.fn.__name__}[{', '.join(map(str, index[:dimensions]))}]"
            )
        self._live.remove(rank)
        self._main.switch()


def place_of(frame: FrameType | None, packages: Sequence[str | Path] = ()) -> str:
    """Name the innermost functions that ``frame`` is in, the outer one first, each with its file and line.

    Args:
        frame: where a program stands; None: it has not begun.
        packages: folders that count; empty: everything outside of Triton, NumPy and this package.

    Returns:
        Such as ``receive (receive.py:88) > wait_any (signals.py:200)``; "" where ``frame`` is in no such function.
    """
    folders = tuple(str(package) + os.sep for package in packages)
    names: list[str] = []
    while frame is not None and len(names) < _NAMED_FRAMES:
        file = frame.f_code.co_filename
        if file.startswith(folders) if folders else not file.startswith((*_LIBRARIES, "<")):
            names.append(f"{frame.f_code.co_name} ({os.path.basename(file)}:{frame.f_lineno})")
        frame = frame.f_back
    return " > ".join(reversed(names))


def _require_interpreter() -> None:
    if not is_interpreted():
        raise RuntimeError(
            "TRITON_INTERPRET: expected 1 when Triton was loaded, got kernels that are compiled; set it in the "
            "environment of the process, or before the first import of Triton"
        )


def _require_cpu(name: str, value: Any) -> None:
    if isinstance(value, tuple):
        for part in value:
            _require_cpu(name, part)
    elif hasattr(value, "data_ptr") and getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        raise TypeError(f"{name}: expected a tensor on the CPU, got one on {value.device}; make it there")


def _words(pointer: Any, mask: Any, itemsize: int) -> Any:
    """Numbers of the 4-byte words at which elements under ``mask`` begin and end, ascending."""
    # The interpreter's masks may be int32, which would be indices here.
    begin = pointer[np.broadcast_to(mask, pointer.shape).astype(bool)].astype(np.uint64)
    return np.unique(np.concatenate((begin >> np.uint64(2), (begin + np.uint64(itemsize - 1)) >> np.uint64(2))))


def _variable(variable: contextvars.ContextVar[Any]) -> property:
    """An attribute that each program has for itself."""

    def set_value(self: Any, value: Any) -> None:
        variable.set(value)

    return property(lambda self: variable.get(), set_value)


def _changes(op: Any, old: Any, value: Any, mask: Any) -> bool:
    """Whether an atomic has changed memory: one that polls, or takes a lock that is taken, has not."""
    ops = interpreter._ir.ATOMIC_OP
    old, value, mask = np.broadcast_arrays(old, value, mask)
    if op in (ops.ADD, ops.FADD, ops.OR, ops.XOR):
        changed = value != 0
    elif op == ops.AND:
        changed = old & value != old
    elif op in (ops.MAX, ops.UMAX):
        changed = value > old
    elif op in (ops.MIN, ops.UMIN):
        changed = value < old
    else:
        changed = value != old
    return bool(np.any(changed & mask.astype(bool)))


class _Store:
    """A store that only its program sees yet."""

    def __init__(self, pointer: Any, value: Any, mask: Any) -> None:
        self.pointer, self.value, self.mask = pointer, value, mask
        self.words = _words(pointer, mask, value.dtype.itemsize)

    def overlaps(self, words: Any) -> bool:
        mine = self.words
        if not len(words) or mine[-1] < words[0] or words[-1] < mine[0]:
            return False
        return bool(np.isin(words, mine).any())


@contextmanager
def _interleaved(scheduler: Scheduler) -> Iterator[None]:
    """Route loads, stores, atomics and launches of the interpreter through ``scheduler``."""
    saved = {
        name: getattr(_BUILDER, name)
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    }
    call, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def store(self: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> None:
        scheduler.store(pointer.data, value.data, mask.data)

    def load(self: Any, pointer: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        itemsize = np.dtype(interpreter._get_np_dtype(pointer.get_element_ty())).itemsize
        scheduler.see(pointer.data, mask.data, itemsize)
        result = saved["create_masked_load"](self, pointer, mask, *args, **kwargs)
        scheduler.loaded(kwargs.get("is_volatile", args[-1] if args else False))
        return result

    def rmw(self: Any, op: Any, pointer: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
        if order in _RELEASES and np.any(mask.data):  # compiled, one without a lane does nothing at all
            scheduler.drain()
        scheduler.see(pointer.data, mask.data, value.data.dtype.itemsize)
        result = saved["create_atomic_rmw"](self, op, pointer, value, mask, order, scope)
        scheduler.changed(_changes(op, result.data, value.data, mask.data))
        return result

    def cas(self: Any, pointer: Any, compare: Any, value: Any, order: Any, scope: Any) -> Any:
        if order in _RELEASES:
            scheduler.drain()
        scheduler.see(pointer.data, np.ones(np.shape(pointer.data), dtype=bool), value.data.dtype.itemsize)
        result = saved["create_atomic_cas"](self, pointer, compare, value, order, scope)
        scheduler.changed(bool(np.any((result.data == compare.data) & (value.data != compare.data))))
        return result

    options = interpreter.interpreter_builder.options
    patched: set[int] = set()

    class Kept:
        def restore(self) -> None:
            """Stay patched: other programs are in the middle of theirs."""

    def patch_once(fn: Any) -> Kept:
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            scopes.append(patch(fn))
        return Kept()

    scopes: list[Any] = []
    try:
        # Half of the interpreter's time goes into overflow checks whose result it throws away.
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
        _BUILDER.create_masked_store, _BUILDER.create_masked_load = store, load
        _BUILDER.create_atomic_rmw, _BUILDER.create_atomic_cas = rmw, cas
        _BUILDER.grid_idx, _BUILDER.grid_dim = _variable(_INDEX), _variable(_GRID)
        interpreter.GridExecutor.__call__ = lambda self, *args, **kwargs: scheduler.launch(self, args, kwargs)
        interpreter._patch_lang = patch_once
        yield
    finally:
        interpreter.interpreter_builder.options = options
        for name, value in saved.items():
            setattr(_BUILDER, name, value)
        del _BUILDER.grid_idx, _BUILDER.grid_dim
        interpreter.GridExecutor.__call__, interpreter._patch_lang = call, patch
        for scope in reversed(scopes):
            scope.restore()
