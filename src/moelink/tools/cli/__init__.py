"""The command line. This file needs nothing but Python; the commands need the extra ``moelink[cli]``."""

from __future__ import annotations

import importlib.util
import sys

EXTRA = ("typer", "rich")


def missing_packages() -> list[str]:
    """Return the packages of the extra ``[cli]`` that are not installed."""
    return [name for name in EXTRA if importlib.util.find_spec(name) is None]


def main() -> int:
    """Run ``moelink`` or ``python -m moelink``. Returns the exit status."""
    missing = missing_packages()
    if missing:
        print(  # noqa: T201
            f"The moelink command needs {' and '.join(missing)}, which are not installed. Install them with:\n"
            f"    pip install {' '.join(missing)}",
            file=sys.stderr,
        )
        return 1
    from moelink.tools.cli.app import run

    return run()
