"""Give Triton functions, and the constants that they are compiled for, cache keys that are the same in every process,
whatever it compiled before.

Triton 3.6 hashes a function together with the constants of the functions it calls. But it leaves out the constants of a
callee that has not been hashed yet, and it orders constants of one name by the address of their module's globals. So a
kernel has different keys in different processes: ranks compile again what is in the cache on disk, and a changed
constant may go unnoticed. This module hashes callees first, those that run as a kernel compiles
(``constexpr_function``) too, and names constants with their module.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import triton.language as tl
from triton.language import constexpr
from triton.runtime import JITFunction
from triton.runtime.jit import JITCallable

from moelink.memory.layout import RegionTable

OFFSET = "OFFSET_"
"""How the names of fields for regions begin."""


def settle_cache_key(function: Any) -> Any:
    """Give ``function``, and whatever it calls by a global name, its final ``cache_key``, before its first launch.

    Returns ``function``. Anything that is not a ``JITFunction`` (None, or an interpreted function) is returned
    unchanged.
    """
    if isinstance(function, JITFunction) and not hasattr(function, "_moelink_settled"):
        _settle(function)
    return function


def _settle(function: JITFunction[Any]) -> None:
    # Set first, because a function may call itself.
    function._moelink_settled = True  # type: ignore[attr-defined]
    names = {name: function.__globals__.get(name) for name in sorted(set(function.fn.__code__.co_names))}
    callees = {name: value for name, value in names.items() if isinstance(value, JITCallable)}
    for callee in callees.values():
        settle_cache_key(callee)
    # This fills used_global_vals, which Triton compares at every launch, with those of the callees.
    _ = function.cache_key
    constants = sorted(
        (scope["__name__"], name, str(value))
        for (name, _), (value, scope) in function.used_global_vals.items()
        if isinstance(value, constexpr)
    )
    parts = [function.src, str(function.starting_line_number), *map(repr, constants)]
    parts += [f"{name} {callee.cache_key} {getattr(callee, 'noinline', False)}" for name, callee in callees.items()]
    function.hash = hashlib.sha256("\0".join(parts).encode()).hexdigest()


class Constants:
    """What a kernel is compiled for, in one object: the base of frozen dataclasses whose fields are the constants.

    Two objects with equal fields are equal, and have one short name, which becomes part of cache keys. A class that
    names ``regions`` has a field for each of them: OFFSET_ROWS for region "rows".
    """

    def __init_subclass__(cls, regions: Sequence[str] = (), **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__annotations__.update({OFFSET + name.upper(): "int" for name in regions})

    @classmethod
    def offsets(cls, table: RegionTable) -> dict[str, int]:
        """Return the fields of regions: the first byte of each in ``table``, 0 if the table has no such region."""
        known = {OFFSET + region.name.upper(): region.offset for region in table}
        names = (field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]  # subclasses are dataclasses
        return {name: known.get(name, 0) for name in names if name.startswith(OFFSET)}

    def __post_init__(self) -> None:
        # A short name that stands for all values. It becomes part of symbol names and of cache keys, so it includes
        # the sources of device functions. It also decides equality and hashing (pointer types have no hash).
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values = {name: value.value if isinstance(value, tl.constexpr) else value for name, value in values.items()}
        keys = {name: getattr(settle_cache_key(value), "cache_key", value) for name, value in values.items()}
        text = ",".join(f"{name}={key}" for name, key in keys.items())
        name = f"{type(self).__name__}_{hashlib.sha1(text.encode()).hexdigest()[:16]}"
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_hash", hash(name))
        # The compiler needs attributes of a constexpr object to be constexpr; the interpreter needs plain values.
        if isinstance(tl.sum, JITFunction):  # compiled
            for name, value in values.items():
                object.__setattr__(self, name, tl.constexpr(value))

    def __repr__(self) -> str:
        return str(self.__dict__["_name"])

    def __hash__(self) -> int:
        return int(self.__dict__["_hash"])

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and repr(other) == repr(self))
