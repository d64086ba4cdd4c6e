"""Rules for the sources of kernels that keep them working, and keep their bits, with every Triton that users have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import moelink
from moelink.kernels.launch.launcher import Launcher
from moelink.kernels.records import Peers
from moelink.memory.nodes.network import OneNode

PACKAGE = Path(moelink.__file__).parent


def sources() -> dict[str, ast.Module]:
    """The parsed files of the package that import Triton, by path."""
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return {str(path.relative_to(PACKAGE)): ast.parse(text) for path, text in texts.items() if "triton" in text}


def constants_of(tree: ast.Module) -> set[str]:
    """Names that a module binds to ``tl.constexpr(...)``, alone or in a tuple."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else [node.targets[0]]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            pairs = zip(targets, values, strict=len(targets) == len(values))
            found |= {t.id for t, v in pairs if isinstance(t, ast.Name) and is_call_of(v, "constexpr")}
    return found


def is_call_of(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name) and last_name(node.func) == name
    )


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_kernel(node: ast.AST) -> bool:
    """Whether ``node`` is a function that Triton compiles."""
    return isinstance(node, ast.FunctionDef) and any(last_name(mark) == "jit" for mark in node.decorator_list)


def constants_first(tree: ast.Module, constants: set[str]) -> Iterator[ast.expr]:
    """Operations of kernels whose left operand is such a constant and whose right one may be a tensor."""
    for function in filter(is_kernel, ast.walk(tree)):
        arguments = function.args.posonlyargs + function.args.args
        static = {a.arg for a in arguments if a.annotation is not None and last_name(a.annotation) == "constexpr"}

        def is_static(node: ast.expr, static: set[str] = static) -> bool:
            if isinstance(node, ast.BinOp):
                return is_static(node.left) and is_static(node.right)
            if isinstance(node, ast.Subscript) and last_name(node.value) == "shape":
                return True
            if isinstance(node, ast.Attribute):
                return is_static(node.value)
            return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in constants | static)

        for node in ast.walk(function):
            if isinstance(node, ast.BinOp):
                left, right = node.left, node.right
            elif isinstance(node, ast.Compare):
                left, right = node.left, node.comparators[0]
            else:
                continue
            names = {n.id for n in ast.walk(left) if isinstance(n, ast.Name)}
            if names & constants and is_static(left) and not is_static(right):
                yield node


KERNEL = """
_HEADER, _SHIFT = tl.constexpr(5), tl.constexpr(3)

@triton.jit
def kernel(out, n, S: tl.constexpr):
    tl.store(out, {})
"""


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    ("operation", "allowed"),
    [
        ("n + _HEADER", True), ("_HEADER + n", False), ("_HEADER + S.WORDS", True), ("_HEADER * 8 - n", False),
        ("_HEADER < n", False), ("n < _HEADER", True), ("1 + n", True), ("_HEADER + _SHIFT * 2", True),
        ("out + _HEADER + n", True), ("_HEADER // n.shape[0]", True), ("(_HEADER << _SHIFT) + n", False),
    ],
)  # fmt: skip
def test_a_constant_before_a_tensor_is_found(operation: str, allowed: bool) -> None:
    tree = ast.parse(KERNEL.format(operation))
    assert constants_of(tree) == {"_HEADER", "_SHIFT"}
    assert (not list(constants_first(tree, constants_of(tree)))) is allowed


def test_no_constant_stands_before_a_tensor() -> None:
    """The interpreter of Triton 3.8 makes a constant of ``constant + tensor``, which it then refuses as an operand.

    ``tensor + constant`` is a tensor with every Triton.
    """
    files = sources()
    constants = set().union(*map(constants_of, files.values()))
    assert len(constants) > 50
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in files.items()
        for node in constants_first(tree, constants)
    ]
    assert not found, "\n".join(found)


def launches(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls of kernels with a grid in brackets: ``settle_cache_key(kernel)[grid](...)``, ``kernel[grid](...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            launched = node.func.value
            if is_call_of(launched, "settle_cache_key") or last_name(launched).endswith("kernel"):
                yield node


def states(call: ast.Call, tree: ast.Module, option: str) -> bool:
    """Whether a call passes ``option``, by its name or in a dictionary of the module that has no other use."""
    spread = {last_name(keyword.value) for keyword in call.keywords if keyword.arg is None}
    named = {keyword.arg for keyword in call.keywords}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and last_name(node.targets[0]) in spread:
            named |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    return option in named


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    ("text", "found", "stated"),
    [
        ("some_kernel[4,](x, S=S)", 1, False), ("settle_cache_key(f)[4,](x, enable_fp_fusion=False)", 1, True),
        ("EXACT = {'enable_fp_fusion': True}\nsome_kernel[4,](x, **EXACT)", 1, True),
        ("EXACT = {'num_warps': 4}\nsome_kernel[4,](x, **EXACT)", 1, False), ("table[4](x)", 0, True),
    ],
)  # fmt: skip
def test_a_launch_that_leaves_an_option_open_is_found(text: str, found: int, stated: bool) -> None:
    tree = ast.parse(text)
    assert len(list(launches(tree))) == found
    assert all(states(call, tree, "enable_fp_fusion") for call in launches(tree)) is stated


def test_every_launch_says_whether_products_and_sums_are_fused() -> None:
    """Triton 3.10 will turn the default, and with it the bits of a launch that says nothing. Triton 3.9 warns of that.

    Kernels of the protocol are launched by ``Launcher``, which says it for all of them. Its own two launches in
    brackets are of a kernel that is compiled already, and of an interpreted one. Benchmarks promise no bits.
    """
    found = [
        (path, call, states(call, tree, "enable_fp_fusion"))
        for path, tree in sources().items()
        if not path.startswith("tools/")
        for call in launches(tree)
    ]
    silent = [f"{path}:{call.lineno}" for path, call, stated in found if not stated]
    assert [place.rpartition(":")[0] for place in silent] == ["kernels/launch/launcher.py"], silent
    assert len(found) == 2, "the launcher of calls, and that of kernels on rows"

    table = torch.zeros(4, dtype=torch.int64)
    launcher = Launcher(
        Peers(table, table, table), torch.device("cpu"), network=OneNode(SimpleNamespace(pointers=table))
    )
    assert launcher.kernel(None, 3, S=None, num_warps=8).options == {"enable_fp_fusion": False, "num_warps": 8}
