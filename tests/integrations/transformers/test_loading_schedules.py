"""Random schedules of a fault while ranks load, save and run a model: the others end in time, with a named error.

160 of them; the first are those of a run of this folder alone. What is different with processes is in
``test_transformers_ranks.py``, and in ``tests/control/test_exchange.py`` for exchanges.
"""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

from tests.integrations.transformers.loading_schedules import KINDS, SLOW, SPAN, WORLD, Checkpoint, check, run
from tests.support.simulated_groups import Fault
from tests.tiers import seeds


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """Two of models of the same sizes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return Checkpoint.make(folder / "first", 1), Checkpoint.make(folder / "second", 2)


@seeds(10, 160)
def test_loading_in_which_a_rank_is_hit(seeds: Any, tmp_path: Path, checkpoints: tuple[Checkpoint, Checkpoint]) -> None:
    seen: Counter[Any] = Counter()
    for seed in seeds:
        fault = Fault.draw(seed, WORLD, SPAN, KINDS)
        ranks, said = run(seed, fault, *checkpoints, tmp_path / str(seed))
        seen[check(ranks, said), fault.kind] += 1
        seen["hit"] += ranks.hit or fault.kind == SLOW
    print(seen)
    assert seen["hit"] > 2 * len(seeds) // 3, seen
    assert all(seen["ended", kind] for kind in KINDS if kind != SLOW), seen
    assert seen["finished", SLOW] == len([seed for seed in seeds if KINDS[seed % len(KINDS)] == SLOW]), seen
