"""Two levels between nodes as users meet them, ``ranks_per_node`` forced on one machine; and the configuration."""

from __future__ import annotations

import pytest
import torch

import moelink
from moelink.devices import init_devices
from moelink.errors import ConfigError, UnsupportedError
from moelink.memory.workspace import Workspace
from moelink.testing import run_ranks
from tests.nodes import levels_ranks


@pytest.mark.parametrize("part, fields", [
    ("every_way", {}), ("every_way", {"max_tokens_per_rank": 6}),
    ("every_way", {"dispatch_format": "fp32", "combine_dtype": torch.float32}), ("faults", {}),
], ids=str)  # fmt: skip
def test_calls_of_every_kind(part: str, fields: dict[str, object]) -> None:
    assert run_ranks(getattr(levels_ranks, part), 4, fields, timeout=240) == [True] * 4


def config(world_size: int = 16, **fields: object) -> moelink.EPConfig:
    base = dict(
        num_experts=256, topk=8, hidden_size=7168, max_tokens_per_rank=4096, ranks_per_node=8, transport="symmetric",
        two_level=True,
    )  # fmt: skip
    return moelink.EPConfig(**{**base, **fields, "world_size": world_size})


@pytest.mark.parametrize("fields, expected", [
    ({"two_level": 1}, "True, False or 'auto'"),
    ({"transport": "auto"}, "False or 'auto' with transport='auto'"),
    ({"transport": "collective"}, "transport='collective'"),
    ({"mode": "allreduce"}, "mode='allreduce'"),
    ({"ranks_per_node": 1}, "ranks_per_node=1 of 16 ranks"),
    ({"ranks_per_node": 16}, "ranks_per_node=16 of 16 ranks"),
    ({"ranks_per_node": None}, "ranks_per_node=None"),
    ({"pre_reduce": False}, "pre_reduce=False, because rows are summed"),
], ids=str)  # fmt: skip
@pytest.mark.quick("milliseconds, and each refuses something else")
def test_what_has_no_levels_is_refused(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"two_level: expected .*{expected}"):
        config(**fields)
    if fields.get("two_level") != 1:
        assert config(**{**fields, "two_level": "auto"}).two_level is False


def test_ranks_of_one_cpu_process_have_no_forwarders() -> None:
    fields = dict(num_experts=8, topk=2, hidden_size=32, max_tokens_per_rank=3, transport="symmetric", ranks_per_node=2)
    with pytest.raises(UnsupportedError, match="two_level: expected False for one process with 4 ranks"):
        init_devices(["cpu"] * 4, **fields, two_level=True)
    with init_devices(["cpu"] * 4, **fields, two_level="auto") as ep:
        assert ep.configs[0].two_level is False


def test_auto_takes_what_is_estimated_to_be_faster() -> None:
    many, few = (config(two_level="auto", max_tokens_per_rank=tokens) for tokens in (4096, 1))
    assert (many.two_level, few.two_level) == (True, False)
    assert config(8, two_level="auto", ranks_per_node=1).two_level is False


def test_staging_is_bounded_by_nodes_and_reported() -> None:
    """A relay for each token of a peer on each other node, and a row; one level has one for each *rank* there."""
    for world, nodes in ((16, 2), (64, 8)):
        two, one = (Workspace(config(world, two_level=levels)) for levels in (True, False))
        other, tokens = nodes - 1, 4096
        bound = tokens * (two.relay_bytes * (other + 1) + two.row_bytes * 2 * other)
        assert bound <= two.staging_bytes < 1.02 * bound
        assert two.relay_bytes < 1.1 * two.message_bytes
        assert 2 * two.staging_bytes < one.staging_bytes
        report = config(world).memory_report()
        assert report.block == two.nbytes
        assert report.staging == two.staging_bytes
        assert f"{report.staging / 2**20:.1f} MiB" in str(report)
        assert two.max_puts >= 2 * other * tokens + 6 * (world - 8)
    assert config(8, ranks_per_node=None, two_level=False).memory_report().staging == 0
