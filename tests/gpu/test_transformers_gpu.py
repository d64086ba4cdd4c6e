"""Models of transformers on one and two GPUs, against transformers' own on the CPU. Run by hand: ``-m gpu``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

from transformers import AutoModelForCausalLM

import moelink
from moelink.integrations.transformers import from_pretrained
from moelink.testing import run_ranks
from tests.integrations.transformers import transformers_mxfp4_ranks as mxfp4
from tests.integrations.transformers.transformers_models import MOE_LAYERS, NEW_TOKENS, save_all, share, tokens, truth
from tests.integrations.transformers.transformers_ranks import Answers, on_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

# fp32 sums in another order, and other matrix kernels than the CPU's.
TOLERANCE = 1e-4


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).abs().max() / want.abs().max())


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())


@pytest.mark.parametrize("world_size", [1, 2])
def test_models_on_gpus(world_size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    folders = save_all(tmp_path / "checkpoints")
    results: list[dict[str, Answers]] = run_ranks(on_gpus, world_size, folders, str(tmp_path / "saved"), timeout=500)
    for family, folder in folders.items():
        right = truth(folder)
        for rank, found in enumerate(result[family] for result in results):
            mine = share(rank, world_size)
            assert off_by(found.replicated, right.logits) < TOLERANCE
            assert off_by(found.sharded, right.logits[mine]) < TOLERANCE
            assert torch.equal(found.continuation, right.continuation)
            length = NEW_TOKENS - rank
            assert torch.equal(found.own_continuation[:, :length], right.continuation[mine, :length])
            for feeding in ("allreduce", "alltoall", "recomputed"):
                norm = torch.stack([value.norm() for value in right.gradients.values()]).norm()
                assert off_by(found.norms[feeding], norm) < TOLERANCE, (family, feeding)
                for name, value in found.gradients[feeding].items():
                    want = right.gradients[name]
                    if value.shape != want.shape:
                        want = want[rank * len(value) : (rank + 1) * len(value)]
                    assert off_by(value, want) < TOLERANCE, (family, feeding, name)
        for name in ("bf16", "fp8_block128"):
            got = torch.cat([result[family].by_format[name] for result in results])
            assert 0 < rms(got, right.logits) < MOE_LAYERS * moelink.get_format(name).tolerance, (family, name)
        unsharded = truth(folder, torch.bfloat16).logits
        got = torch.cat([result[family].bf16 for result in results])
        assert rms(got, right.logits) < 1.5 * rms(unsharded, right.logits), family


@pytest.mark.parametrize("world_size", [1, 2])
def test_gpt_oss_in_mxfp4(world_size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    folder, plain = mxfp4.save(tmp_path)
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(plain)(tokens()).logits
    for found in run_ranks(mxfp4.logits, world_size, folder, "cuda", timeout=500):
        for mode in ("allreduce", "alltoall"):
            assert 0 < rms(found[mode], want) < mxfp4.BOUND, mode


def test_experts_of_the_sizes_of_gpt_oss_in_bf16(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 1, "initializer_range": 0.02}
    folder, plain = mxfp4.save(tmp_path, **sizes)
    theirs = AutoModelForCausalLM.from_pretrained(plain).model.layers[0].mlp.experts.cuda()
    torch.manual_seed(0)
    x, weights = torch.randn(256, 2880, device="cuda") / 16, torch.rand(256, 2, device="cuda")
    ids = torch.rand(256, mxfp4.EXPERTS, device="cuda").topk(2).indices
    with torch.no_grad(), from_pretrained(folder, max_tokens_per_rank=256, dtype=torch.bfloat16) as parallel:
        got = parallel.model.model.layers[0].mlp.experts(x.bfloat16(), ids, weights)
        assert parallel.ep.config.hidden_size == 2944
        assert got.shape == x.shape
        assert 0 < rms(got, theirs(x, ids, weights)) < mxfp4.BOUND / mxfp4.LAYERS
