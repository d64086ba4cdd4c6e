"""An index of a checkpoint comes from a stranger: a malformed one is refused, and none leads out of its folder."""

from __future__ import annotations

import json
import os
import random
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

from moelink.integrations.transformers.checkpoint import INDEX, CheckpointError, read_index
from tests.tiers import seeds


def mutated(good: bytes, choice: random.Random) -> bytes:
    """``good`` with one to three bytes, or runs of them, changed, cut, doubled or inserted."""
    data = bytearray(good)
    for _ in range(choice.randrange(1, 4)):
        at, run = choice.randrange(len(data) + 1), choice.randrange(1, 9)
        data[at : at + choice.choice((0, run))] = choice.choice(
            (b"", choice.randbytes(1), choice.randbytes(run), data[at : at + run] * 2, b"../", b"[" * 4000, b"null")
        )
    return bytes(data)


@seeds(500, 50_000)
def test_an_index_leads_nowhere_but_into_its_folder(seeds: range, tmp_path: Path) -> None:
    files = {"model.a.weight": "model-00001-of-00002.safetensors", "model.b.weight": "more/two.safetensors"}
    good = json.dumps({"metadata": {"total_size": 4}, "weight_map": files}).encode()
    assert read_index(good, tmp_path) == files
    refused = 0
    for seed in seeds:
        text = mutated(good, random.Random(seed))
        try:
            found = read_index(text, tmp_path)
        except CheckpointError:
            refused += 1
            continue
        for file in found.values():
            assert os.path.normpath(tmp_path / file).startswith(f"{tmp_path}{os.sep}"), (seed, file)
    assert 0 < refused < len(seeds)


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 7}}',
        b'{"weight_map": {"a": null}}',
        b"[" * 100_000,
        *(
            json.dumps({"weight_map": {"a": file}}).encode()
            for file in ("../a.safetensors", "/a.safetensors", "x/../../a.safetensors", "", "a.bin", "a\0.safetensors")
        ),
    ],
)
def test_a_malformed_index_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=INDEX):
        read_index(text, tmp_path)
