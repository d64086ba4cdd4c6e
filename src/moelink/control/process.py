"""Objects that belong to one process, as their memory and their peers do."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from moelink.errors import UnsupportedError

T = TypeVar("T", bound="OfThisProcess")


class OfThisProcess:
    """An object whose copies are the object itself, and which no other process can have."""

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        """Return this object: a copied layer communicates with the same ranks, by the same memory."""
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"pickle: expected an object that another process can have, got a {type(self).__name__}; make it again "
            "there, and load the model from its state_dict"
        )
