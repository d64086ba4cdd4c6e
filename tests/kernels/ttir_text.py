"""Text of Triton's intermediate form, without what does not matter for what a kernel does."""

from __future__ import annotations

import hashlib
import re

NAME = re.compile(r"%[A-Za-z_0-9\-]+")
BOUND = re.compile(r"%[A-Za-z_0-9\-]+(?= = )")
"""Names that a region begins with, as in ``iter_args(%a = %b)``."""
CONSTANT = re.compile(r"\s*(%[A-Za-z_0-9\-]+) = arith\.constant (.*)")
PURE = re.compile(
    r"arith\.|math\.|tt\.(?:ptr_to_int|int_to_ptr|make_range|splat|addptr|expand_dims|broadcast|bitcast|reshape|join|gather)\b"
)
"""Operations without side effects or regions."""
SYMBOL = re.compile(r'@(?:"[^"]*"|[\w.$]+)')
SPEC = re.compile(r"(Dispatch|Combine)Spec_[0-9a-f]+")


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
    text = SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"@{len(symbols)}"), "\n".join(done))
    return SPEC.sub("Spec", text)


def _renumbered(function: list[str]) -> list[str]:
    """Lines of one function, its values numbered in the order in which they appear, its constants in their places."""
    constants = {found[1]: f"<{found[2].strip()}>" for found in map(CONSTANT.match, function) if found}
    numbers: dict[str, str] = {}
    count = 0

    def use(match: re.Match[str]) -> str:
        return constants.get(match[0]) or numbers.get(match[0]) or define(match)

    def define(match: re.Match[str]) -> str:
        nonlocal count
        count += 1  # a name may be taken anew in another region
        numbers[match[0]] = f"%{count}"
        return numbers[match[0]]

    done = []
    for line in function:
        if CONSTANT.match(line):
            continue
        if line.lstrip().startswith("tt.func public"):
            done.append("tt.func public")  # arguments are numbered where they are used, whatever their order
            continue
        before, equals, after = line.partition(" = ")
        if equals and before.lstrip().startswith("%"):
            after = NAME.sub(lambda match: BOUND.match(match.string, match.start()) and match[0] or use(match), after)
            after = BOUND.sub(define, after)
            if PURE.match(after):  # wherever it stands: its value is named for what it is
                numbers[before.strip()] = "%" + hashlib.sha1(after.encode()).hexdigest()[:12]
                continue
            line = NAME.sub(define, before) + equals + after
        else:
            line = NAME.sub(define if line.lstrip().startswith("^bb") else use, line)
        done.append(line)
    return done
