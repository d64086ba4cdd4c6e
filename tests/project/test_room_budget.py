"""No room of the packages grows unnoticed: each has a budget of lines, which a change that needs more raises, and says
why.

A room is a folder, with the folders in it that have no row of their own. Where some of them have one, it is the files
of the folder itself, and then each of its folders needs a row. Lines are all lines of Python files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import moelink
import moelink_bench

ROOT, BENCH = (Path(package.__file__).parent for package in (moelink, moelink_bench))

BUDGET = {
    ".": 4067,
    "formats": 1337,
    "reference": 899,
    "memory": 2523,
    "memory/nodes": 901,
    "control": 3979,
    "kernels": 721,
    "kernels/combine": 1449,
    "kernels/dispatch": 3149,
    "kernels/launch": 2414,
    "kernels/nodes": 1353,
    "kernels/sync": 1317,
    "rows": 4284,
    "transports": 2090,
    "transports/collective": 1829,
    "transports/symmetric": 2277,
    "contract": 2420,
    "ops": 1997,
    "nn": 5128,
    "integrations": 4768,
    "tracing": 545,
    "tracing/device": 524,
    "tools": 366,
    "tools/cli": 1329,
    "tools/demo": 651,
    "tools/doctor": 891,
    "tools/plan": 2076,
    "tools/plots": 341,
    "tools/trace": 234,
}
"""Most lines of each room; "." are the files beside the rooms."""
BUDGET_OF_BENCH = {
    ".": 11410,
    "layer": 1665,
    "frameworks": 1008,
}
"""Those of the distribution moelink-bench."""
SLACK, SHARE = 60, 0.03
"""A room may have this many lines less than its row, or this part of the row, whichever is more."""


def lines_by_room(root: Path, rooms: Mapping[str, int]) -> dict[str, int]:
    """Lines of each room that has files, those without a row among them."""
    lines: dict[str, int] = {}
    for path in root.rglob("*.py"):
        room = room_of(path.relative_to(root).parent, rooms)
        lines[room] = lines.get(room, 0) + len(path.read_text().splitlines())
    return lines


def room_of(folder: Path, rooms: Mapping[str, int]) -> str:
    """The room of a folder: itself, or the nearest one around it, unless that is divided into rooms."""
    for outer in (folder, *folder.parents):
        name = outer.as_posix()
        if name not in rooms:
            continue
        divided = name == "." or any(room.startswith(f"{name}/") for room in rooms)
        return name if outer == folder or not divided else folder.as_posix()
    return folder.as_posix()


def complaints(lines: Mapping[str, int], budget: Mapping[str, int]) -> list[str]:
    """What is wrong with ``lines`` of rooms, one line for each room."""
    found = []
    for room in sorted(lines.keys() | budget.keys()):
        got, most = lines.get(room, 0), budget.get(room)
        if most is None:
            found.append(f"{room}: expected a row in BUDGET, got none; write {got}")
        elif got > most:
            found.append(
                f"{room}: expected at most {most} lines, got {got}; take something out, or raise the row and say why "
                "in the commit"
            )
        elif got < most - max(SLACK, SHARE * most):
            found.append(f"{room}: expected about the {most} lines of its row, got {got}; write {got}")
    return found


@pytest.mark.parametrize(
    ("root", "budget"),
    [pytest.param(ROOT, BUDGET, id="moelink"), pytest.param(BENCH, BUDGET_OF_BENCH, id="moelink-bench")],
)
@pytest.mark.quick("milliseconds, each another distribution")
def test_rooms_keep_to_their_budgets(root: Path, budget: dict[str, int]) -> None:
    found = complaints(lines_by_room(root, budget), budget)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("files, budget, expected", [
    pytest.param({"a/x.py": 90, "a/b/x.py": 10, "x.py": 5}, {".": 5, "a": 100}, [], id="fits"),
    pytest.param(
        {"a/x.py": 101}, {"a": 100},
        ["a: expected at most 100 lines, got 101; take something out, or raise the row and say why in the commit"],
        id="grew",
    ),
    pytest.param({"a/x.py": 40}, {"a": 100}, [], id="shrank a little"),
    pytest.param(
        {"a/x.py": 39}, {"a": 100}, ["a: expected about the 100 lines of its row, got 39; write 39"], id="shrank"
    ),
    pytest.param(
        {"a/x.py": 3879}, {"a": 4000}, ["a: expected about the 4000 lines of its row, got 3879; write 3879"],
        id="shrank by more than a share",
    ),
    pytest.param({"n/x.py": 7, "x.py": 1}, {".": 1}, ["n: expected a row in BUDGET, got none; write 7"], id="new room"),
    pytest.param(
        {"a/b/x.py": 1, "a/n/x.py": 7}, {"a": 0, "a/b": 1}, ["a/n: expected a row in BUDGET, got none; write 7"],
        id="new in a divided room",
    ),
    pytest.param(
        {"x.py": 1}, {".": 1, "a": 100}, ["a: expected about the 100 lines of its row, got 0; write 0"], id="gone"
    ),
])  # fmt: skip
@pytest.mark.quick("milliseconds, each another rule")
def test_what_is_said_of_rooms(
    tmp_path: Path, files: dict[str, int], budget: dict[str, int], expected: list[str]
) -> None:
    for name, count in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * count)
    assert complaints(lines_by_room(tmp_path, budget), budget) == expected
