"""The version of the package, where every room can read it, as ranks compare it at init; and the releases of torch and
Triton that the kernels were tested with."""

from __future__ import annotations

import warnings
from functools import cache

from moelink.errors import UnsupportedError

__version__ = "0.1.0"

TESTED_PAIRS = (("2.11", "3.6"), ("2.12", "3.7"), ("2.13", "3.6"), ("2.13", "3.7"), ("2.14", "3.8"), ("2.15", "3.9"))
"""Releases of torch and Triton, oldest first: the table that documentation, the Makefile and the nightly job follow.
A wheel of torch names its Triton, but torch 2.13 for CPUs names none."""
OLDEST = {"torch": "2.10", "triton": "3.6"}
"""The oldest release for the kernels. The assembler refuses the code that Triton 3.5 makes of them."""


@cache
def check_pair(torch: str, triton: str | None) -> None:
    """Refuse releases of torch and Triton that the kernels do not work with, and warn once of a pair that is untested.

    The rest of a release after its first two numbers (``.1``, ``+cu130``) does not count.

    Args:
        torch, triton: ``__version__`` of each; None for Triton where it is not installed.

    Raises:
        UnsupportedError: one of them is too old, or there is no Triton.
    """
    for name, found in (("torch", torch), ("triton", triton)):
        oldest = OLDEST[name]
        if found is None or _numbers(found) < _numbers(oldest):
            raise UnsupportedError(
                f"{name}: expected release {oldest} or a newer one for the symmetric transport, got {found or 'none'}; "
                f"run pip install '{name}>={oldest}', or use transport='collective'"
            )
    assert triton is not None
    pairs = {(_numbers(first), _numbers(second)) for first, second in TESTED_PAIRS}
    if (_numbers(torch), _numbers(triton)) not in pairs:
        tested = ", ".join(f"{first} + {second}" for first, second in TESTED_PAIRS)
        warnings.warn(
            f"torch + triton: expected a pair that moelink was tested with ({tested}), got {torch} + {triton}; install "
            "one of these, or compare results before you trust them and ignore this warning "
            "(warnings.filterwarnings('ignore', 'torch . triton'))",
            stacklevel=3,
        )


def _numbers(release: str) -> tuple[int, int]:
    """Return the first two numbers of ``release``, which decide: (3, 6) for "3.6.0+git"."""
    from packaging.version import Version  # importing moelink takes half as long without it

    found = Version(release)
    return found.major, found.minor
