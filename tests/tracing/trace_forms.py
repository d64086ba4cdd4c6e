"""Compare kernels without a trace with kernels whose sources have no stamps, for a GPU that is not there.

Run without TRITON_INTERPRET: ``python -m tests.tracing.trace_forms cached "own rows"`` prints for the first form of
each of these KINDS a JSON object: whether its intermediate form (TTIR) is the same as that of its source without the
lines that stamp; how many functions the form with S.TRACE has for stamps, with its source as it is and without these
lines.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

from moelink_testing.fingerprints import nameless
from tests.kernels.aot_facts import functions
from tests.kernels.aot_forms import Form, forms
from tests.kernels.lowering import Spec, ir_of

KINDS: Mapping[str, Callable[[Form], bool]] = MappingProxyType({
    "dispatch": lambda form: form.launch == "dispatch both" and not form.row["cached"],
    "planned": lambda form: form.launch == "dispatch both" and form.row["row_table"] is not None,
    "in place": lambda form: form.launch == "dispatch both" and form.row["in_place"],
    "cached": lambda form: form.launch == "dispatch both" and form.row["cached"],
    "sender": lambda form: form.launch == "dispatch async",
    "receiver": lambda form: form.launch == "dispatch wait",
    "combine": lambda form: form.launch == "combine both" and not form.row["lamport"],
    "home": lambda form: form.launch == "combine wait",
    "without flags": lambda form: form.launch == "combine both" and form.row["lamport"],
    "own rows": lambda form: form.launch == "combine both" and form.row["own_rows"] == "sums",
    "own copies": lambda form: form.launch == "combine both" and form.row["own_rows"] == "copies",
})  # fmt: skip
STAMP = re.compile(
    r"^ *(?:stamp|stamp_first|stamp_after|stamp_both|stamp_awaited|note_reached|note_whole)\(.*\)\n"
    r"|^ *came = arrivals\(.*\n|^ *seen = traced_if\(.*\n", re.M,
)  # fmt: skip
"""Lines that do nothing but stamp."""


def traced(form: Form, on: bool) -> Spec:
    """Return what ``form`` is compiled for with, or without, a trace."""
    constants = dataclasses.replace(form.constants, TRACE=on, TRACE_CTAS=660 * on)
    return dataclasses.replace(form.spec, constants={"S": constants})


def ttir_of(form: Form) -> str:
    """Return a form's intermediate form without a trace, without names."""
    return nameless(ir_of(form.kernel, traced(form, False)))


def stamps_of(form: Form) -> int:
    """Return how many functions a form with S.TRACE has that stamp or open a record."""
    text = ir_of(form.kernel, traced(form, True), passes=False)
    return len(re.findall(r"tt\.func private @\"?moelink\.tracing\.device\.stamps\.(?:stamp|open_record|_keep)", text))


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


def main(*kinds: str) -> None:
    """Print what is said above of the first form of each of ``kinds`` whose ranks may be traced."""
    may = [
        form for form in forms()
        if form.launch.startswith(("dispatch", "combine")) and form.row["mode"] == "alltoall"
        and form.row["nodes"] == "one" and form.row["gpu"] == "sm_90"
    ]  # fmt: skip
    chosen = [next(form for form in may if KINDS[kind](form)) for kind in kinds]
    before = [ttir_of(form) for form in chosen]
    stamps = [stamps_of(form) for form in chosen]
    for function in functions():
        source = without_stamps(function.src)
        if source != function.src and function.__module__ != "moelink.tracing.device.stamps":
            function._unsafe_update_src(source)
    for form, ttir, count in zip(chosen, before, stamps, strict=True):
        said = {"name": form.name, "same": ttir_of(form) == ttir, "stamps": count, "left": stamps_of(form)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
