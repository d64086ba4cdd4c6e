"""Note the operators that torch's dispatcher sees."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """A mode that must see operators; notes those of moelink."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names += [str(func)] if str(func).startswith("moelink.") else []
        return func(*args, **(kwargs or {}))
