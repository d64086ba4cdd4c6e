"""Bring kernels into Triton's intermediate form (TTIR), by a record of what they are compiled for, and print them.

Nothing here knows which kernels there are. Run it where kernels are not interpreted (without TRITON_INTERPRET).

Example: what ``add`` is for pointers to fp32, on an H100::

    spec = Spec({"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 1024}, target="sm_90")
    print(print_of(add, spec), ir_of(add, spec))
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from triton.compiler.code_generator import CodeGenerator

from moelink_testing import lowered
from moelink_testing.fingerprints import nameless


@dataclass(frozen=True)
class Spec:
    """What a kernel is compiled for.

    Attributes:
        types: of the arguments that are not constants, as Triton writes them: "*bf16", "i32", or a tuple of types (a
            ``NamedTuple`` for a record). Pointers are multiples of 16 bytes.
        constants: the values of the ``constexpr`` arguments.
        target: a GPU, as :func:`moelink_testing.lowered` names it.
        options: of the compiler, as a launch passes them.
    """

    types: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    target: str = "sm_90"
    options: Mapping[str, Any] = field(default_factory=dict)


def ir_of(kernel: Any, spec: Spec, *, passes: bool = True) -> str:
    """Trace ``kernel``, run the first passes unless ``passes`` is False, and return the form as text. Raises what the
    compiler says."""
    until = "ttir" if passes else "ir"
    form = lowered(kernel, spec.types, spec.constants, target=spec.target, until=until, **spec.options)
    return str(form.asm[until])


def print_of(kernel: Any, spec: Spec) -> str:
    """Return 16 hexadecimal digits that stand for what ``kernel`` does and for its compiler options."""
    text = nameless(ir_of(kernel, spec))
    return hashlib.sha1(f"{sorted(spec.options.items())}\n{text}".encode()).hexdigest()[:16]


Place = tuple[str, int, int]
"""File, line and, of an expression, column + 1 in its function's source; 0 of a statement."""


@contextmanager
def traced_places() -> Iterator[set[Place]]:
    """Note the places in the sources of kernels that are traced inside: statements, and either side of ``a if S.X else
    b``.

    What a constant leaves out is not among them. So a statement that is in no form of a kernel is found by comparison
    with :func:`places_of`.
    """
    places: set[Place] = set()
    visit = CodeGenerator.visit

    def noting(self: CodeGenerator, node: ast.AST | None) -> Any:
        if isinstance(node, (ast.stmt, ast.expr)) and hasattr(node, "lineno"):  # a default of an argument has no line
            column = node.col_offset + 1 if isinstance(node, ast.expr) else 0
            places.add((self.file_name, self.begin_line + node.lineno, column))
        return visit(self, node)

    with mock.patch.object(CodeGenerator, "visit", noting):
        yield places


def places_of(function: Any) -> set[Place]:
    """Return the places in a ``triton.jit`` function that :func:`traced_places` notes if all of it is traced."""
    file = function.fn.__code__.co_filename
    defined = next(number for number, line in enumerate(function.raw_src) if line.strip().startswith("def "))
    begin = function.starting_line_number + defined - 1
    definition = function.parse().body[0]
    found = {
        (file, begin + node.lineno, 0)
        for statement in definition.body
        for node in ast.walk(statement)
        if isinstance(node, ast.stmt)
    }
    for node in ast.walk(definition):
        if isinstance(node, ast.IfExp):
            found |= {(file, begin + side.lineno, side.col_offset + 1) for side in (node.body, node.orelse)}
    return found
