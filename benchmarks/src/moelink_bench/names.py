"""Name the choices of the command's options, without torch, so that other names are refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from moelink.names import Layout

PresetName = Literal["decode", "prefill", "formats", "skew", "sms", "layouts", "smoke"]
LayerPresetName = Literal["layer", "layer-zipf", "layer-smoke"]
RolePresetName = Literal["roles", "roles-smoke"]
CPU_PRESETS = ("smoke", "layer-smoke", "roles-smoke")
CaseName = Literal["deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b", "tiny"]
DeviceKind = Literal["cuda", "cpu"]
PeerName = Literal["vdev", "flashinfer"]
PEERS: tuple[PeerName, ...] = ("vdev", "flashinfer")
"""Libraries other than moelink: torch's ``all_to_all_vdev_2d``, and FlashInfer."""
LAYOUTS: tuple[Layout, ...] = ("expert", "rank")
"""Layouts that are timed. Layout "masked" has the kernels of layout "expert" without the padding."""
SCRIPTS: Mapping[str, str] = MappingProxyType({
    "batch_invariance": "Compare a layer with batch_invariant and one without, on CPU ranks.",
    "collective": "Compare the collective transport with a sort and all_to_all_single, on CPU ranks.",
    "experts": "Time the grouped products of experts, or launch settings of their fp8 kernel.",
    "first_result": "Time what users of four kinds type until their first result, without a GPU.",
    "frameworks": "Compare a framework's own dispatcher with moelink in the same layer; by torchrun.",
    "generate": "Time a transformers model with its own expert parallelism and with moelink; by torchrun.",
    "host": "Measure host time of calls, or what the operator layer adds to it.",
    "launchers": "Compare the launchers of moelink.contract with a communicator.",
    "membership": "Measure how long calls pause when a rank is killed and masked, and when another one is admitted.",
    "ncu": "Record hardware counters or stall reasons of each role by Nsight Compute.",
    "overlap": "Measure how much communication the experts of a layer could hide; by torchrun.",
    "quotients": "Count the corrections that a quotient of a bf16 element by an fp32 scale needs.",
    "render": "Write the tables of README.md and docs that show results.",
    "roles": "Compare the kernels of two source trees, role by role, on one device.",
    "router": "Time a router's choice of experts, and the router as a whole.",
    "serve": "Serve a tiny model with vLLM on two CPU ranks over moelink, and compare it with one process.",
    "startup": "Measure how long a layer takes until its first output, with an empty cache of kernels.",
    "sweep": "Time launch settings of the symmetric kernels, or pairs of calls; by torchrun.",
    "training": "Measure a training step of a layer, and the peak of its memory, against others.",
    "whole": "Test and measure a machine of several GPUs in one call, one result a step.",
})  # fmt: skip
"""Name and purpose of each script; the name is that of its module."""
