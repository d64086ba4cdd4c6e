"""Interpreted kernels under seeded schedules: all programs of all ranks in one process, switched at every atomic
and every volatile load.

What the stock interpreter cannot show and this can:

* programs of a launch, and launches of different ranks, interleave in any order: a wait for a later program works;
* a wait that nobody satisfies raises :class:`Deadlock`, naming who waits where, instead of hanging;
* plain stores may sit in a per-program *store buffer* until that program releases (or ends): a missing release, or one
  that comes before its stores, leaves the reader with old bytes;
* a store buffer drains at random moments in random order of addresses, so that nothing but a release orders stores. A
  program sees its own: what it loads or changes atomically drains first, and nothing else does;
* with ``speed`` (name of a program -> how often it runs) what is slow stays slow: a rank that is a call ahead, a sender
  that has hardly begun when all others have ended. Choosing alike among all programs hardly ever shows such schedules.

It cannot show a missing ``debug_barrier`` (a program is one thread here) or a wrong scope; the ahead-of-time tests look
for those in PTX. Programs are greenlets; Triton's interpreter keeps the current program's id in one place, which a
context variable per greenlet replaces.
"""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

import moelink

# A GPU machine may have nothing but torch and pytest: the tests that import this module are skipped there.
pytest.importorskip("greenlet", reason="schedules need greenlet, of the dependency group dev")
from greenlet import getcurrent, greenlet  # noqa: E402

_INDEX: contextvars.ContextVar[tuple[int, int, int]] = contextvars.ContextVar("grid_idx")
_GRID: contextvars.ContextVar[tuple[int, int, int]] = contextvars.ContextVar("grid_dim")
_PACKAGE = str(Path(moelink.__file__).parent) + os.sep
_BUILDER = interpreter.InterpreterBuilder
_RELEASES = (interpreter._ir.MEM_SEMANTIC.RELEASE, interpreter._ir.MEM_SEMANTIC.ACQUIRE_RELEASE)


class Deadlock(AssertionError):
    """Every live program waits, and nothing changed for a long time."""


