"""A plugin of pytest for Megatron's own tests of its token dispatchers: moelink takes their place.

``make upstream-megatron`` runs them with it, each rank in a process of its own, on GPUs or else on CPUs over gloo.
Expert parallelism over more ranks than there are is made one over these. Tests of what moelink refuses, or does
otherwise on purpose, are deselected; lines at the end say how many and why.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

ON_GPUS = torch.cuda.is_available()
if not ON_GPUS:
    import megatron_cpu  # noqa: F401 - for its effect, before anything of Megatron is imported

from megatron.core import utils
from megatron.core.transformer.moe import moe_utils
from packaging.version import Version

from moelink.integrations.megatron import Settings, close
from moelink.integrations.megatron.layer import MoelinkMoELayer, MoelinkTokenDispatcher

if utils.get_te_version() is None:  # without TransformerEngine
    utils.get_te_version = lambda: Version("0")  # the tests compare it as they are collected, before they skip
    moe_utils.te_general_gemm = None  # Megatron's router asks for it, and defines it only with TransformerEngine

MODULE = "tests.unit_tests.transformer.moe.test_token_dispatcher"
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
SETTINGS = Settings(max_tokens_per_rank=256, device="cuda" if ON_GPUS else "cpu")
GONE = ("CUDA not available", "Deep EP and Hybrid EP are not available")
"""Reasons for which Megatron skips tests, and which do not hold for moelink."""
REFUSED = {
    "tp_size": "tensor parallelism of experts is refused",
    "moe_tp_size": "tensor parallelism of experts is refused",
    "test_capacity_padding_forward_backward": "rows that fill a capacity stay at home, and it counts them",
}
left_out: Counter[str] = Counter()
made: list[str] = []
"""Dispatchers of the layers that tests made."""


def moe_layer(config, submodules):
    """Megatron's MoELayer as its tests make it, over moelink.

    Megatron builds the dispatcher that moelink's replaces; "flex" cannot be built without DeepEP.
    """
    if config.moe_token_dispatcher_type == "flex":
        config = dataclasses.replace(config, moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend=None)
    layer = MoelinkMoELayer(config, submodules, moelink=SETTINGS)
    assert type(layer.token_dispatcher) is MoelinkTokenDispatcher
    made.append(type(layer.token_dispatcher).__name__)
    return layer


def reason_to_leave_out(item) -> str | None:
    sizes = item.callspec.params if hasattr(item, "callspec") else {}
    for name, reason in REFUSED.items():
        if sizes.get(name, 1) > 1 or item.originalname == name:
            return reason
    if sizes.get("moe_flex_dispatcher_backend") == "hybridep":
        return "the same as deepep, with moelink in place of either"
    return None


def pytest_collection_modifyitems(config, items):
    kept = []
    for item in items:
        reason = reason_to_leave_out(item)
        if reason is None:
            kept.append(item)
        else:
            left_out[reason] += 1
        if "ep_size" in getattr(getattr(item, "callspec", None), "params", {}):
            item.callspec.params["ep_size"] = min(item.callspec.params["ep_size"], WORLD_SIZE)
        for node in item.listchain():
            node.own_markers[:] = [mark for mark in node.own_markers if mark.kwargs.get("reason") not in GONE]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_terminal_summary(terminalreporter):
    for reason, count in left_out.items():
        terminalreporter.write_line(f"{count} tests left out: {reason}")


def start_on_cpus() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


@pytest.fixture(scope="session", autouse=True)
def over_moelink():
    """Megatron's tests with moelink's layers, and with process groups of the ranks that there are."""
    from tests.unit_tests.test_utilities import Utils

    tested = import_module(MODULE)
    tested.MoELayer = moe_layer
    tested.is_deep_ep_available = lambda: True
    if not ON_GPUS:
        Utils.initialize_distributed = staticmethod(start_on_cpus)
    yield
    assert len(made) > 0, "no test made a layer over moelink"
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def closed_communicators():
    """Each test makes process groups of its own."""
    yield
    close()
