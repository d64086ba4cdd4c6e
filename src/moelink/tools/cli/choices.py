"""What options that several commands have may be."""

from __future__ import annotations

from enum import Enum


class Transport(str, Enum):
    """Choices of --transport."""

    auto = "auto"
    collective = "collective"
    symmetric = "symmetric"


class Device(str, Enum):
    """Choices of --device."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
