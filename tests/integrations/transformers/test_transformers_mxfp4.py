"""Checkpoints of gpt_oss in mxfp4: their experts are multiplied as codes, padded, with biases; others are refused."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

from transformers import AutoModelForCausalLM

import moelink
from moelink.integrations.transformers import CheckpointError, from_pretrained
from moelink.nn import Mxfp4Weight
from moelink.nn.placement import Placement
from moelink.testing import run_ranks
from tests.integrations.transformers.transformers_models import MAX_TOKENS, build, tensors_of, tokens, write
from tests.integrations.transformers.transformers_mxfp4_ranks import (
    BOUND,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    logits,
    rms,
    save,
)

ONE: dict[str, Any] = {"max_tokens_per_rank": MAX_TOKENS, "device": "cpu"}
METHOD = {"quant_method": "mxfp4"}
EXPERTS_OF_ONE = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save(tmp_path_factory.mktemp("mxfp4"))


def rounded(rows: Tensor) -> Tensor:
    """The numbers of rows in fp8_block128."""
    blocks = rows.split(128, dim=1)
    scales = [block.abs().amax(1, keepdim=True) / 448 for block in blocks]
    return torch.cat([(b / s).to(torch.float8_e4m3fn).float() * s for b, s in zip(blocks, scales, strict=True)], dim=1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_logits_are_those_of_the_dequantised_model(world_size: int, folders: tuple[Path, Path]) -> None:
    mxfp4, plain = folders
    said = [logits(0, 1, mxfp4)] if world_size == 1 else run_ranks(logits, world_size, mxfp4, timeout=120)
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(plain)(tokens()).logits
    stored = tensors_of(mxfp4)
    total = sum(tensor.nbytes for tensor in stored.values())
    of_experts = sum(tensor.nbytes for name, tensor in stored.items() if ".experts." in name)
    for found in said:
        for mode in ("allreduce", "alltoall"):
            assert 0 < rms(found[mode], want) < BOUND
        assert found["read"].nbytes == total - of_experts + of_experts // world_size
        assert not found["read"].ignored


def test_experts_are_the_codes_of_the_files_in_another_order(folders: tuple[Path, Path]) -> None:
    stored = tensors_of(folders[0])
    blocks, scales, bias = (stored[f"{EXPERTS_OF_ONE}.gate_up_proj_{part}"] for part in ("blocks", "scales", "bias"))
    with from_pretrained(folders[0], **ONE) as parallel:
        experts = parallel.model.model.layers[1].mlp.experts.quantized
        got = Mxfp4Weight(experts.gate_up_proj, experts.gate_up_scales)
        assert (parallel.ep.config.hidden_size, got.shape) == (256, (EXPERTS, 512, 256))
    for half, start in ((0, 0), (1, 256)):  # gate, up
        mine = slice(start, start + INTERMEDIATE)
        assert torch.equal(got.to_blocks()[0][:, mine, : HIDDEN // 32], blocks[:, half::2])
        assert torch.equal(got.to_blocks()[1][:, mine, : HIDDEN // 32], scales[:, half::2])
        assert torch.equal(got.bias[:, mine], bias[:, half::2])
    assert got.dequantize().count_nonzero() == got.dequantize()[:, :, :HIDDEN].count_nonzero()
    assert not got.bias[:, INTERMEDIATE:256].any()


@pytest.mark.parametrize("placement", [None, Placement.identity(EXPERTS, EXPERTS + 2)], ids=["plain", "replicas"])
def test_experts_differ_from_the_models_by_the_rounding_of_rows_alone(
    placement: Placement | None, folders: tuple[Path, Path]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(MAX_TOKENS, HIDDEN, generator=generator), torch.rand(MAX_TOKENS, 2, generator=generator)
    ids = torch.rand(MAX_TOKENS, EXPERTS, generator=generator).topk(2).indices
    theirs = AutoModelForCausalLM.from_pretrained(folders[1]).model.layers[1].mlp.experts
    want = torch.zeros_like(x)
    with torch.no_grad(), from_pretrained(folders[0], **ONE, placement=placement) as parallel:
        for token, expert, weight in zip(range(MAX_TOKENS), ids, weights, strict=True):
            up = rounded(x[token, None]) @ theirs.gate_up_proj[expert] + theirs.gate_up_proj_bias[expert, None]
            for one, each, factor in zip(up, expert, weight, strict=True):
                inner = rounded(theirs._apply_gate(one))
                want[token] += factor * (inner @ theirs.down_proj[each] + theirs.down_proj_bias[each])[0]
        got = parallel.model.model.layers[1].mlp.experts(x, ids, weights)
        assert got.shape == x.shape
        # An element between the products now and then rounds to the next code.
        assert rms(got, want) < 2e-3
        assert rms(theirs(x, ids, weights), want) > 1e-2


def test_such_a_model_neither_learns_nor_is_saved(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with from_pretrained(folders[0], **ONE) as parallel:
        with pytest.raises(moelink.UnsupportedError, match="without gradients"):
            parallel.model(tokens())
        with pytest.raises(moelink.UnsupportedError, match="got quantised ones.*copy the checkpoint"):
            parallel.save_pretrained(tmp_path)


def test_without_a_dtype_the_rest_is_in_bf16(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Published configurations have none."""
    config = json.loads((folders[0] / "config.json").read_text())
    with from_pretrained(changed(tmp_path, folders[0], config | {"dtype": None}), **ONE) as parallel:
        assert parallel.model.lm_head.weight.dtype == torch.bfloat16
        assert parallel.ep.config.combine_dtype == torch.bfloat16


def changed(target: Path, source: Path, config: dict[str, Any]) -> Path:
    """A copy of ``source`` with another configuration."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    return target


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another setting": ({"dequantize": True}, {}, "got other settings .*dequantize=True"),
    "another format of rows": ({}, {"dispatch_format": "bf16"}, "in mxfp4 .*dispatch_format='fp8_block128'"),
    "no backend": ({}, {"experts_backend": "dequantize"}, "in mxfp4 that a backend can multiply.*of plain weights"),
    "another backend": ({}, {"experts_backend": "torch"}, "'torch': expected weights that are not stored in mxfp4"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    quantization, options, message = REFUSED[what]
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"] |= quantization
    with pytest.raises(moelink.UnsupportedError, match=message):
        from_pretrained(changed(tmp_path / "changed", folders[0], config), **ONE, **options)


def test_experts_of_another_form_are_refused(tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path / "mixtral")
    config = json.loads((tmp_path / "mixtral" / "config.json").read_text())
    folder = changed(tmp_path / "changed", tmp_path / "mixtral", config | {"quantization_config": METHOD})
    with pytest.raises(moelink.UnsupportedError, match="none can .*need gate and up in turn.*as gpt_oss has them"):
        from_pretrained(folder, **ONE)


@pytest.mark.quick("one check each")
@pytest.mark.parametrize("part", ["gate_up_proj_blocks", "down_proj_scales", "down_proj_bias"])
def test_tensors_that_are_missing(part: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = tensors_of(folders[0])
    del tensors[f"{EXPERTS_OF_ONE}.{part}"]
    write(tmp_path / "less", folders[0], {"all.safetensors": tensors}, leave_out=set())
    with pytest.raises(CheckpointError, match=f"missing tensor {EXPERTS_OF_ONE}.{part}"):
        from_pretrained(tmp_path / "less", **ONE)
