"""The house: imports only go down, the oracle stands alone, files stay short, importing has no side effects."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moelink

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")

ROOT = Path(moelink.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))
MAX_LINES = 500

ROOMS = (
    "errors", "env", "arith", "version",
    "formats",
    "memory",
    "routing", "hooks", "levels", "config", "lease", "output",
    "control",
    "kernels",
    "transports",
    "contract", "activation", "epilogues", "ops",
    "tracing",
    "communicator", "initialize", "devices", "moelink", "testing",
    "nn", "integrations",
    "tools", "__main__",
)  # fmt: skip
"""From the ground up: a file imports from rooms that stand before its own, and from its own."""
FLOOR = {room: floor for floor, room in enumerate((*ROOMS, "reference"))}
UPSTAIRS = ROOMS[ROOMS.index("nn") :]

# Imported by nothing else, and importing nothing of the package at run time.
STANDS_ALONE = "reference"


def room_of(path: Path) -> str:
    """Top-level module or package of a file: ``formats/mxfp8.py`` is in ``formats``."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "moelink" if first == "__init__" else first


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_rooms(path: Path, *, run_time_only: bool = False) -> set[str]:
    """Rooms that a file imports, inside functions too."""
    rooms = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while pending:
        node = pending.pop()
        if run_time_only and is_type_checking(node):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = (
                [f"moelink.{alias.name}" for alias in node.names] if node.module == "moelink" else [node.module or ""]
            )
        for name in names:
            parts = name.split(".")
            if parts[0] == "moelink":
                known = len(parts) > 1 and (parts[1] in FLOOR or (ROOT / f"{parts[1]}.py").exists())
                rooms.add(parts[1] if known else "moelink")
    return rooms


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in FILES} <= FLOOR.keys(), "give the new module a place in ROOMS"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_go_down(path: Path) -> None:
    here = room_of(path)
    for there in imported_rooms(path) - {here}:
        assert FLOOR[there] < FLOOR[here], f"{here} imports {there}, which stands above it"


def test_the_library_does_not_import_its_test_tools() -> None:
    for path in FILES:
        assert not re.search(r"^\s*(from|import) moelink_testing\b", path.read_text(), re.MULTILINE), path


def test_the_oracle_stands_alone() -> None:
    for path in FILES:
        if room_of(path) == STANDS_ALONE:
            assert imported_rooms(path, run_time_only=True) <= {STANDS_ALONE}, path
        else:
            assert STANDS_ALONE not in imported_rooms(path), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def modules_after(statement: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter after ``statement``."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_loads_no_optional_package_and_touches_no_device() -> None:
    loaded = modules_after("import moelink\nimport torch\nassert not torch.cuda.is_initialized()")
    unwanted = {"triton", "matplotlib", "rich", "typer", "transformers"}
    assert not loaded & unwanted
    upstairs = {f"moelink.{room}" for room in UPSTAIRS}
    assert not loaded & upstairs


def test_the_plots_import_matplotlib_only_when_they_draw() -> None:
    assert "matplotlib" not in modules_after("import moelink.tools.plots")


def test_the_benchmarks_choose_the_interpreter_before_triton_is_imported() -> None:
    """So ``launchers --device cpu`` and ``host calls --device cpu`` need no environment variable."""
    loaded = modules_after("import moelink.tools.bench.launchers, moelink.tools.bench.host")
    assert not {name for name in loaded if name == "triton" or name.startswith("moelink.kernels")}


def test_the_command_line_answers_without_its_extra() -> None:
    loaded = modules_after("import moelink.tools.cli")
    assert not loaded & {"rich", "typer", "moelink.tools.cli.app"}
