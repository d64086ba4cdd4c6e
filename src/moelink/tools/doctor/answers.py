"""The forms of what ranks tell one another, and the reading of an answer that may have any other.

Ranks talk over a store without a password: a stranger who reaches its port can write there, and ranks of another
version write other fields. So a rank takes an answer if it has the form of this version, and makes its text printable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moelink.control.probe import Address

LONGEST_TEXT = 2000
"""Characters of a text in an answer; the rest is cut off."""
LARGEST = 1e18
"""Numbers in answers are below this: bytes, seconds and rates are."""


def printable(text: str) -> str:
    """Return ``text``, cut to LONGEST_TEXT, with a question mark for each character that a terminal may act on."""
    return "".join(each if each.isprintable() else "?" for each in text[:LONGEST_TEXT])


def read(value: Any, form: Any) -> Any:
    """Return ``value`` if it has the form, with printable texts.

    Forms are ``str``; ``bool``; ``float`` (finite, below LARGEST); None; a list of one form, of its items; a tuple of
    forms, of which the first that fits counts; ``{str: form}`` and ``{int: form}``, of all values of an object; an
    object of names, where ``name?`` may be missing and names without a form are left out; a function of a value.

    >>> read({"host": "a\\x1b", "more": 1}, {"host": str, "time?": float})
    {'host': 'a?'}

    Raises:
        ValueError: it has another form.
    """
    if isinstance(form, tuple):
        return _first(value, form)
    if isinstance(form, list) and isinstance(value, list):
        return [read(each, form[0]) for each in value]
    if isinstance(form, dict) and isinstance(value, dict):
        kind = next(iter(form))
        if isinstance(kind, type):
            return {_name(name, kind): read(each, form[kind]) for name, each in value.items()}
        needed = [name for name in form if not name.endswith("?") or name[:-1] in value]
        if all(name.removesuffix("?") in value for name in needed):
            return {name.removesuffix("?"): read(value[name.removesuffix("?")], form[name]) for name in needed}
    if form is str and isinstance(value, str):
        return printable(value)
    if form is float and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST:
        return value
    if (form is bool and isinstance(value, bool)) or (form is None and value is None):
        return value
    if callable(form) and not isinstance(form, type):
        return form(value)
    raise ValueError(f"expected {form}, got {type(value).__name__}")


def _first(value: Any, forms: tuple[Any, ...]) -> Any:
    for form in forms:
        try:
            return read(value, form)
        except ValueError:
            continue
    raise ValueError(f"expected one of {forms}, got {type(value).__name__}")


def _name(name: Any, kind: Callable[[Any], Any]) -> Any:
    return printable(name) if kind is str and isinstance(name, str) else kind(name)


def address(text: Any) -> Address:
    """Read the address of a probe server from its hexadecimal text. Raises ValueError."""
    return Address.decode(bytes.fromhex(read(text, str)))


FORMS: Mapping[str, Any] = {
    "facts": {
        "versions": {str: (str, None)}, "host": str, "time?": float, "nvshmem": bool, "network": [str],
        "variables?": {str: str},
        "device": {
            "kind": str, "name": str, "free": float, "total": float, "driver": {str: str}, "nvlinked?": [float],
        },
    },
    "times": float,
    "addresses": address,
    "reached": {int: str},
    "mesh": str,
    "pairs": (str, {"latency_us": float, "gb_per_s": float}, None),
    "seconds": float,
    "formats": {str: str},
    "done": bool,
}  # fmt: skip
"""The form of each step's answer, for :func:`read`. A rank that is in no pair says None of it."""
