"""Functions for ranks of tests/bench/test_bench_generate.py: the script on a tiny model, on CPUs over gloo."""

from __future__ import annotations

import pytest


def script(rank: int, world_size: int, words: list[str], tolerance: float | None) -> int:
    """Run the script, with another tolerance of the gate if one is given. Return its exit status."""
    from moelink_bench import generate

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        if tolerance is not None:
            patch.setitem(generate.TOLERANCE, "cpu", tolerance)
        return generate.main(words)
