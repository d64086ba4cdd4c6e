"""The host's notes of the launchers' arguments, by which the second half of a pair is compared with the first.

Launches do not synchronise, so nothing is read from a device. A launch that a CUDA graph captures may run again at any
time; its arguments stay in the notes for as long as these live.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from moelink.output import is_captured


class Given(NamedTuple):
    """The arguments of one launch: its number of own tokens, and whether weights travelled with their rows."""

    num_tokens: int
    weighted: bool


@dataclass
class Noted:
    """The arguments of launches over one routing.

    Attributes:
        latest: the last one that was not captured.
        captured: those that CUDA graphs captured.
    """

    latest: Given | None = None
    captured: set[Given] = field(default_factory=set)

    def add(self, given: Given, *, captured: bool) -> None:
        """Note a launch."""
        if captured:
            self.captured.add(given)
        else:
            self.latest = given

    def given(self) -> set[Given]:
        """Return the possible arguments of the launch before: one record, unless CUDA graphs captured others."""
        return self.captured if self.latest is None else {*self.captured, self.latest}


What = Literal["dispatch", "combine", "arrival", "copy"]
"""The notes of a routing: its dispatch or the first half of that, the first half of its combine, and the wait for a
combine's rows in a phase of its own. A copy of the shared expert's rows is a note of the output that they went to."""


class CallNotes:
    """The notes of one rank, by routing.

    A routing is known by the address of ``slot_of``, an output by its own: other objects around the same tensors are
    the same routing.

    Attributes:
        fewest_rows: rows of the smallest output that a dispatch was given, or None before the first.
    """

    def __init__(self) -> None:
        self._noted: defaultdict[int, dict[What, Noted]] = defaultdict(dict)
        self.fewest_rows: int | None = None

    def add(self, what: What, tensor: Tensor, given: Given) -> None:
        """Note a launch over a routing or to an output, of which ``tensor`` is the address."""
        self._noted[tensor.data_ptr()].setdefault(what, Noted()).add(given, captured=is_captured(tensor))

    def add_rows(self, rows: int) -> None:
        """Note the rows of a dispatch's output."""
        self.fewest_rows = rows if self.fewest_rows is None else min(rows, self.fewest_rows)

    def given(self, what: What, tensor: Tensor) -> set[Given]:
        """Return the possible arguments of the latest such launch; none if there was no launch, or, of an arrival and a
        copy, if a reduction has followed."""
        return self._noted.get(tensor.data_ptr(), {}).get(what, Noted()).given()

    def finish(self, slot_of: Tensor, output_tokens: Tensor) -> None:
        """Note the reduction that the wait and the copy were for. Notes of captured launches stay."""
        for what, tensor in (("arrival", slot_of), ("copy", output_tokens)):
            notes = self._noted[tensor.data_ptr()]
            noted = notes.pop(what, None)  # type: ignore[call-overload]
            if noted is not None and noted.captured:
                notes[what] = Noted(None, noted.captured)  # type: ignore[index]

    def forget(self, slot_of: Tensor) -> None:
        """Drop the notes of any routing that was at this address before."""
        self._noted.pop(slot_of.data_ptr(), None)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Note that the routing at ``target`` is a copy of the one at ``source``."""
        notes = self._noted[source.data_ptr()]
        self._noted[target.data_ptr()] = {
            what: Noted(noted.latest, set(noted.captured))
            for what, noted in notes.items()
            if what in ("dispatch", "combine")
        }
