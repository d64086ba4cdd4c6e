"""A plugin of pytest for SGLang's own tests: plugins are loaded as a server loads them, before they run.

``make upstream-sglang`` runs them with it, on CPUs, and compares MOELINK_SGLANG=0 with 1. They may replace what they
like; after each of them SGLang's layers must still ask moelink for their dispatcher, or with 0 still not.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

benchmarks_want = ModuleType("datasets")  # sglang.test imports its benchmarks, and these a package that no test needs
benchmarks_want.load_dataset = lambda *args, **options: pytest.fail("a test wants a data set")
sys.modules.setdefault("datasets", benchmarks_want)

from sglang.srt.layers.moe.fused_moe_triton import layer
from sglang.srt.plugins import HookRegistry, load_plugins

from moelink.integrations.sglang import plugin

load_plugins()
is_on = os.environ["MOELINK_SGLANG"] == "1"
assert (plugin.TARGET in HookRegistry._patched) == is_on, "no hook: is moelink installed, with its entry points?"
hooked = layer.create_moe_dispatcher


@pytest.fixture(autouse=True)
def with_moelink():
    yield
    assert layer.create_moe_dispatcher is hooked
