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
    "batch_invariance": "Compare layers with and without batch_invariant.",
    "collective": "Compare the collective transport with sort + all-to-all.",
    "experts": "Time grouped products of experts, or their settings.",
    "first_result": "Time what new users type until their first result.",
    "frameworks": "Compare a framework's dispatcher with moelink's.",
    "generate": "Time a transformers model, and the same with moelink.",
    "host": "Measure host time of calls, of operators or of a layer.",
    "launchers": "Compare the launchers of moelink.contract with init's.",
    "membership": "Measure the pauses when ranks are masked and admitted.",
    "mxfp4": "Time products with weights in mxfp4 beside fp8.",
    "ncu": "Record hardware counters or stalls by Nsight Compute.",
    "overlap": "Measure how much communication experts could hide.",
    "quotients": "Count the corrections that quotients of scales need.",
    "render": "Write the tables of README.md and docs with results.",
    "roles": "Compare the kernels of two source trees, role by role.",
    "router": "Time a router's choice of experts, and whole routers.",
    "serve": "Serve a tiny model with vLLM on two CPU ranks.",
    "startup": "Measure how long a layer takes until its first output.",
    "sweep": "Time launch settings of kernels, or pairs of calls.",
    "training": "Measure a training step of a layer, and its memory.",
    "whole": "Test and measure a machine of several GPUs in one call.",
})  # fmt: skip
"""Name and purpose of each script; the name is that of its module."""
