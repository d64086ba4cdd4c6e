"""Print what every kernel is, to see whether a change of the source is one of the kernels.

``python -m tests.kernels.kernel_prints`` prints a line for every form (``aot_forms``) of every kernel that the host
launches: a print of its intermediate form (``lowering``), and its name. Two trees that print the same have the same
kernels, whatever was moved or renamed in between, so that GPU runs of one speak for the other. Run it without
TRITON_INTERPRET.

    git stash; python -m tests.kernels.kernel_prints > before; git stash pop
    python -m tests.kernels.kernel_prints | diff before -
"""

from __future__ import annotations

import itertools
import sys

from tests.kernels.aot_forms import forms
from tests.kernels.lowering import print_of


def main(part: int = 0, parts: int = 1) -> None:
    """Print every ``parts``-th form from ``part``."""
    for form in itertools.islice(forms(), part, None, parts):
        print(print_of(form.kernel, form.spec), form.name, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
