"""Compare kernels without a trace with kernels whose sources have no stamps, for a GPU that is not there.

Run without TRITON_INTERPRET: ``python trace_forms.py 0 2`` prints for the forms 0 and 2 of ``aot_forms`` a JSON object:
whether its intermediate form (TTIR) is the same as that of its source without the lines that stamp; how many functions
the form with S.TRACE has for stamps, with its source as it is and without these lines.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import pkgutil
import re
import sys
from typing import Any

from triton.runtime import JITFunction

from moelink_testing.fingerprints import nameless
from tests.kernels.aot_forms import TARGET, Form, forms, lower

STAMP = re.compile(
    r"^ *(?:stamp|stamp_first|stamp_after|stamp_both|stamp_awaited|note_reached|note_whole)\(.*\)\n"
    r"|^ *came = arrivals\(.*\n|^ *seen = traced_if\(.*\n", re.M,
)  # fmt: skip
"""Lines that do nothing but stamp."""


def functions() -> list[JITFunction[Any]]:
    """All functions of kernels."""
    path = importlib.import_module("moelink.kernels").__path__
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(path, "moelink.kernels.")]
    found = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    return [f for f in found.values() if f.__module__ != "moelink.kernels.sync.trace"]


def ttir_of(form: Form) -> str:
    """A form's intermediate form after the compiler's first passes, without names."""
    lowered = lower(*form[1:])
    return nameless(str(lowered.backend.make_ttir(lowered.module, {}, lowered.options, TARGET.arch)))


def stamps_of(form: Form) -> int:
    """How many functions a form with S.TRACE has that stamp or open a record."""
    _, kernel, spec, pointers = form
    text = str(lower(kernel, dataclasses.replace(spec, TRACE=True, TRACE_CTAS=660), pointers).module)
    return len(re.findall(r"tt\.func private @\"?moelink\.kernels\.sync\.trace\.(?:stamp|open_record|_keep)", text))


def without_stamps(source: str) -> str:
    """A function's source without the lines that stamp. What takes their results gets what it has without S.TRACE."""
    source = STAMP.sub("", source)
    for pattern, instead in (
        (r"\bcame, S\.TRACE\)", "0, False)"),
        (r"ctx\.limit, came, S\)", "ctx.limit, 0, S)"),
        (r" *arrivals\(ctx, WAITED, r, S\), S\.TRACE,\n", ""),
        (r"open_record\(peers, role, program, call, S\)", "0"),
    ):
        source = re.sub(pattern, instead, source)
    return source


def main(*numbers: int) -> None:
    """Print what is said above of the forms with these numbers."""
    some = itertools.islice(forms(), max(numbers) + 1)
    chosen = [form for number, form in enumerate(some) if number in numbers]
    before = [ttir_of(form) for form in chosen]
    stamps = [stamps_of(form) for form in chosen]
    for function in functions():
        source = without_stamps(function.src)
        if source != function.src:
            function._unsafe_update_src(source)
    for form, ttir, count in zip(chosen, before, stamps, strict=True):
        said = {"name": form[0], "same": ttir_of(form) == ttir, "stamps": count, "left": stamps_of(form)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
