"""Count what docs/lab/size.md states of a checkout, by default this one: ``python docs/support/size.py [ROOT]``.

*Lines* are all lines of Python files. *Code* is lines that hold a token, without comments and texts that stand alone
(docstrings). Parameters are counted without ``self`` and ``cls``, on the host: kernels take at most ten by a rule of
their own. A launch constant is a field of ``S`` in the condition of an ``if`` in ``kernels/``. The way of a token is
the files that the tables of ARCHITECTURE.md name.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
FEW_LINES, MANY_PARAMETERS = 40, 9


def code_lines(text: str) -> int:
    """Return the lines of code in ``text``.

    >>> code_lines('"Text."\\n\\nx = [  # comment\\n    1,\\n]\\n')
    3
    """
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    texts = [n for n in nodes if isinstance(n.value, ast.Constant) and isinstance(n.value.value, str)]
    left_out = {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(text).readline) if each.type not in NO_CODE]
    return len({line for each in tokens for line in range(each.start[0], each.end[0] + 1)} - left_out)


def host_functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield name and number of parameters of each function that is no kernel's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(each) for each in node.decorator_list):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield node.name, sum(each.arg not in ("self", "cls") for each in given)


def tested_constants(tree: ast.AST) -> set[str]:
    """Return the fields of ``S`` in conditions."""
    tests = [node.test for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp))]
    fields = [node for test in tests for node in ast.walk(test) if isinstance(node, ast.Attribute)]
    return {node.attr for node in fields if isinstance(node.value, ast.Name) and node.value.id == "S"}


def measures(root: Path) -> Iterator[str]:
    """Yield the rows of the table, then lines and code of each folder."""
    package = root / "src" / "moelink"
    texts = {path.relative_to(package): path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines, code = ({path: count(text) for path, text in texts.items()} for count in (_lines, code_lines))
    yield f"package: {sum(lines.values())} lines, {sum(code.values())} of code, {len(texts)} files"
    few = [path for path in texts if code[path] <= FEW_LINES]
    faces = [path for path in few if path.name in ("__init__.py", "__main__.py")]
    yield f"files of at most {FEW_LINES} lines of code: {len(few)}, of which {len(faces)} are faces of folders"
    many = [name for tree in trees.values() for name, count in host_functions(tree) if count >= MANY_PARAMETERS]
    yield f"functions of {MANY_PARAMETERS} parameters or more: {len(many)}"
    kernels = [tree for path, tree in trees.items() if path.parts[0] == "kernels"]
    yield f"launch constants that are tested: {len(set().union(*map(tested_constants, kernels)))}"
    hops = set(re.findall(r"^\| \d+ \| `([\w/]+\.py)`", (root / "ARCHITECTURE.md").read_text(), re.MULTILINE))
    yield f"files of the way of a token: {len(hops)}, {sum(lines[Path(hop)] for hop in hops)} lines"
    for folder in sorted({path.parent for path in texts}):
        own = [path for path in texts if path.parent == folder]
        yield f"{folder}: {sum(lines[path] for path in own)} lines, {sum(code[path] for path in own)} of code"


def _lines(text: str) -> int:
    return len(text.splitlines())


if __name__ == "__main__":
    for row in measures(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[2]):
        print(row)  # noqa: T201
