"""Training under transformers' Trainer on two ranks has the losses, norms and weights of one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import moelink
from moelink.integrations.transformers import parallelize
from moelink.testing import run_ranks
from tests.integrations.transformers.trainer_ranks import MAX_NORM, SAVED, STEPS, alone, arguments, examples, on_ranks
from tests.integrations.transformers.transformers_models import MAX_TOKENS, build


def test_trainer_trains_saves_and_resumes_as_one_process(tmp_path: Path) -> None:
    want, weights = alone(tmp_path / "one")
    results = run_ranks(on_ranks, 2, str(tmp_path / "two"))
    assert all(norm > MAX_NORM for _, norm in want.values()), "clipping has something to do"
    for found in results:
        assert found["all"].keys() == want.keys() == set(range(1, STEPS + 1))
        for name, steps in found.items():
            for step in range(SAVED + 1 if name == "resumed" else 1, STEPS + 1):
                assert steps[step] == pytest.approx(want[step], rel=1e-3), f"{name}, step {step}"
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / f"checkpoint-{STEPS}").state_dict()
    assert saved.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.allclose(saved[name], value, atol=1e-4), name


def test_trainer_trains_adapters_and_writes_them_whole(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    get_peft_model(build("mixtral"), config).save_pretrained(str(tmp_path / "given"))
    want, weights = alone(tmp_path / "one", str(tmp_path / "given"))
    results = run_ranks(on_ranks, 2, str(tmp_path / "two"), str(tmp_path / "given"))
    saved = PeftModel.from_pretrained(build("mixtral"), str(tmp_path / "two" / f"checkpoint-{STEPS}")).state_dict()
    for found in results:
        for name, steps in found.items():
            for step in range(SAVED + 1 if name == "resumed" else 1, STEPS + 1):
                assert steps[step] == pytest.approx(want[step], rel=1e-3), f"{name}, step {step}"
    assert saved.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.allclose(saved[name], value, atol=1e-4), name
    assert any(
        name.endswith("lora_B.default.weight") and ".experts." in name and value.any() for name, value in saved.items()
    )


def test_a_model_in_trainer_that_takes_the_same_batch_on_each_rank(tmp_path: Path) -> None:
    said = run_ranks(refused, 2, str(tmp_path))
    assert all(
        "in mode 'alltoall', as each trains on a batch of its own, got 2 ranks in mode 'allreduce'" in s for s in said
    )


def refused(rank: int, world_size: int, folder: str) -> str:
    from moelink.integrations.transformers.trainer import Trainer

    args = arguments(Path(folder), world_size)
    assert args.world_size == world_size
    with parallelize(build("mixtral"), max_tokens_per_rank=MAX_TOKENS, mode="allreduce", device="cpu") as parallel:
        try:
            Trainer(parallel, args, train_dataset=examples())
        except moelink.UnsupportedError as error:
            return str(error)
    return ""
