"""Name the choices of settings and of options, without torch, so that commands refuse other names at once."""

from __future__ import annotations

from typing import Literal, TypeAlias

BuiltInFormat = Literal[
    "bf16", "fp32", "fp64", "fp8_block128", "fp8_block128_e8m0", "fp8_token", "mxfp8", "nvfp4", "mxfp4"
]  # fmt: skip
"""Names of the formats that moelink brings (:mod:`moelink.formats`)."""
FormatName: TypeAlias = BuiltInFormat | str
"""A built-in format, which an editor completes, or any name that was registered (:func:`moelink.register_format`)."""
Layout = Literal["expert", "rank", "masked"]
Mode = Literal["alltoall", "allreduce"]
OnFailure = Literal["raise", "mask"]
TransportName = Literal["auto", "collective", "symmetric"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
"""Where a command runs its ranks; "auto": on CUDA devices, if the machine has any."""
