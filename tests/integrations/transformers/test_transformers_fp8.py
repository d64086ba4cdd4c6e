"""Checkpoints in fp8: experts are what the files hold, bit for bit; and what cannot be multiplied is refused."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

if not hasattr(FineGrainedFP8HfQuantizer, "get_load_operations"):
    pytest.skip("this transformers cannot tell weights from scales: 5.23 can", allow_module_level=True)

import moelink
from moelink.integrations.transformers import CheckpointError, from_pretrained
from moelink.testing import run_ranks
from tests.integrations.transformers.transformers_fp8_ranks import logits, save
from tests.integrations.transformers.transformers_models import (
    MAX_TOKENS,
    NUM_EXPERTS,
    files_by_expert,
    only_experts,
    tensors_of,
    tokens,
    write,
)

ONE: dict[str, Any] = {"max_tokens_per_rank": MAX_TOKENS, "device": "cpu"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save(tmp_path_factory.mktemp("fp8"))


def changed(target: Path, source: Path, **quantization: Any) -> Path:
    """A copy of ``source`` with other entries of the quantisation."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= quantization
    (target / "config.json").write_text(json.dumps(config))
    return target


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """The difference relative to what is wanted, both as root mean squares."""
    return float((got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())


@pytest.mark.parametrize("world_size", [1, 2])
def test_experts_are_multiplied_as_they_are_stored(world_size: int, folders: tuple[Path, Path], tmp_path: Path) -> None:
    fp8, plain = folders
    count = NUM_EXPERTS // world_size
    own = [
        only_experts(tmp_path / str(rank), fp8, range(rank * count, (rank + 1) * count)) for rank in range(world_size)
    ]
    for folder in own:
        shutil.copy(fp8 / "config.json", folder)
    said = [logits(0, 1, own)] if world_size == 1 else run_ranks(logits, world_size, own, timeout=120)
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(plain)(tokens()).logits
    stored = tensors_of(fp8)
    for rank, found in enumerate(said):
        assert found["backend"] == "torch"
        state = found["state"]
        for expert in range(count):
            name = f"model.layers.1.mlp.experts.{rank * count + expert}"
            for ours, theirs in (("proj", "weight"), ("scales", "weight_scale_inv")):
                gate, up, down = (stored[f"{name}.{part}_proj.{theirs}"] for part in ("gate", "up", "down"))
                got = state[f"quantized.gate_up_{ours}"][expert], state[f"quantized.down_{ours}"][expert]
                assert torch.equal(got[0], torch.cat([gate, up]).float())
                assert torch.equal(got[1], down.float())
        for mode in ("allreduce", "alltoall"):
            # Rows are rounded to fp8 twice, on their way and between the products.
            assert 0 < rms(found[mode], want) < 2 * moelink.get_format("fp8_block128").tolerance
        assert set(found["read"].files) == {
            "rest.safetensors", *(f"expert-{e}.safetensors" for e in range(rank * count, (rank + 1) * count)),
        }  # fmt: skip


def test_what_is_replicated_is_dequantised(folders: tuple[Path, Path]) -> None:
    fp8, plain = folders
    want = tensors_of(plain)
    with from_pretrained(fp8, **ONE) as parallel:
        for name, parameter in parallel.model.named_parameters():
            assert torch.equal(parameter, want[name]), name
            assert parameter.dtype == torch.float32


def test_a_model_in_fp8_neither_learns_nor_is_saved(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with from_pretrained(folders[0], **ONE) as parallel:
        with pytest.raises(moelink.UnsupportedError, match="without gradients"):
            parallel.model(tokens())
        with pytest.raises(moelink.UnsupportedError, match="copy the checkpoint"):
            parallel.save_pretrained(tmp_path)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another method": ({"quant_method": "awq"}, {}, "quantised ones .*quant_method='awq'"),
    "other blocks": ({"weight_block_size": [64, 64]}, {}, r"weight_block_size=\[64, 64\]"),
    "no blocks": ({"weight_block_size": None}, {}, "quantised ones"),
    "other scales": ({"scale_fmt": "ue8m0"}, {}, "scale_fmt='ue8m0'"),
    "static activations": ({"activation_scheme": "static"}, {}, "activation_scheme='static'"),
    "another format of rows": ({}, {"dispatch_format": "bf16"}, "none can .*dispatch_format='fp8_block128'"),
    "no backend": ({}, {"experts_backend": "dequantize"}, "that a backend can multiply.*load a checkpoint of plain"),
    "a backend that is not there": ({}, {"experts_backend": "flashinfer"}, "experts_backend 'flashinfer'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    quantization, options, message = REFUSED[what]
    with pytest.raises(moelink.UnsupportedError, match=message):
        from_pretrained(changed(tmp_path / "changed", folders[0], **quantization), **ONE, **options)


@pytest.mark.quick("one check each")
@pytest.mark.parametrize("of", ["self_attn.o_proj", "mlp.experts.3.up_proj"])
def test_scales_that_are_missing(of: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    files = files_by_expert(folders[0])
    for tensors in files.values():
        tensors.pop(f"model.layers.1.{of}.weight_scale_inv", None)
    write(tmp_path / "less", folders[0], files, leave_out=set())
    with pytest.raises(CheckpointError, match="o_proj" if "o_proj" in of else "gate_up_proj_scale_inv"):
        from_pretrained(tmp_path / "less", **ONE)
