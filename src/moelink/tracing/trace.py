"""Hold a trace: the records of all ranks on one clock."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moelink.errors import StateError
from moelink.tracing.chrome import events_of
from moelink.tracing.records import CtaRecord
from moelink.tracing.summary import Summary, summarise
from moelink.version import __version__

SCHEMA_VERSION = 1


def write(document: dict[str, Any], path: str | Path) -> None:
    """Write a trace in Chrome's format to ``path``."""
    Path(path).write_text(to_text(document) + "\n")


def to_text(document: dict[str, Any]) -> str:
    """Return a trace in Chrome's format as JSON text, without blanks, as it is large."""
    return json.dumps(document, separators=(",", ":"))


class Trace:
    """The times at which the CTAs of all ranks read, waited, stored and published in a ``with ep.trace()`` block.

    It is complete when the block has ended, and the same on every rank.

    Attributes:
        unit: "ns", or "steps" with interpreted kernels: the number of a stamp among the stamps of all ranks.
        clock_errors: of each rank, the most error of its times against rank 0's, in ``unit``; 0 with one clock.
        facts: further fields of its files: world size, sizes, devices.
    """

    def __init__(self, unit: str, facts: dict[str, Any]) -> None:
        self.unit, self.facts = unit, facts
        self.clock_errors: tuple[int, ...] = ()
        self._records: tuple[CtaRecord, ...] | None = None

    def complete(self, records: list[CtaRecord], clock_errors: tuple[int, ...]) -> None:
        """Take the records of all ranks."""
        self._records, self.clock_errors = tuple(records), clock_errors

    @property
    def records(self) -> tuple[CtaRecord, ...]:
        """One for each CTA of each call: of each role the last calls, 16 at most.

        Raises:
            StateError: the block has not ended yet, or ended with an exception.
        """
        if self._records is None:
            raise StateError(
                "trace: expected a block `with ep.trace()` that ended without an exception, got none so far; use the "
                "trace after the block"
            )
        return self._records

    def summary(self) -> Summary:
        """Return median and worst of each moment, and the slowest peers. ``print`` shows a table.

        Raises:
            StateError: as :attr:`records`.
        """
        two = sum(sorted(self.clock_errors)[-2:])
        return summarise(self.records, unit=self.unit, clock_error=two)

    def to_json(self) -> dict[str, Any]:
        """Return the trace in Chrome's trace format (:mod:`moelink.tracing.chrome`).

        Raises:
            StateError: as :attr:`records`.
        """
        return {
            "traceEvents": events_of(self.records, unit=self.unit),
            "displayTimeUnit": "ns",
            "summary": asdict(self.summary()),
            "otherData": {
                "report": "moelink trace", "schema_version": SCHEMA_VERSION, "moelink": __version__, "unit": self.unit,
                "clock_errors": list(self.clock_errors), **self.facts,
            },
        }  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the trace to ``path``, as JSON that Perfetto (ui.perfetto.dev) opens.

        Raises:
            StateError: as :attr:`records`.
        """
        write(self.to_json(), path)
