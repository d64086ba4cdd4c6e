"""The pages: their code runs, their commands exist, their links lead to files, and what is made of code is up to date.

The Python blocks of a page run in order, in one namespace, in a process of its own without a GPU, where kernels run in
Triton's own interpreter. A page says what else a block needs in a comment right above it:

* ``<!-- test: skip, why -->``: it is not run. Its syntax and what it imports of moelink are still checked.
* ``<!-- test: needs transformers.distributed -->``: it runs where that module is installed.
* ``<!-- test: torchrun 2 -->``: it runs by itself, on two ranks.

The quick tier runs the README, the start page and the cheapest of the others.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import runpy
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import run_python
from tests.support.paths import ROOT

REFERENCE = ROOT / "docs" / "support" / "reference.py"
START = ("README.md", "docs/index.md")
BESIDE = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [*(ROOT / name for name in BESIDE), *sorted((ROOT / "docs").rglob("*.md"))]
    if path.exists()
]
ITS_OWN = "testing/README.md"
"""Its own distribution's tests run its code (``testing/tests/test_package.py``)."""
MARK = re.compile(r"^<!-- test: (?:(skip), (\S.*)|(needs) ([\w.]+)|(torchrun) (\d+)) -->$")
TIMEOUT = 240
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1",
}  # fmt: skip
NEWCOMERS = {name: value for name, value in ENVIRONMENT.items() if name != "TRITON_INTERPRET"}
"""The start pages do not mention the variable."""


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` is that of its first line of code, from 1; ``need`` is one of MARK and its argument."""

    language: str
    line: int
    code: str
    need: tuple[str, str] | None


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page. Raises ValueError where a comment for tests is none that MARK knows."""
    lines = page.read_text().splitlines()
    blocks, at = [], 0
    while at < len(lines):
        fence = re.match(r"^( *)(```+)(\w*)", lines[at])
        if fence is None:
            at += 1
            continue
        indent, ticks, language = fence.groups()
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == ticks)
        above = next((line.strip() for line in reversed(lines[:at]) if line.strip()), "")
        need = None
        if above.startswith("<!-- test:"):
            mark = MARK.match(above)
            if mark is None:
                raise ValueError(f"{page.name}:{at}: expected 'skip, why', 'needs module' or 'torchrun n', got {above}")
            kind, argument = (group for group in mark.groups() if group)
            need = (kind, argument)
        code = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end])
        blocks.append(Block(language, at + 2, code, need))
        at = end + 1
    return blocks


