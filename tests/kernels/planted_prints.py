"""Print what kernels are before and after a change of their source, to see which changes the prints see.

Run without TRITON_INTERPRET: ``python -m tests.kernels.planted_prints`` prints a JSON object for each of CHANGES:
whether the print of a form of the kernel changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from tests.kernels.aot_facts import functions
from tests.kernels.aot_forms import Form, forms
from tests.kernels.lowering import print_of


class Change(NamedTuple):
    """A change of a function's source, and the form that is looked at.

    Attributes:
        what: the change in words.
        function: its name.
        old, new: what stands in it, and what is put in its place.
        form: says whether a form is the one.
    """

    what: str
    function: str
    old: str
    new: str
    form: Callable[[Form], bool]


def sends(form: Form) -> bool:
    return form.launch == "dispatch async" and form.row["mode"] == "alltoall"


def in_place(form: Form) -> bool:
    return form.launch == "dispatch both" and form.row["in_place"]


def copied(form: Form) -> bool:
    return form.launch == "dispatch both" and form.row["layout"] == "rank" and not form.row["in_place"]


CHANGES = (
    Change("rows are scaled by a sum", "scale_rows_kernel", "value * weight", "value + weight",
           lambda form: form.launch == "scale rows" and form.row["weights"] and form.row["out"] is not None),
    Change("a sender needs a credit less", "poll_once", "told >= call - 1", "told >= call - 2", sends),
    Change("a word has another name", "poll_once", "told", "granted", sends),
    Change("rows in place are a row further", "row_of_slot", "numbers.capacity + slot", "numbers.capacity + slot + 1",
           in_place),
    Change("rows in place are a row further, and rows are copied", "row_of_slot", "numbers.capacity + slot",
           "numbers.capacity + slot + 1", copied),
)  # fmt: skip


def main() -> None:
    """Print what is said above."""
    known, of_name = list(forms()), {function.__name__: function for function in functions()}
    for change in CHANGES:
        form = next(form for form in known if change.form(form))
        function = of_name[change.function]
        source, before = function.src, print_of(form.kernel, form.spec)
        if change.old not in source:
            raise ValueError(f"{change.what}: expected {change.old!r} in {change.function}, got a source without it")
        function._unsafe_update_src(source.replace(change.old, change.new))
        after = print_of(form.kernel, form.spec)
        function._unsafe_update_src(source)
        print(json.dumps({"what": change.what, "changed": before != after, "form": form.name}), flush=True)


if __name__ == "__main__":
    main()
