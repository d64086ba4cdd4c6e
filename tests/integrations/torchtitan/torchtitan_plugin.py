"""A plugin of pytest for torchtitan's own tests: moelink's overrides are registered and applied before they run.

``make test-frameworks`` runs them with it. A test of theirs that clears the registry takes moelink's entries with it,
as those of torchtitan, so each test begins with them again.
"""

from __future__ import annotations

import pytest
from torchtitan.config.override import _REGISTRY, OverrideConfig, apply_overrides
from torchtitan.models.common.config_utils import make_token_dispatcher_config
from torchtitan.models.qwen3 import model_registry

from moelink.integrations.torchtitan import overrides

NAMES = [f"{overrides.__name__}.{name}" for name in ("dispatcher", "routed_experts", "moe", "selective_checkpointing")]
ENTRIES = {name: _REGISTRY[name] for name in NAMES}


@pytest.fixture(autouse=True)
def with_moelink():
    for name, entry in ENTRIES.items():
        _REGISTRY.setdefault(name, entry)
    model = model_registry("debugmodel_moe").model
    model.layers[0].moe.routed_experts.token_dispatcher = make_token_dispatcher_config(
        num_experts=64, top_k=8, comm_backend="deepep", hidden_dim=256, num_max_tokens_per_rank=8
    )
    model.layers = model.layers[:1]
    assert len(apply_overrides(OverrideConfig(imports=NAMES[:1]), model)) == 1
    yield
    dispatcher = model.layers[0].moe.routed_experts.token_dispatcher.build()
    assert type(dispatcher).__name__ == "MoelinkTokenDispatcher"