def script_of(blocks: list[Block]) -> str:
    """The blocks as one program, each at its lines of the page, so that tracebacks name these."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def installed(module: str) -> bool:
    parts = module.split(".")
    return all(find_spec(".".join(parts[: n + 1])) is not None for n in range(len(parts)))


def run_page(page: Path, folder: Path, environment: dict[str, str] = ENVIRONMENT) -> None:
    """Run the Python blocks of a page. Fails with the output of the first program that fails."""
    python = [block for block in blocks_of(page) if block.language == "python"]
    missing = {block.need[1] for block in python if block.need and block.need[0] == "needs"}
    missing = {module for module in missing if not installed(module)}
    together, programs = [], []
    for block in python:
        kind, argument = block.need or ("", "")
        if kind == "torchrun":
            programs.append((int(argument), [block]))
        elif kind != "skip" and argument not in missing:
            together.append(block)
    if together:
        programs.insert(0, (0, together))
    if not programs:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    for number, (ranks, blocks) in enumerate(programs):
        script = folder / f"{page.stem.replace('-', '_')}_{number}.py"
        script.write_text(script_of(blocks))
        done = run_python(script, ranks=ranks, environment=environment, folder=folder, timeout=TIMEOUT)
        assert done.returncode == 0, f"{page.name}, by its own line numbers:\n{done.stdout}{done.stderr}"


def cost(page: str) -> tuple[bool, int]:
    """Pages that need a framework come last, and among the others long ones."""
    code = [block for block in blocks_of(ROOT / page) if block.language == "python"]
    return any(block.need and block.need[0] == "needs" for block in code), sum(len(block.code) for block in code)


def runs(page: str) -> bool:
    needs = [block.need for block in blocks_of(ROOT / page) if block.language == "python"]
    return any(need is None or need[0] != "skip" for need in needs)


@pytest.mark.quick("it is the first code that a newcomer runs")
@pytest.mark.parametrize("page", [page for page in START if (ROOT / page).exists()])
def test_the_start_pages_run(page: str, tmp_path: Path) -> None:
    run_page(ROOT / page, tmp_path, NEWCOMERS)


@pytest.mark.parametrize("page", sorted((page for page in PAGES if page not in START and runs(page)), key=cost))
def test_the_other_pages_run(page: str, tmp_path: Path) -> None:
    run_page(ROOT / page, tmp_path)


def test_most_code_runs() -> None:
    python = [block for page in PAGES for block in blocks_of(ROOT / page) if block.language == "python"]
    left_out = [block for block in python if block.need and block.need[0] == "skip"]
    assert len(python) >= 15
    assert len(left_out) <= len(python) // 4


def test_code_that_is_not_run_imports_what_there_is() -> None:
    for page in PAGES:
        for block in blocks_of(ROOT / page):
            if block.language == "python" and block.need and block.need[0] == "skip":
                imports = [
                    node
                    for node in ast.parse(block.code, f"{page}:{block.line}").body
                    if isinstance(node, ast.Import | ast.ImportFrom) and "moelink" in ast.unparse(node)
                ]
                exec(compile(ast.Module(imports, []), f"{page}:{block.line}", "exec"), {})


def test_a_failure_names_the_line_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\nWords.\n\n```python\nassert x == 2, 'so it is'\n```\n")
    with pytest.raises(AssertionError, match=r"line 10, in <module>[^$]*so it is"):
        run_page(page, tmp_path)


def test_marks_are_obeyed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "<!-- test: {} -->\n```python\nraise SystemExit('it ran')\n```\n\n```python\nprint(1)\n```\n"
    for mark in ("skip, it needs a CUDA device", "needs no_such_module_of_anybody"):
        page.write_text(text.format(mark))
        run_page(page, tmp_path)
    page.write_text(text.format("needs json"))
    with pytest.raises(AssertionError, match="it ran"):
        run_page(page, tmp_path)
    for mark in ("skip", "skip, ", "torchrun", "perhaps"):
        page.write_text(text.format(mark))
        with pytest.raises(ValueError, match=r"page.md:1: expected 'skip, why'"):
            blocks_of(page)


def test_a_block_runs_under_torchrun(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    block = "import os\nfrom pathlib import Path\n\nPath(f\"rank{os.environ['RANK']}\").write_text('')"
    page.write_text(f"<!-- test: torchrun 2 -->\n\n```python\n{block}\n```\n")
    run_page(page, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]


@pytest.mark.parametrize("page", [*PAGES, ITS_OWN])
@pytest.mark.quick("a page takes a millisecond, and each has links of its own")
def test_links_lead_to_files(page: str) -> None:
    text = re.sub(r"^( *```).*?^\1", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert ((ROOT / page).parent / target).exists(), f"{page}: expected a file, got a link to {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/lab/")])
@pytest.mark.quick("a page takes a millisecond, and each names files of its own")
def test_files_that_pages_name_exist(page: str) -> None:
    for name in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+)`", (ROOT / page).read_text()):
        assert (ROOT / name).exists(), f"{page}: expected a file of the repository, got {name}"


def test_code_fits_into_the_site() -> None:
    """The site shows 100 columns on a wide screen; longer lines are half hidden. Outputs are as they are."""
    wide = [
        f"{page}:{block.line + number}"
        for page in PAGES
        if not page.startswith("docs/lab/")
        for block in blocks_of(ROOT / page)
        if block.language in ("python", "py", "sh")
        for number, line in enumerate(block.code.splitlines())
        if len(line) > 100
    ]
    assert not wide


def test_errors_that_are_explained_are_raised() -> None:
    """Words in bold and code of the page are those of an error, found in the source with its strings joined."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    words = re.findall(r"^\*\*`([^`]+)`\*\*", page, re.MULTILINE)
    assert len(words) >= 10
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    assert not [word for word in words if word not in joined]


def commands_of(page: str, name: str) -> set[str]:
    """What a page tells people to type that begins with ``name``: lines of shell blocks, and code in sentences."""
    text = (ROOT / page).read_text()
    shell = [block.code.replace("\\\n", "") for block in blocks_of(ROOT / page) if block.language == "sh"]
    lines = [line for code in shell for line in code.splitlines()]
    words = re.sub(r"^( *```).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    return {said for said in (*lines, *re.findall(r"`([^`]+)`", words)) if said.startswith(f"{name} ")}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    said = {(page, command) for page in PAGES for command in commands_of(page, "make")}
    assert said
    for page, command in said:
        for target in command.partition("#")[0].split()[1:]:
            if "=" not in target:
                assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"{page}: {command}"


