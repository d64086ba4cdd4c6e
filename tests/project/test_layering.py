"""The house: imports only go down, the oracle stands alone, files stay short, importing has no side effects."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import moelink
import moelink_bench

ROOT = Path(moelink.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))
BENCH = Path(moelink_bench.__file__).parent
FILES_OF_BENCH = sorted(path for path in BENCH.rglob("*.py"))
MAX_LINES = 550

ROOMS = (
    "errors", "names", "env", "arith", "arguments", "version", "tuning",
    "formats",
    "memory",
    "routing", "hooks", "levels", "config", "lease", "output",
    "control",
    "kernels",
    "rows",
    "transports",
    "contract", "activation", "epilogues", "ops",
    "tracing",
    "lifetime", "communicator", "metrics", "initialize", "devices", "testing",
    "nn", "moelink", "integrations",
    "tools", "__main__",
)  # fmt: skip
"""From the ground up: a file imports from rooms that stand before its own, and from its own."""
FLOOR = {room: floor for floor, room in enumerate((*ROOMS, "reference"))}
SIDE = {"tracing.device": "kernels"}
"""Parts of a room that stand on the floor of another one, and import from it as it does from them: kernels stamp a
trace."""
FLOOR |= {part: FLOOR[room] for part, room in SIDE.items()}
UPSTAIRS = ROOMS[ROOMS.index("nn") :]

# Imported by nothing else, and importing nothing of the package at run time.
STANDS_ALONE = "reference"


def room_of(path: Path) -> str:
    """Top-level module or package of a file: ``formats/fp8.py`` is in ``formats``."""
    first, *rest = path.relative_to(ROOT).parts
    part = ".".join((first, *rest[:1]))
    return part if part in SIDE else "moelink" if first == "__init__.py" else first.removesuffix(".py")


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
                part = ".".join(parts[1:3])
                rooms.add(part if part in SIDE else parts[1] if known else "moelink")
    return rooms


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in FILES} <= FLOOR.keys(), "give the new module a place in ROOMS"


def test_imports_only_go_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {room_of(path)} imports {there}, which stands above it"
        for path in FILES
        for there in sorted(imported_rooms(path) - {room_of(path)})
        if FLOOR[there] > FLOOR[room_of(path)]
    ]
    assert not wrong, "\n".join(wrong)


MODULES = {
    ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for root, files in ((ROOT, FILES), (BENCH, FILES_OF_BENCH))
    for path in files
}


def imported_files(path: Path, *, types: bool) -> set[str]:
    """Modules of the packages that a file names in its imports, inside functions too; ``types``: also in those that
    only a type checker reads."""
    found = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while pending:
        node = pending.pop()
        if not types and is_type_checking(node):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES.keys()) | ({module} if names - MODULES.keys() else set())
    return found & MODULES.keys()


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all others by imports, or a module that imports itself."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        pending, seen = [module], set[str]()
        while pending:
            new = imports[pending.pop()] - seen
            seen |= new
            pending += new
        reached[module] = seen
    found = {frozenset(other for other in reached[module] if module in reached[other]) for module in imports}
    return sorted(sorted(group) for group in found if group)


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Not even in a function, where it would work."""
    found = circles({module: imported_files(path, types=False) for module, path in MODULES.items()})
    assert found == [], "expected no circle of imports, got one; move what is shared into a file below both"


BUFFERS_NAME_THEIR_LAUNCHERS = [
    "moelink.contract.buffers", "moelink.contract.combine", "moelink.contract.combine_kernel",
    "moelink.contract.dispatch", "moelink.contract.launch", "moelink.contract.tensors", "moelink.contract.warmup",
]  # fmt: skip
"""``EPBuffers`` has methods that use the launchers, and their signatures, which are public, name ``EPBuffers``."""


def test_types_make_one_circle() -> None:
    """A file that names another only for its types could not be read without it, either."""
    found = circles({module: imported_files(path, types=True) for module, path in MODULES.items()})
    assert found == [BUFFERS_NAME_THEIR_LAUNCHERS]


def test_circles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str](), "e": {"e"}}
    assert circles(imports) == [["b", "c"], ["e"]]


def test_the_library_imports_neither_its_test_tools_nor_its_benchmarks() -> None:
    for path in FILES:
        found = re.search(r"^\s*(from|import) moelink_(testing|bench)\b", path.read_text(), re.MULTILINE)
        assert not found, f"{path}: expected no import of another distribution, got {found[0].strip()!r}"


def test_the_oracle_stands_alone() -> None:
    for path in FILES:
        if room_of(path) == STANDS_ALONE:
            assert imported_rooms(path, run_time_only=True) <= {STANDS_ALONE}, path
        else:
            assert STANDS_ALONE not in imported_rooms(path), path


def test_files_stay_short() -> None:
    lines = {str(path): len(path.read_text().splitlines()) for path in MODULES.values()}
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}, f"at most {MAX_LINES} lines each"


def modules_after(statement: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter after ``statement``."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_loads_no_optional_package_and_touches_no_device() -> None:
    """Not even torch, before the first use of a name that needs it."""
    use = "import sys\ndir(moelink), moelink.__version__, moelink.ConfigError\nassert 'torch' not in sys.modules\n"
    use += "moelink.init, moelink.init_devices, moelink.Communicator, moelink.register_format\n"
    loaded = modules_after(f"import moelink\n{use}import torch\nassert not torch.cuda.is_initialized()")
    unwanted = {"triton", "matplotlib", "rich", "typer", "transformers", "prometheus_client"}
    assert not loaded & unwanted
    upstairs = {f"moelink.{room}" for room in UPSTAIRS}
    assert not loaded & upstairs


def test_the_plots_import_matplotlib_only_when_they_draw() -> None:
    assert "matplotlib" not in modules_after("import moelink.tools.plots")


def test_the_benchmarks_choose_the_interpreter_before_triton_is_imported() -> None:
    """So ``launchers --device cpu`` and ``host calls --device cpu`` need no environment variable."""
    loaded = modules_after("import moelink_bench.launchers, moelink_bench.host")
    assert not {name for name in loaded if name == "triton" or name.startswith("moelink.kernels")}


def test_the_command_line_answers_without_its_extra() -> None:
    loaded = modules_after("import moelink.tools.cli")
    assert not loaded & {"rich", "typer", "moelink.tools.cli.app"}
