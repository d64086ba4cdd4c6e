"""Lower the forms of all kernels, and say what is wrong with them and which statements are in none.

``python -m tests.kernels.aot_facts`` brings all forms into Triton's intermediate form. It prints one line for each, the
statements of kernels that are in no form, and facts of all forms as JSON. It exits with 1 when a form fails, as a
compile-time branch may that no interpreted test takes. The arguments ``8 0 5`` take every eighth form from the first
and from the sixth. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import linecache
import math
import pkgutil
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from triton.runtime import JITFunction

import moelink
import moelink.formats.device
import moelink.kernels
import moelink.rows
import moelink.tracing.device
from moelink.kernels.launch.device import threads_of
from tests.kernels.absent_gpu import on
from tests.kernels.aot_forms import (
    SUMS,
    Form,
    combine_constants,
    combine_rows,
    dispatch_constants,
    dispatch_rows,
    forms,
)
from tests.kernels.lowering import ir_of, places_of, traced_places

LOOKS_USED = ("lamport_slots.sum_rows", "row_offsets._look_at_counts")
"""Functions that use what a look saw."""


def narrow_looks(text: str, threads: int) -> list[str]:
    """Return the volatile loads of fewer elements than a program has threads, in a kernel's ``text`` and in the
    functions that use what they load: of these warps hold copies of their own (``kernels.sync.signals``)."""
    found, function = [], ""
    for line in text.splitlines():
        named = re.search(r'tt\.func .*?@"?([\w.]+)', line)
        function = named.group(1) if named else function
        used = any(name in function for name in LOOKS_USED)
        if used and "tt.load" in line and "isVolatile = true" in line:
            shape = re.findall(r"tensor<([\dx]+)x!tt\.ptr", line)
            if not shape or math.prod(map(int, shape[0].split("x"))) < threads:
                found.append(line.strip())
    return found


def wrong_in(form: Form) -> str:
    """Lower ``form``, and return what is wrong with it or nothing."""
    text = ir_of(form.kernel, form.spec, passes=False)
    # The text takes long, and a limit of SMs changes nothing of what is looked at: so not every form.
    looks = form.launch in ("combine both", "combine wait") and form.row["lamport"] and form.row["sums"] == SUMS
    if form.launch == "dispatch both":
        looks = bool(form.row["num_sms"]) and not (form.row["cached"] or form.row["row_table"])
    if not looks:
        return ""
    if not narrow_looks(text, 1 << 62):
        return "nothing is looked at"
    with on(form.row["gpu"]):
        return next(iter(narrow_looks(text, threads_of(torch.device("cuda")))), "")


def functions() -> list[JITFunction[Any]]:
    """Return all functions of kernels, those of formats and ready epilogues among them. One kernel is in Gluon, another
    language, and has a test of its own."""
    names = [
        module.name
        for package in (moelink.kernels, moelink.rows, moelink.tracing.device)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ] + [moelink.formats.device.__name__]
    found = [value for name in names for value in vars(importlib.import_module(name)).values()]
    triton_s = [value for value in found if isinstance(value, JITFunction) and not value.is_gluon()]
    return list({id(value): value for value in triton_s}.values())


class Facts:
    """Count which kernels have a form, and the values of each of their constants."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.values: dict[str, dict[str, set[str]]] = {}

    def add(self, form: Form) -> None:
        """Count ``form``."""
        self.kernels[form.kernel.__name__] += 1
        of_kind = self.values.setdefault(type(form.constants).__name__, {})
        for field in dataclasses.fields(form.constants):
            of_kind.setdefault(field.name, set()).add(str(getattr(form.constants, field.name)))

    def text(self) -> str:
        """Return the counts as JSON, and the rows that contradict the library."""
        counts = {kind: {name: len(found) for name, found in fields.items()} for kind, fields in self.values.items()}
        return json.dumps({"kernels": self.kernels, "values": counts, "broken": broken()})


def broken() -> list[str]:
    """Return the rows whose launch constants are not what the switches that follow from others say."""
    found = []
    for row in dispatch_rows():
        constants = dispatch_constants(row)[0]
        said = bool(row["row_table"]), row["scales_later"]
        if said != (bool(constants.ROW_TABLE) and not row["cached"], bool(constants.SCALES_LATER)):
            found.append(f"dispatch {row}")
    for row in combine_rows():
        constants = combine_constants(row)[0]
        if (bool(row["own_rows"]), row["lamport"]) != (bool(constants.OWN_ROWS_STAY), bool(constants.LAMPORT_TOKENS)):
            found.append(f"combine {row}")
    return found


def main(divisor: int = 1, *parts: int) -> int:
    """Lower those whose number modulo ``divisor`` is in ``parts``, and print the facts of all forms.

    Without parts lower all of them, and also print which statements of kernels are in none.
    """
    failed, facts = 0, Facts()
    with traced_places() as traced:
        for number, form in enumerate(forms()):
            facts.add(form)
            if parts and number % divisor not in parts:
                continue
            try:
                said = wrong_in(form)
            except Exception as error:  # noqa: BLE001 - the compiler raises many kinds
                said = f"{type(error).__name__}: {error}"
            failed += bool(said)
            print(f"{form.name}: {said or 'fine'}", flush=True)
    if not parts:
        package = Path(moelink.__file__).parent
        for file, line, _ in sorted(set().union(*map(places_of, functions())) - traced):
            print(f"in no form: {Path(file).relative_to(package)}: {linecache.getline(file, line).strip()}")
    print(facts.text())
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
