"""A kernel as calls of one kind launch it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Program:
    """A kernel and how it is launched: what does not depend on a call's tensors.

    Attributes:
        kernel: the function. S: its spec. options: of the compiler.
        programs: programs that work. count: programs to launch for that (:func:`moelink.kernels.launch.grid.grid`).
        compiled: the kernel on the device, by the types and alignments of the caller's tensors.
    """

    kernel: Any
    programs: int
    count: int
    S: Any
    options: dict[str, Any]
    compiled: dict[Any, Any] = field(default_factory=dict)
