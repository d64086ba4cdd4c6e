"""Common fields of files of constants: their kind and version, and the results that they were fitted to.

    {"schema_version": 1, "kind": "...", "machine": "...",
     "fitted_to": [{"file": ..., "commit": ..., "date": ..., "ranks": ...}, ...], ...}

``moelink plan fit`` and ``fit-experts`` write such files, of results of benchmarks and never by hand. The package may
hold one of each kind.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from moelink.tools import documents
from moelink.tools.documents import RANKS, TEXT, Kind, number, one_of

SCHEMA_VERSION = 1

NAME = Kind("a printable name", lambda name: isinstance(name, str) and name.isprintable() and len(name) < 2000)
PROVENANCE = {"machine": TEXT, "fitted_to": [{"file": NAME, "date": TEXT, "ranks": RANKS}]}
"""Form of the fields that all files have."""
US, RATE = number("microseconds", 0, 1e12), number("a positive number", 1e-9, 1e15)


@dataclass(frozen=True)
class Run:
    """A result file, with the facts by which a reader finds it."""

    file: str
    commit: str | None
    date: str
    device: str
    ranks: int

    @classmethod
    def of(cls, document: Mapping[str, Any], file: str) -> Run:
        """The run of a result; of one rank if it has no number."""
        devices = ", ".join(sorted(set(document["devices"])))
        return cls(file, document.get("commit"), document["date"], devices, document.get("ranks", 1))


@dataclass(frozen=True)
class ConstantsFile:
    """One kind of file.

    Attributes:
        kind: as the file states it.
        command: the command that writes such files.
        packaged: name of the one beside this module.
        form: of its fields besides those of all files.
    """

    kind: str
    command: str
    packaged: str
    form: Mapping[str, Any]

    @property
    def expected(self) -> str:
        """The file that messages ask for."""
        return f"a JSON file of {self.command}"

    def head(self, machine: str, runs: Iterable[Run]) -> dict[str, Any]:
        """Return the first fields of a new file."""
        ordered = sorted(set(runs), key=lambda run: (run.ranks, run.file))
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "machine": machine,
            "fitted_to": [
                {"file": run.file, "commit": run.commit, "date": run.date, "ranks": run.ranks} for run in ordered
            ],
        }

    def checked(self, document: Any, name: str) -> dict[str, Any]:
        """Return a file's content; messages call the file ``name``.

        Raises:
            ConfigError: it is no file of this kind, version and form.
        """
        form = {"kind": one_of(self.kind), "schema_version": documents.VERSION, **PROVENANCE, **self.form}
        documents.check(document, form, "constants", self.expected, name)
        return document  # type: ignore[no-any-return]

    def load(self, path: Path) -> tuple[object, str]:
        """Return content and name of a file, for :meth:`checked`.

        Raises:
            ConfigError: it cannot be read, or is no JSON.
        """
        return documents.read(path, "constants", self.expected), documents.printable(path.name)

    def load_packaged(self) -> tuple[object, str] | None:
        """Return content and name of the packaged file; None when the package holds none."""
        resource = files("moelink.tools.plan").joinpath(self.packaged)
        if not resource.is_file():
            return None
        return json.loads(resource.read_text()), f"moelink/tools/plan/{self.packaged}"


def runs_text(document: Mapping[str, Any]) -> str:
    """Return the results that a file was fitted to: ``"decode.json (2026-01-02, 2 ranks), ..."``."""
    return ", ".join(f"{run['file']} ({run['date']}, {run['ranks']} ranks)" for run in document["fitted_to"])


def check_fields(constants: object, forms: Mapping[str, Any]) -> None:
    """Hold fields of a record against their forms; raises ConfigError by the name of the field."""
    for name, form in forms.items():
        documents.check(getattr(constants, name), form, name)


def rounded(constants: object) -> dict[str, float | None]:
    """Return the fields of a record of constants to six digits: more would claim more than was measured."""
    fields: dict[str, float | None] = dataclasses.asdict(constants)  # type: ignore[call-overload]
    return {name: None if value is None else float(f"{value:.6g}") for name, value in fields.items()}
