"""JSON from strangers, in files and from peers: read within bounds, and held against a form before anything uses it.

A *form* is a :class:`Kind` for a text or a number, ``Maybe(form)`` for a value or null, ``[form]`` for a list of one or
more (``[form, ...]``: also an empty one), a tuple for the first form that fits, and a dict for an object::

    {"machine": TEXT, "commit?": Maybe(TEXT), "cases": [{"tokens": SIZE}], "parts": {"*": {"median": US}}}

has "machine", "cases" and "parts", may have "commit", and all fields of "parts" have one form. (A kind as the key is
the kind of all names; "*" is TEXT.) An object may have other fields, which are not read. Text is short and printable,
so that it cannot control a terminal. Numbers are finite and bounded, so that no small file takes minutes or gigabytes.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelink.errors import ConfigError

MOST_BYTES = 64 << 20
MOST_DIGITS, MOST_LETTERS = 20, 200


@dataclass(frozen=True)
class Kind:
    """One value: its name in messages, its test, and its conversion (None: none; raises ValueError)."""

    expected: str
    accepts: Callable[[Any], bool]
    take: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Maybe:
    """A value of ``form``, or null."""

    form: Any


def number(what: str, least: float, most: float, types: tuple[type[float], ...] = (int, float)) -> Kind:
    """Return the kind of numbers in [least, most], in which NaN is not."""

    def accepts(value: Any) -> bool:
        return isinstance(value, types) and not isinstance(value, bool) and bool(least <= value <= most)

    return Kind(f"{what} in [{least:.15g}, {most:.15g}]", accepts)


def count(what: str, most: int, least: int = 1) -> Kind:
    """Return the kind of whole numbers of something, in [least, most]."""
    return number(f"a number of {what}", least, most, (int,))


def one_of(*choices: str) -> Kind:
    """Return the kind of these texts."""
    return Kind(" or ".join(map(repr, choices)), lambda value: isinstance(value, str) and value in choices)


TEXT = Kind(
    f"at most {MOST_LETTERS} printable characters without $",
    lambda value: isinstance(value, str) and len(value) <= MOST_LETTERS and value.isprintable() and "$" not in value,
)
"""matplotlib takes text between two $ for a formula."""
VERSION = Kind("1", lambda value: type(value) is int and value == 1)
"""Of the schema, which has had one version in files of every kind."""
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
RANKS, EXPERTS, SIZE = count("ranks", 1 << 12), count("experts", 1 << 14), count("elements", 1 << 20)
INDEX = number("the index of a case", 0, 1 << 20, (int,))
US = number("microseconds", 1e-3, 1e12)
"""Of something measured, by which one may divide."""


def printable(name: str) -> str:
    """Return a file's name as it is, or escaped if it cannot be printed."""
    return name if name.isprintable() else ascii(name)[1:-1]


def read(path: Path, name: str, expected: str) -> object:
    """Read a JSON file; messages call the argument ``name``, and the right files ``expected``.

    Raises:
        ConfigError: it cannot be read, is larger than 64 MiB, no JSON, nested too deep, or has too long numbers.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
        return json.loads(data.decode(), parse_int=_integer)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(name, expected, f"{path} ({error})") from error


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:  # the time of int() grows with the square of the length
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def check(value: object, form: Any, name: str, expected: str = "", file: str = "") -> None:
    """Hold a value against its form; messages call it ``name``, and a document as :func:`read`, with its ``file``.

    Raises:
        ConfigError: the value has another form. The message says what and where.
    """
    try:
        take(value, form)
    except FormError as error:
        what, at, got = error.args
        place = f"{expected}, with {what}{f' as {at}' * bool(at)}" if file else what
        raise ConfigError(name, place, f"{reprlib.repr(got)} in {file}" if file else got) from None


class FormError(ValueError):
    """A value of another form: (the expected value, its place, the value)."""


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


def take(value: Any, form: Any, at: str = "") -> Any:
    """Return the part of ``value`` that ``form`` names, each value as its kind takes it.

    Raises:
        FormError: the first place, from ``at`` on, that has another form.
        ValueError: the kind of a value cannot take it.
    """
    if isinstance(form, Maybe):
        return None if value is None else take(value, form.form, at)
    if isinstance(form, Kind):
        if not form.accepts(value):
            raise FormError(form.expected, at, value)
        return value if form.take is None else form.take(value)
    if isinstance(form, tuple):
        for one in form[:-1]:
            with suppress(FormError):
                return take(value, one, at)
        return take(value, form[-1], at)
    if isinstance(form, list):
        if not isinstance(value, list) or (len(form) == 1 and not value):
            raise FormError("a list of one or more" if len(form) == 1 else "a list", at, value)
        return [take(entry, form[0], f"{at}[{index}]") for index, entry in enumerate(value)]
    if not isinstance(value, dict):
        raise FormError("an object", at, value)
    found: dict[Any, Any] = {}
    for key, inner in form.items():
        kind = TEXT if key == "*" else key
        if isinstance(kind, Kind):
            for name, entry in value.items():
                known = take(name, kind, f"a name in {at}")
                found[known] = take(entry, inner, f"{at}.{name}".lstrip("."))
        elif not key.endswith("?") or key[:-1] in value:
            plain = key.removesuffix("?")
            found[plain] = take(value.get(plain, _Absent()), inner, f"{at}.{plain}".lstrip("."))
    return found