class Scheduler:
    """One schedule. ``store_buffer`` holds plain stores back; ``patience`` switches without progress are a deadlock."""

    def __init__(
        self,
        seed: int,
        *,
        store_buffer: bool = True,
        patience: int = 300,
        drain: float = 0.05,
        speed: Callable[[str], float] | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._store_buffer, self._patience, self._drain_chance = store_buffer, patience, drain
        self._speed = speed
        if speed is not None:
            self._patience *= 20
        self._live: list[Any] = []
        self._idle = 0
        self.switches = 0

    def run(self, ranks: Sequence[Callable[[], None]]) -> None:
        """Run one function per rank, which launch kernels, until all have ended."""
        with _interleaved(self):
            self._main = getcurrent()
            for number, function in enumerate(ranks):
                self._spawn(function, f"rank{number}")
            while self._live:
                program = self._next()
                self.switches += 1
                program.switch()
                if program.dead:
                    self._live.remove(program)
                    self._idle = 0
                elif self._idle > self._patience * len(self._live):
                    waiting = "; ".join(f"{p.name} {place_of(p.gr_frame)}" for p in self._live)
                    raise Deadlock(f"no progress after {self.switches} switches; waiting: {waiting}")
                for other in self._live:
                    if other.stores and self._random.random() < self._drain_chance:
                        self._drain_one(other)

    def _next(self) -> Any:
        # Now and then everybody gets a turn, so that whoever waits for a slow program is not taken for stuck.
        if self._speed is None or self.switches % 500 == 0:
            return self._random.choice(self._live)
        return self._random.choices(self._live, [self._speed(program.name) for program in self._live])[0]

    def _spawn(self, function: Callable[[], None], name: str) -> None:
        program = greenlet(function, self._main)
        program.stores, program.name = [], name
        program.gr_context = contextvars.copy_context()
        self._live.append(program)

    def pause(self, progress: bool) -> None:
        """Let another program run. ``progress``: memory changed."""
        self._idle = 0 if progress else self._idle + 1
        self._main.switch()

    def store(self, pointer: Any, value: Any, mask: Any) -> None:
        """A plain store: one buffered entry per call, or straight to memory."""
        entry = _Store(np.array(pointer), np.array(value), np.array(mask))
        if not self._store_buffer:
            self._idle = 0
            interpreter._interpreter.store(entry.pointer, entry.value, entry.mask)
        elif len(entry.words):
            getcurrent().stores.append(entry)

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
        program = getcurrent()
        while program.stores:
            self._drain_one(program)

    def load(self, pointer: Any, mask: Any, itemsize: int) -> None:
        """The current program is about to load, or to change atomically: it sees its own stores."""
        program = getcurrent()
        if program.stores:
            words = _words(np.array(pointer), np.array(mask), itemsize)
            while (index := next((i for i, s in enumerate(program.stores) if s.overlaps(words)), None)) is not None:
                self._drain_one(program, index)

    def launch(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a grid: its programs join the schedule, the launching rank sleeps until they have ended."""
        names = inspect.getfullargspec(executor.fn).args
        kwargs = {name: value for name, value in kwargs.items() if name in names}
        interpreter._patch_lang(executor.fn)
        bound = inspect.getcallargs(executor.fn, *args, **kwargs)
        bound = {k: v if k in executor.constexprs else interpreter._implicit_cvt(v) for k, v in bound.items()}
        grid = (tuple(executor.grid) + (1, 1, 1))[:3]
        rank, left = getcurrent(), list(range(grid[0]))

        def program(index: int) -> Callable[[], None]:
            def run() -> None:
                _GRID.set(grid)
                _INDEX.set((index, 0, 0))
                executor.fn(**bound)
                self.drain()
                left.remove(index)
                if not left:
                    self._live.append(rank)

            return run

        for index in list(left):
            self._spawn(program(index), f"{rank.name}:{executor.fn.__name__}[{index}]")
        self._live.remove(rank)
        self._main.switch()


def place_of(frame: FrameType | None) -> str:
    """Name the innermost function of the package that ``frame`` is in, and its line; "" where it is in none."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE) and code.co_name != "check_timeout":  # who calls that one says more
            return f"{code.co_name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _words(pointer: Any, mask: Any, itemsize: int) -> Any:
    """Numbers of the 4-byte words at which elements under ``mask`` begin and end, ascending."""
    # The interpreter's masks may be int32, which would be indices here.
    begin = pointer[np.broadcast_to(mask, pointer.shape).astype(bool)].astype(np.uint64)
    return np.unique(np.concatenate((begin >> np.uint64(2), (begin + np.uint64(itemsize - 1)) >> np.uint64(2))))


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
        scheduler.load(pointer.data, mask.data, itemsize)
        result = saved["create_masked_load"](self, pointer, mask, *args, **kwargs)
        if kwargs.get("is_volatile", args[-1] if args else False):
            scheduler.pause(False)
        return result

    def rmw(self: Any, op: Any, pointer: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
        if order in _RELEASES and np.any(mask.data):  # compiled, one without a lane does nothing at all
            scheduler.drain()
        scheduler.load(pointer.data, mask.data, value.data.dtype.itemsize)
        result = saved["create_atomic_rmw"](self, op, pointer, value, mask, order, scope)
        adds = op == interpreter._ir.ATOMIC_OP.ADD
        scheduler.pause(not adds or bool(np.any(value.data)))
        return result

    def cas(self: Any, pointer: Any, compare: Any, value: Any, order: Any, scope: Any) -> Any:
        if order in _RELEASES:
            scheduler.drain()
        scheduler.load(pointer.data, np.ones(np.shape(pointer.data), dtype=bool), value.data.dtype.itemsize)
        result = saved["create_atomic_cas"](self, pointer, compare, value, order, scope)
        scheduler.pause(bool(np.any(result.data == compare.data)))
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
        _BUILDER.grid_idx = property(lambda self: _INDEX.get(), lambda self, value: _INDEX.set(value))
        _BUILDER.grid_dim = property(lambda self: _GRID.get(), lambda self, value: _GRID.set(value))
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
