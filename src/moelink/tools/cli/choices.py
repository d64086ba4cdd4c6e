"""What options that several commands have may be."""

from __future__ import annotations

from enum import Enum

import torch


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

    @property
    def kind(self) -> str:
        """The kind of device that is meant: of auto, "cuda" where there is a device."""
        if self is Device.auto:
            return "cuda" if torch.cuda.is_available() else "cpu"
        return str(self.value)