@functools.cache
def help_of(command: tuple[str, ...]) -> str | None:
    """What ``moelink COMMAND --help`` says; None where there is no such command."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(
        runpy.run_path(str(REFERENCE))["application"](), [*command, "--help"], prog_name="moelink"
    )
    return result.output if result.exit_code == 0 else None


@pytest.mark.skipif(not installed("typer"), reason="the extra 'cli' is not installed")
def test_moelink_commands_and_options_exist() -> None:
    said = {(page, command) for page in PAGES for command in commands_of(page, "moelink")}
    assert said
    for page, command in said:
        words = shlex.split(command, comments=True)[1:]
        names: tuple[str, ...] = ()
        while words and re.fullmatch(r"[a-z][a-z-]*", words[0]) and help_of((*names, words[0])):
            names = (*names, words.pop(0))
        text = help_of(names) or ""
        for option in words:
            if option.startswith("--") and option != "--help":
                assert re.search(rf"{option.partition('=')[0]}\b", text), f"{page}: {command}"
        assert names or all(word.startswith("-") for word in words), f"{page}: {command}"


@pytest.mark.skipif(not installed("typer"), reason="the extra 'cli' is not installed")
def test_the_made_pages_are_up_to_date() -> None:
    made = runpy.run_path(str(REFERENCE))["PAGES"]
    assert made
    for name, make in made.items():
        assert (ROOT / "docs" / "reference" / name).read_text() == make(), f"{name} is out of date; run: make reference"


def test_the_reference_has_every_public_name() -> None:
    import moelink
    from moelink import errors, formats

    page = (ROOT / "docs" / "reference" / "moelink.md").read_text()
    described = set(re.findall(r"^::: moelink\.(\w+)$", page, re.MULTILINE))
    elsewhere = {*formats.__all__, *(name for name in dir(errors) if name.endswith("Error"))}
    assert described.isdisjoint(elsewhere)
    assert described | elsewhere >= set(moelink.__all__)
    assert described <= set(moelink.__all__)


def texts_of(call: ast.Call) -> list[str]:
    """The constant parts of a call's first argument, without what is around their words."""
    parts = [node.value for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant)]
    return [text for part in parts if (text := str(part).strip(" :(,;"))]


def test_the_logging_page_has_every_record_and_every_warning() -> None:
    page = (ROOT / "docs" / "logging.md").read_text()
    calls = {
        node: ast.unparse(node.func)
        for path in (ROOT / "src" / "moelink").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    records = {texts_of(node)[0] for node, name in calls.items() if re.fullmatch(r"_?log(ger)?\.\w+", name)}
    warned = {texts_of(node)[0] for node, name in calls.items() if name == "warnings.warn"}
    assert set(re.findall(r"^\| `(.* .*?)` \| .* \| ", page, re.MULTILINE)) == records
    table = page.partition("## Warnings")[2].partition("## Environment")[0]
    shown = set(re.findall(r"^\| `(.*?)`", table, re.MULTILINE))
    assert len(shown) == len(warned)
    assert all(any(text.startswith(words) for text in warned) for words in shown), warned
