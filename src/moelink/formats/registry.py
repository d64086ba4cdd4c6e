"""Keep the names of formats: the built-in table, which never changes, and the formats that a process registers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moelink.errors import ArgumentError, ConfigError
from moelink.formats.base import Format
from moelink.formats.fp4 import MXFP4, NVFP4
from moelink.formats.fp8 import MXFP8, FP8Block128, FP8Block128E8M0, FP8Token
from moelink.formats.plain import BF16, FP32, FP64

BUILTIN: Mapping[str, Format] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            BF16(), FP32(), FP64(), FP8Block128(), FP8Block128E8M0(), FP8Token(), MXFP8(), NVFP4(), MXFP4(),
        )
    }
)  # fmt: skip


class FormatRegistry:
    """Formats by name. Names are only added, so a name means one format for the life of the process."""

    def __init__(self, builtin: Mapping[str, Format] = BUILTIN) -> None:
        self._builtin = builtin
        self._registered: dict[str, Format] = {}

    def names(self) -> tuple[str, ...]:
        """Return the known names: the built-in ones, then the registered ones in their order."""
        return (*self._builtin, *self._registered)

    def get(self, name: str) -> Format:
        """Return the format called ``name``. Raises ConfigError, which lists the known names."""
        fmt = self._builtin.get(name) or self._registered.get(name)
        if fmt is None:
            raise ConfigError("dispatch_format", f"one of {', '.join(map(repr, self.names()))}", name)
        return fmt

    def register(self, fmt: Format) -> None:
        """Add a format under ``fmt.name``. Raises ArgumentError when the name is not valid or is taken."""
        if not isinstance(fmt, Format):
            raise ArgumentError("fmt", "an instance of moelink.formats.Format", repr(fmt))
        if not isinstance(fmt.name, str) or not fmt.name:
            raise ArgumentError("fmt.name", "a non-empty string", repr(fmt.name))
        if fmt.name in self.names():
            raise ArgumentError("fmt.name", f"a name not among {', '.join(map(repr, self.names()))}", repr(fmt.name))
        self._registered[fmt.name] = fmt


REGISTRY = FormatRegistry()


def get_format(name: str) -> Format:
    """Return the format of a name. Raises ConfigError for field ``dispatch_format``, which lists the known names."""
    return REGISTRY.get(name)


def register_format(fmt: Format) -> None:
    """Make ``fmt`` known as ``fmt.name`` in this process, for good. Raises ArgumentError when the name is taken."""
    REGISTRY.register(fmt)


def format_names() -> tuple[str, ...]:
    """Return every known name: built-in ones first, then registered ones in their order."""
    return REGISTRY.names()
