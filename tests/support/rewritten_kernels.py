"""Let Triton's interpreter rewrite the functions of all kernels now, so that forked processes need not."""

from __future__ import annotations

import importlib
import pkgutil

import triton
from triton.runtime.interpreter import InterpretedFunction


def rewrite(package: str) -> int:
    """Rewrite the kernels of a package and of its modules; return how many there are."""
    path = importlib.import_module(package).__path__
    names = [package, *(module.name for module in pkgutil.walk_packages(path, package + "."))]
    found = {
        value for name in names for value in vars(importlib.import_module(name)).values()
        if isinstance(value, InterpretedFunction)
    }  # fmt: skip
    for function in found:
        function.rewrite()
    return len(found)


if triton.knobs.runtime.interpret:
    REWRITTEN = rewrite("moelink.kernels") + rewrite("moelink.formats")
