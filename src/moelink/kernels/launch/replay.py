"""Make the launches of a function on rows again, for other tensors, without the function.

A layer's experts are a few launches, between which nothing is computed on the host. For tensors of the same shapes and
dtypes each call launches the same prepared kernels, with other addresses. So the first call of a kind is *noted*: of
each launch its kernel and its words, each of which is the address of a tensor or a number that does not change; the
address of a counter of tiles is that of the call. Later calls make the results and room for the tensors in between, and
launch.

Example: a function of the tensor at 4096 makes one at 8192 and launches a kernel with the words (4096, 8192, 7). Called
with a tensor at 512, for which the allocator returns 1024, its replay launches that kernel with (512, 1024, 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moelink.arith import align_up
from moelink.kernels.launch.arguments import has_hooks
from moelink.kernels.launch.tile_counters import TileCounters

Made = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""The results of a function, and all other tensors that it made."""
_ALIGNMENT = 256
_MOST_KINDS = 1024
"""Kinds of calls that are kept; a program with more makes calls of others as if there were no replays."""


class Launcher(Protocol):
    """The parts of :class:`moelink.kernels.launch.row_launch.RowLauncher` that replays need."""

    tile_counters: TileCounters

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the index of the tensor's device, and its current stream. None where launches do not go to the driver
        as prepared ones: another device is current, kernels are interpreted or those of AMD, or a thread prepares."""

    def noting(self) -> AbstractContextManager[list[Note]]:
        """Return a context that notes the launches of this thread."""


class Note(NamedTuple):
    """A launch: the :class:`~moelink.kernels.launch.row_launch.PreparedRows`, or None where Triton launched the kernel,
    its words, its programs, and whether the last word is the address of a counter of tiles, which each call gets
    anew (:mod:`moelink.kernels.launch.tile_counters`)."""

    prepared: Any
    words: Sequence[int]
    count: int
    counted: bool = False


class Replay:
    """The launches of a function for tensors of one kind."""

    def __init__(self, notes: Sequence[Note], given: Sequence[Tensor], made: Made) -> None:
        """``notes``: of a call with the tensors ``given``, which made the tensors ``made``."""
        results, between = made
        self._results = [(result.shape, result.stride(), result.dtype) for result in results]
        self._places, self._bytes = [], 0
        for tensor in between:
            self._places.append(self._bytes)
            self._bytes += align_up(tensor.nbytes, _ALIGNMENT)
        sources = {tensor.data_ptr(): number for number, tensor in enumerate((*given, *results, *between))}
        known, self._launches = len(sources), []
        constants: list[int] = []
        self.counted = any(note.counted for note in notes)
        for prepared, words, count, counted in notes:
            picked = []
            for word in words[:-1] if counted else words:
                if word not in sources:
                    sources[word] = known + len(constants)
                    constants.append(word)
                picked.append(sources[word])
            self._launches.append((prepared.launch, itemgetter(*picked, *([-1] if counted else ())), count))
        self._constants = tuple(constants)

    def run(
        self, given: Sequence[Tensor], addresses: Sequence[int], stream: int, counter: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Make the launches on ``stream`` for the tensors ``given``, at ``addresses``; return the results. ``counter``:
        of tiles, if any launch is ``counted``. Launches follow one another, so one serves them all."""
        device = given[0].device
        # With new_empty, torch would compute the strides again, at a higher cost.
        results = tuple(
            [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self._results]
        )
        words = [*addresses, *[result.data_ptr() for result in results]]
        if self._places:
            room = torch.empty_strided((self._bytes,), (1,), dtype=torch.uint8, device=device)  # until all is launched
            at = room.data_ptr()
            words += [at + place for place in self._places]
        words += self._constants
        if counter is not None:
            words.append(counter.data_ptr())
        for launch, pick, count in self._launches:
            launch(pick(words), count, stream)
        return results


class Replays:
    """The replays of a process, by function and kind of tensors."""

    def __init__(self) -> None:
        self._known: dict[Any, Replay | None] = {}

    def run(
        self, launcher: Launcher, given: tuple[Tensor, ...], function: Callable[..., Made], *rest: Any
    ) -> tuple[Tensor, ...]:
        """Return the results of ``function(*given, *rest)``.

        Args:
            given: tensors. Unless they are contiguous and on one device, the function is called, which may refuse them.
            function: makes new tensors, returns all of them, and does nothing else but launch kernels on rows. Its
                launches and refusals depend on shapes and dtypes of ``given`` and on ``rest`` alone.
        """
        place, device = launcher.place_of(given[0]), given[0].get_device()
        if place is None or has_hooks():
            return function(*given, *rest)[0]
        addresses, kind = [], [function, rest, place[0]]
        for tensor in given:
            at = tensor.data_ptr()
            if at & 15 or not tensor.is_contiguous() or tensor.get_device() != device:
                return function(*given, *rest)[0]
            addresses.append(at)
            kind += (tensor.shape, tensor.dtype)
        key = tuple(kind)
        try:
            replay = self._known[key]
        except KeyError:
            return self._first(launcher, key, given, function, rest)
        if replay is None:
            return function(*given, *rest)[0]
        counter = launcher.tile_counters.of(given[0].device) if replay.counted else None
        return replay.run(given, addresses, place[1], counter)

    def _first(
        self, launcher: Launcher, key: Any, given: tuple[Tensor, ...], function: Callable[..., Made],
        rest: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Make a call, and note it if it can be replayed."""
        with launcher.noting() as notes:
            made = function(*given, *rest)
        if len(self._known) < _MOST_KINDS:
            addresses = [tensor.data_ptr() for tensor in (*given, *made[0], *made[1])]
            # Words that are no addresses are below any: numbers of an int32 parameter.
            apart = len(set(addresses)) == len(addresses) and min(addresses) >= 1 << 31
            aligned = not any(at & 15 for at in addresses)
            fits = notes and apart and aligned and all(note.prepared is not None for note in notes)
            self._known[key] = Replay(notes, given, made) if fits else None
        return made[0]
