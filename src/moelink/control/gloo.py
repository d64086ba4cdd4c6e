"""Use gloo so that a process can end at any time afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterable

from torch import Tensor

_LETTING_GO_SECONDS = 0.5
_PAUSE_SECONDS = 1e-3


def await_release(tensors: Iterable[Tensor], seconds: float = _LETTING_GO_SECONDS) -> None:
    """Wait until gloo's threads have released the CPU tensors of exchanges that are over, at most ``seconds``.

    They do so a moment after the exchange. A gloo thread that frees a tensor of Python's while the interpreter exits
    aborts the process: a user who exits after an exchange would sometimes see "terminate called without an active
    exception" (pytorch/pytorch#179291).
    """
    lent = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    deadline = time.monotonic() + seconds
    while any(tensor._use_count() > 1 for tensor in lent) and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(_PAUSE_SECONDS)
