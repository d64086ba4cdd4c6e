"""Compare the outcomes of a framework's own tests without moelink and with it.

``python tests/integrations/outcomes.py WITHOUT WITH`` reads two files of pytest's ``--junitxml``. It fails if a test
came out worse with moelink than without, or if none passed with it: a test that fails alike in both runs is the
framework's.
It needs no package, so that any environment's Python can run it.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ORDER = ("passed", "skipped", "absent", "failure", "error")
"""From good to bad. A test is absent if the other run has it alone."""


def read(path: Path) -> dict[str, str]:
    """Return the outcome of each test in a file, none if pytest did not come to write it."""
    if not path.exists():
        return {}
    found: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):  # noqa: S314 - pytest wrote it
        told = [child.tag for child in case if child.tag in ORDER]
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = max([*told, found.get(name, "passed")], key=ORDER.index)  # a teardown has a case of its own
    return found


def closing_line(outcomes: dict[str, str]) -> str:
    """Count outcomes, as in ``21 passed, 1 failure``."""
    counts = Counter(outcomes.values())
    return ", ".join(f"{counts[name]} {name}" for name in ORDER if counts[name]) or "nothing ran"


def worse(without: dict[str, str], with_it: dict[str, str]) -> list[str]:
    """List the tests that came out worse in the second run."""
    return [
        f"{name}: {before} without moelink, {after} with it"
        for name in sorted({*without, *with_it})
        for before, after in [(without.get(name, "absent"), with_it.get(name, "absent"))]
        if ORDER.index(after) > ORDER.index(before)
    ]


def main(without: str, with_it: str) -> int:
    """The command line."""
    first, second = read(Path(without)), read(Path(with_it))
    print(f"without moelink: {closing_line(first)}\nwith moelink:    {closing_line(second)}")
    lost = worse(first, second)
    print(*lost, sep="\n", end="\n" if lost else "")
    return int(bool(lost) or "passed" not in second.values())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
