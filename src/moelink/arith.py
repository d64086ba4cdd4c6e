"""Integer helpers that every floor uses."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``. ``ceil_div(7, 4) == 2``."""
    return -(-a // b)


def align_up(value: int, multiple: int) -> int:
    """``value`` rounded up to a multiple. ``align_up(7, 4) == 8``, ``align_up(0, 4) == 0``."""
    return ceil_div(value, multiple) * multiple


def is_integer(value: object, least: int) -> bool:
    """Whether ``value`` is an int, not a bool, and at least ``least``. ``is_integer(True, 0)`` is False."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
