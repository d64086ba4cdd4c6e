"""Give Triton functions cache keys that are the same in every process, whatever it compiled before.

Triton 3.6 hashes a function together with the constants of the functions it calls. But it leaves out the constants of a
callee that has not been hashed yet, and it orders constants of one name by the address of their module's globals. So a
kernel has different keys in different processes: ranks compile again what is in the cache on disk, and a changed
constant may go unnoticed. This module hashes callees first, and names constants with their module.
"""

from __future__ import annotations

import hashlib
from typing import Any

from triton.language import constexpr
from triton.runtime import JITFunction


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
    callees = {name: value for name, value in names.items() if isinstance(value, JITFunction)}
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
    parts += [f"{name} {callee.cache_key} {callee.noinline}" for name, callee in callees.items()]
    function.hash = hashlib.sha256("\0".join(parts).encode()).hexdigest()
