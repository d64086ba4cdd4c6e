"""Text of Triton's intermediate form, without what does not matter for what a kernel does."""

from __future__ import annotations

import re

NAME = re.compile(r"%[A-Za-z_0-9\-]+")
CONSTANT = re.compile(r"\s*(%[A-Za-z_0-9\-]+) = arith\.constant (.*)")
SYMBOL = re.compile(r'@(?:"[^"]*"|[\w.$]+)')
SPEC = re.compile(r"(Dispatch|Combine)Spec_[0-9a-f]+")


def nameless(text: str) -> str:
    """TTIR without what does not matter: where it comes from, names of values and functions, where constants stand.

    Example: the lines ``%a = arith.constant 1 : i32`` and ``%b = arith.addi %a, %x : i32 loc(#loc7)`` become
    ``%2 = arith.addi <1 : i32>, %1 : i32``.
    """
    constants: dict[str, str] = {}
    lines: list[str] = []
    for line in re.sub(r" *loc\([^)]*\)+", "", text).splitlines():
        found = CONSTANT.match(line)
        if found:
            constants[found[1]] = f"<{found[2].strip()}>"
        elif not line.startswith("#loc"):
            lines.append(line.rstrip())
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
    for line in lines:
        before, equals, after = line.partition(" = ")
        if equals and before.lstrip().startswith("%"):
            after = NAME.sub(use, after)
            line = NAME.sub(define, before) + equals + after
        else:
            line = NAME.sub(use, line)
        done.append(line)
    symbols: dict[str, str] = {}
    text = SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"@{len(symbols)}"), "\n".join(done))
    return SPEC.sub("Spec", text)
