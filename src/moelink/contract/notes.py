"""The host's notes of the launchers' arguments, by which the second half of a pair is compared with the first.

Launches do not synchronise, so nothing is read from a device. A launch that a CUDA graph captures may run again at any
time; what it was given stays in the notes for as long as they live.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

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
        """Return what the launch before may have been given: one thing, unless CUDA graphs captured others."""
        return self.captured if self.latest is None else {*self.captured, self.latest}


class CallNotes:
    """The notes of one rank: of its dispatches and of the first halves of its combines, by routing.

    A routing is known by the address of ``slot_of``: other objects around the same tensors are the same routing.

    Attributes:
        fewest_rows: rows of the smallest output that a dispatch was given, or None before the first.
    """

    def __init__(self) -> None:
        self._dispatches: dict[int, Noted] = {}
        self._combines: dict[int, Noted] = {}
        self._arrivals: dict[int, Noted] = {}
        self._copies: dict[int, Noted] = {}
        self.fewest_rows: int | None = None

    def add_dispatch(self, slot_of: Tensor, given: Given) -> None:
        """Note a dispatch, or its first half."""
        self._dispatches.setdefault(slot_of.data_ptr(), Noted()).add(given, captured=is_captured(slot_of))

    def add_combine(self, slot_of: Tensor, given: Given) -> None:
        """Note the first half of a combine."""
        self._combines.setdefault(slot_of.data_ptr(), Noted()).add(given, captured=is_captured(slot_of))

    def add_arrival(self, slot_of: Tensor, given: Given) -> None:
        """Note that all rows of a combine are waited for, in a phase of their own."""
        self._arrivals.setdefault(slot_of.data_ptr(), Noted()).add(given, captured=is_captured(slot_of))

    def add_copy(self, output_tokens: Tensor, given: Given) -> None:
        """Note that the shared expert's rows are copied to an output."""
        self._copies.setdefault(output_tokens.data_ptr(), Noted()).add(given, captured=is_captured(output_tokens))

    def add_rows(self, rows: int) -> None:
        """Note the rows of a dispatch's output."""
        self.fewest_rows = rows if self.fewest_rows is None else min(rows, self.fewest_rows)

    def dispatches(self, slot_of: Tensor) -> set[Given]:
        """Return what the latest dispatch over this routing may have been given; nothing if there was none."""
        return self._dispatches.get(slot_of.data_ptr(), Noted()).given()

    def combines(self, slot_of: Tensor) -> set[Given]:
        """Return the same of the latest first half of a combine."""
        return self._combines.get(slot_of.data_ptr(), Noted()).given()

    def arrivals(self, slot_of: Tensor) -> set[Given]:
        """Return the same of the latest wait that no reduction has followed."""
        return self._arrivals.get(slot_of.data_ptr(), Noted()).given()

    def copies(self, output_tokens: Tensor) -> set[Given]:
        """Return the same of the latest copy to this output that no reduction has followed."""
        return self._copies.get(output_tokens.data_ptr(), Noted()).given()

    def finish(self, slot_of: Tensor, output_tokens: Tensor) -> None:
        """Note the reduction that the wait and the copy were for. What graphs captured stays."""
        for notes, tensor in ((self._arrivals, slot_of), (self._copies, output_tokens)):
            noted = notes.pop(tensor.data_ptr(), None)
            if noted is not None and noted.captured:
                notes[tensor.data_ptr()] = Noted(None, noted.captured)

    def forget(self, slot_of: Tensor) -> None:
        """Drop the notes of whatever routing was at this address before."""
        self._dispatches.pop(slot_of.data_ptr(), None)
        self._combines.pop(slot_of.data_ptr(), None)
        self._arrivals.pop(slot_of.data_ptr(), None)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Note that the routing at ``target`` is a copy of the one at ``source``."""
        self.forget(target)
        for notes in (self._dispatches, self._combines):
            noted = notes.get(source.data_ptr())
            if noted is not None:
                notes[target.data_ptr()] = Noted(noted.latest, set(noted.captured))
