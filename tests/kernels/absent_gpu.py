"""Let torch say that it has a GPU that is not there, for launch code that asks what the device can."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch

from moelink.kernels.launch.device import has_native_casts
from moelink.rows.common_kernel import sms_of
from moelink.rows.grouped_fp8 import launches_of

CAPABILITIES = {"sm_90": (9, 0), "sm_89": (8, 9), "sm_100": (10, 0), "gfx942": (9, 4)}
"""Of each GPU the compute capability, as torch tells it."""
SMS = 132


@contextlib.contextmanager
def on(gpu: str) -> Iterator[None]:
    """Let torch say inside that its device is a ``gpu``, one of :data:`CAPABILITIES`. No tensor can be made there."""
    told = {
        "is_available": lambda: True, "get_device_capability": lambda device=None: CAPABILITIES[gpu],
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=SMS),
    }  # fmt: skip
    hip = "6.4" if gpu.startswith("gfx") else None
    known = has_native_casts, launches_of, sms_of
    with mock.patch.multiple(torch.cuda, **told), mock.patch.object(torch.version, "hip", hip):
        try:
            for each in known:
                each.cache_clear()
            yield
        finally:
            for each in known:
                each.cache_clear()
