"""Make Triton's interpreter faster where it does the same work again and again. What kernels compute stays as it is.

Importing this module replaces four things, which takes half to three quarters of the time off an interpreted kernel:

* For each call of a device function the interpreter looks through all of ``triton.language`` for what to replace by its
  own, although the launch has done so. Here the first call does.
* It checks every integer operation for overflow, and drops the result unless a kernel asks for debugging.
* It builds a table of all dtypes whenever it translates one of them.
* It computes the type of every shape, which hardly anything asks for.

``conftest.py`` imports it, and so do the modules of ranks that are processes of their own. Where kernels are compiled
or Triton is not installed it changes nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
from typing import Any

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
if _INTERPRETED:
    import triton.language as tl
    from triton.language import core
    from triton.runtime import interpreter

    _numpy_dtype_of, _make_tuple, _patch = interpreter._get_np_dtype, core.tuple.__init__, interpreter._patch_lang

_numpy_dtypes: dict[str, Any] = {}
_modules: dict[Any, frozenset[str]] = {}
_patched: set[str] = set()
"""Names of the modules of ``triton.language`` that the running launch has patched."""


class _Kept:
    """Another scope restores what is patched."""

    def restore(self) -> None:
        pass


class _Restoring:
    """Restores ``scope``, after which nothing counts as patched."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def restore(self) -> None:
        self._scope.restore()
        _patched.clear()


def _patch_once(fn: Any) -> Any:
    wanted = _modules.get(fn)
    if wanted is None:
        seen = fn.__globals__.values()
        wanted = frozenset(value.__name__ for value in seen if inspect.ismodule(value) and value in (tl, core))
        _modules[fn] = wanted
    if wanted <= _patched:
        return _Kept()
    scope = _Restoring(_patch(fn))
    _patched.update(wanted)
    return scope


def _cached_numpy_dtype_of(dtype: Any) -> Any:
    scalar = dtype.scalar
    if isinstance(scalar, tl.pointer_type):
        return _numpy_dtype_of(dtype)
    found = _numpy_dtypes.get(scalar.name)
    if found is None:
        found = _numpy_dtypes[scalar.name] = _numpy_dtype_of(scalar)
    return found


def _make_tuple_without_type(self: Any, args: Any, type: Any = None) -> None:
    if type is None:
        self.values, self.__dict__["_type"] = list(args), None
    else:
        _make_tuple(self, args, type)


def _type_of_tuple(self: Any) -> Any:
    if self._type is None:
        self._type = core._type_for_tuple_values(self.values)
    return self._type


if _INTERPRETED:
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _cached_numpy_dtype_of
    core.tuple.__init__ = _make_tuple_without_type
    core.tuple.type = property(_type_of_tuple, lambda self, type: self.__dict__.update(_type=type))
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
