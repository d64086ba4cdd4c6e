"""Fingerprints of kernels: whether a change of the source is one of what the kernels do.

Print the forms of a tree, change it, print again. Two trees whose prints are equal have the same kernels, whatever was
moved or renamed in between, so that GPU runs and timings of one speak for the other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping

from moelink_testing.lowering import Lowered

NAME = re.compile(r"%[A-Za-z_0-9\-]+")
BOUND = re.compile(r"%[A-Za-z_0-9\-]+(?= = )")
"""Names that a region begins with, as in ``iter_args(%a = %b)``."""
CONSTANT = re.compile(r"\s*(%[A-Za-z_0-9\-]+) = arith\.constant (.*)")
PURE = re.compile(
    r"arith\.|math\.|tt\.(?:ptr_to_int|int_to_ptr|make_range|splat|addptr|expand_dims|broadcast|bitcast|reshape|join|gather)\b"
)
"""Operations without side effects or regions."""
SYMBOL = re.compile(r'@(?:"[^"]*"|[\w.$]+)')


def prints(forms: Mapping[str, Lowered] | Iterable[tuple[str, Lowered]]) -> dict[str, str]:
    """Hash each form by what it does: 16 hexadecimal digits, the same on every machine with the same Triton.

    A print does not depend on names, on files and lines, on the order of a kernel's arguments, or on where between two
    accesses to memory its arithmetic stands.

    Args:
        forms: forms lowered until "ttir" or further, each with a name of your choice; a generator keeps one at a time.

    Returns:
        The print of each form, by its name, in the order of the forms.

    Raises:
        ValueError: two forms have the same name, or one was lowered until "ir" only.

    Example: with ``send`` of ``talk.py`` in the README.

    >>> from talk import send
    >>> kinds = {"data": "*fp32", "flag": "*i32"}
    >>> form, shorter = (lowered(send, kinds, {"N": size}, until="ttir") for size in (1024, 512))
    >>> found = prints({"before": form, "after": form, "shorter": shorter})
    >>> found["before"] == found["after"] != found["shorter"]
    True
    """
    found: dict[str, str] = {}
    for name, form in forms.items() if isinstance(forms, Mapping) else forms:
        if name in found:
            raise ValueError(f"forms: expected a name of its own for each, got {name!r} twice")
        found[name] = hashlib.sha1(nameless(form.ttir).encode()).hexdigest()[:16]
    return found


def nameless(text: str) -> str:
    """TTIR without what does not matter: where it comes from, names, the order of arguments and constants.

    Arithmetic may stand anywhere before its first use: only what reads or writes memory, or has regions, keeps its
    place.

    Example: the lines ``%a = arith.constant 1 : i32`` and ``%b = tt.load %x, %a : i32 loc(#loc7)`` become
    ``%2 = tt.load %1, <1 : i32> : i32``.
    """
    functions: list[list[str]] = [[]]
    for line in re.sub(r" *loc\([^)]*\)+", "", text).splitlines():
        if line.lstrip().startswith("tt.func"):
            functions.append([])
        if not line.startswith("#loc"):
            functions[-1].append(line.rstrip())
    done = [line for function in functions for line in _renumbered(function)]
    symbols: dict[str, str] = {}
    return SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"@{len(symbols)}"), "\n".join(done))


class _Value:
    """A value of a function. ``name`` is None until it is used by what reads or writes memory, or has regions; from
    ``parts``, the text of pure arithmetic and its operands, it is named then, or else by the next number."""

    __slots__ = ("name", "parts")

    def __init__(self, parts: list[str | _Value] | None = None, name: str | None = None) -> None:
        self.parts, self.name = parts, name


def _renumbered(function: list[str]) -> list[str]:
    """Lines of one function, its values numbered in the order in which they are used, its constants in their places."""
    constants = {found[1]: f"<{found[2].strip()}>" for found in map(CONSTANT.match, function) if found}
    values: dict[str, _Value] = {}
    count = 0

    def number() -> str:
        nonlocal count
        count += 1
        return f"%{count}"

    def define(match: re.Match[str]) -> str:
        name = number()
        values[match[0]] = _Value(name=name)  # a name may be taken anew in another region
        return name

    def use(match: re.Match[str]) -> str:
        return constants.get(match[0]) or _name(values.setdefault(match[0], _Value()), number)

    done = []
    for line in function:
        if CONSTANT.match(line):
            continue
        if line.lstrip().startswith("tt.func public"):
            done.append("tt.func public")  # arguments are numbered where they are used, whatever their order
            continue
        before, equals, after = line.partition(" = ")
        if equals and before.lstrip().startswith("%"):
            if PURE.match(after):  # wherever it stands: its value is named for what it is
                parts: list[str | _Value] = []
                for piece in re.split(f"({NAME.pattern})", after):
                    value = constants.get(piece) or (values.setdefault(piece, _Value()) if piece[:1] == "%" else piece)
                    parts.append(value)
                for place, name in enumerate(NAME.findall(before)):
                    values[name] = _Value([*parts, f" result {place}"])
                continue
            after = NAME.sub(lambda match: BOUND.match(match.string, match.start()) and match[0] or use(match), after)
            after = BOUND.sub(define, after)
            line = NAME.sub(define, before) + equals + after
        else:
            line = NAME.sub(define if line.lstrip().startswith("^bb") else use, line)
        done.append(line)
    return done


def _name(value: _Value, number: Callable[[], str]) -> str:
    """Return the name of ``value``; what it is computed from gets names before it, from the left."""
    pending = [value]  # no recursion: arithmetic may be thousands of operations deep
    while pending:
        last = pending[-1]
        if last.name is not None:
            pending.pop()
        elif last.parts is None:
            last.name = number()
        elif unnamed := [part for part in last.parts if isinstance(part, _Value) and part.name is None]:
            pending.append(unnamed[0])
        else:
            text = "".join(part if isinstance(part, str) else str(part.name) for part in last.parts)
            last.name = "%" + hashlib.sha1(text.encode()).hexdigest()[:12]
    return str(value.name)
