"""Fingerprints of the kernels: whether a change of the source is one of the kernels.

``python -m tests.kernels.kernel_prints`` prints a line for every form of the GPU matrix and of ranks in two nodes: a
hash of its intermediate form (TTIR) for sm_90, and its name. Two trees that print the same have the same kernels,
whatever was moved or renamed in between, so that GPU runs of one speak for the other. Run without TRITON_INTERPRET.

    git stash; python -m tests.kernels.kernel_prints > before; git stash pop; python kernel_prints.py | diff before -
"""

from __future__ import annotations

import hashlib
import itertools
import sys

from moelink_testing.fingerprints import nameless
from tests.kernels.aot_forms import TARGET, forms, lower


def main(part: int = 0, parts: int = 1) -> None:
    """Print every ``parts``-th of them from ``part``, those of ranks in several nodes included."""
    for name, kernel, spec, pointers in itertools.islice(forms(), part, None, parts):
        lowered = lower(kernel, spec, pointers)
        ttir = lowered.backend.make_ttir(lowered.module, {}, lowered.options, TARGET.arch)
        print(hashlib.sha1(nameless(str(ttir)).encode()).hexdigest()[:16], name, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
