"""Make Triton's interpreter faster where it does the same work again and again. What kernels compute stays as it is.

:func:`speed_up` replaces these things, which takes most of the time off an interpreted kernel:

* For each call of a device function the interpreter looks through all of ``triton.language`` for what to replace by its
  own, although the launch has done so. Here the first call does.
* It checks every integer operation for overflow, and drops the result unless a kernel asks for debugging.
* It builds a table of all dtypes whenever it translates one of them.
* It computes the type of every shape, which hardly anything asks for.
* It checks and describes the type and shape of each result again. Here each type is described once.
* It finds out for every operation which type the operands are converted to. Here operands of one plain type are taken
  as they are, and integers next to them become constants of that type, each made once.
* It broadcasts operands of equal shapes, which copies them.

Example: the line ``moelink_testing.interpreter.speed_up()`` in ``conftest.py`` is for all tests of a process. Processes
that tests start call it for themselves.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_numpy_dtype_of, _make_tuple, _patch = interpreter._get_np_dtype, core.tuple.__init__, interpreter._patch_lang
_make_block_type = core.block_type.__init__
_broadcast, _convert_operands = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl
_INTEGERS = {t.name: range(t.get_int_min_value(), t.get_int_max_value() + 1) for t in (tl.int32, tl.int64)}
_PLAIN = {*_INTEGERS, *(t.name for t in (tl.int8, tl.int16, tl.uint8, tl.uint16, tl.uint32, tl.uint64, tl.float32))}

_numpy_dtypes: dict[str, Any] = {}
_block_types: dict[Any, dict[str, Any]] = {}
_constants: dict[Any, Any] = {}
_semantics: dict[Any, Any] = {}
_modules: dict[Any, frozenset[str]] = {}
_patched: set[str] = set()
"""Names of the modules of ``triton.language`` that the running launch has patched."""
_replaced: list[tuple[Any, str, Any]] = []
"""(object, attribute, Triton's own value) of everything that :func:`speed_up` has replaced."""
_MISSING = object()


def speed_up() -> bool:
    """Make Triton's interpreter faster in this process. A second call does nothing.

    Returns:
        Whether kernels are interpreted in this process. Where they are compiled, nothing changes.
    """
    if not is_interpreted():
        return False
    if not _replaced:
        options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        for owner, name, value in (*_FASTER, (interpreter.interpreter_builder, "options", options)):
            _replaced.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, value)
    return True


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels in this process: ``TRITON_INTERPRET`` was 1 when it was loaded."""
    return isinstance(tl.standard.sum, interpreter.InterpretedFunction)


@contextmanager
def stock_interpreter() -> Iterator[None]:
    """Let kernels run in Triton's own interpreter for as long as the context lasts.

    A test that compares the two, or that is about the interpreter itself, needs it. No launch may be under way.
    """
    was_fast = bool(_replaced)
    while _replaced:
        owner, name, value = _replaced.pop()
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    try:
        yield
    finally:
        if was_fast:
            speed_up()


class _Kept:
    """Another scope restores what is patched."""

    def restore(self) -> None:
        """Do nothing."""


class _Restoring:
    """Restores ``scope``, after which nothing counts as patched."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def restore(self) -> None:
        """Restore it."""
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
    mine = self.__dict__
    if mine.get("_type") is None:  # "type" is what Triton's own tuples have
        mine["_type"] = mine.get("type") or core._type_for_tuple_values(self.values)
    return mine["_type"]


def _make_block_type_once(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    key = (type(element_ty), element_ty.name, sizes)
    found = _block_types.get(key)
    if found is None:
        _make_block_type(self, element_ty, shape)
        found = _block_types[key] = {**self.__dict__, **_shape_of(sizes)}
    self.__dict__.update(found)


def _shape_of(sizes: tuple[int, ...]) -> dict[str, Any]:
    """What a tensor keeps of its shape, under the names under which a type keeps it for its tensors."""
    shape = core.tuple([core.constexpr(size) for size in sizes])
    return {"tensor_shape": shape, "tensor_numel": core.constexpr(math.prod(sizes))}


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    if "tensor_shape" not in type.__dict__:  # a scalar, whose type lives as long as Triton, or made by Triton's own
        sizes = type.shape.values if type.is_block() else ()
        type.__dict__.update(_shape_of(tuple([core._unwrap_if_constexpr(size) for size in sizes])))
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.tensor_shape, type.tensor_numel


def _broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    if lhs.type is rhs.type or [s.value for s in lhs.shape.values] == [s.value for s in rhs.shape.values]:
        return lhs, rhs
    broadcast: tuple[Any, Any] = _broadcast(self, lhs, rhs)
    return broadcast


def _constant(semantic: Any, value: int, type: Any) -> Any:
    """Return ``value`` as a tensor of ``type``, a scalar or a block. Nothing may change it: it is shared."""
    key = (value, type.scalar.name, tuple([size.value for size in type.tensor_shape.values]))
    found = _constants.get(key)
    if found is None:
        found = semantic.scalar_constant(value, type.scalar)
        if type.is_block():
            found = semantic.tensor(semantic.builder.create_splat(type.to_ir(semantic.builder), found.handle), type)
        found.handle.data.flags.writeable = False
        _constants[key] = found
    return found


def _convert_different(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    a, b = type(lhs), type(rhs)
    if a is core.tensor and b is core.tensor:
        if lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in _PLAIN:
            return _broadcast_unequal(self, lhs, rhs)
    elif a is core.tensor and b is int:
        if rhs in _INTEGERS.get(lhs.dtype.name, ()):
            return lhs, _constant(self, rhs, lhs.type)
    elif a is int and b is core.tensor and lhs in _INTEGERS.get(rhs.dtype.name, ()):
        return _constant(self, lhs, rhs.type), rhs
    converted: tuple[Any, Any] = _convert_operands(self, lhs, rhs, *args, **kwargs)
    return converted


def _patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = _semantics.setdefault(builder, TritonSemantic(builder))

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, call)


_FASTER = (
    (interpreter, "_patch_lang", _patch_once),
    (interpreter, "_patch_attr", _patch_attribute),
    (core.block_type, "__init__", _make_block_type_once),
    (core.tensor, "__init__", _make_tensor),
    (TritonSemantic, "broadcast_impl_value", _broadcast_unequal),
    (TritonSemantic, "binary_op_type_checking_impl", _convert_different),
    (interpreter, "_get_np_dtype", _cached_numpy_dtype_of),
    (core.tuple, "__init__", _make_tuple_without_type),
    (core.tuple, "type", property(_type_of_tuple, lambda self, type: self.__dict__.update(_type=type))),
)
