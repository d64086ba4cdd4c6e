"""The version of the package, where every room can read it: ranks compare it at init."""

__version__ = "0.1.0"
