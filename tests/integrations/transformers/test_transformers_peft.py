"""LoRA of PEFT on a parallelised model: gradients, files and merged weights are those of the unsharded model."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None or find_spec("peft") is None:
    pytest.skip("the extra 'transformers' and PEFT are not installed", allow_module_level=True)

from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel

import moelink
from moelink.integrations.transformers import parallelize
from moelink.nn import all_reduce_gradients, clip_grad_norm_
from moelink.testing import run_ranks
from tests.integrations.transformers.transformers_models import COMMON, MAX_TOKENS, NUM_EXPERTS, build, tokens

RANK_OF_ADAPTERS, RATE = 3, 0.1
MAX_NORM = 1e-3
"""Less than the norm of the gradient, so all of it is scaled."""
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTER = {"mixtral": ["mlp.gate.weight"], "gpt_oss": ["mlp.router.weight"]}


def model_of(family: str) -> PreTrainedModel:
    """Mixtral; or gpt-oss, with biases and transposed weights, whose experts' second matrix is square."""
    if family == "mixtral":
        return build("mixtral")
    torch.manual_seed(1)
    sizes = {"num_hidden_layers": 2, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "head_dim": 16}
    shape = {**COMMON, **sizes, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4}
    return GptOssForCausalLM(GptOssConfig(**shape)).eval()


def config_of(family: str, **changes: Any) -> LoraConfig:
    """Adapters of experts, attention and router, of two ranks."""
    targets = {"target_modules": ["q_proj"], "target_parameters": [*EXPERTS, *ROUTER[family]]}
    return LoraConfig(r=RANK_OF_ADAPTERS, lora_alpha=6, rank_pattern={"q_proj": 2}, **{**targets, **changes})


def trained(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def unsharded(family: str, folder: str) -> Any:
    return PeftModel.from_pretrained(model_of(family), folder, is_trainable=True)


def of_experts(name: str, whole: Tensor, experts: range) -> Tensor:
    """The part of an adapter of all experts. PEFT has A as (experts, r, in) and B as (out, r, experts), flattened."""
    held = slice(experts.start, experts.stop)
    if "lora_A" in name:
        return whole.unflatten(0, (NUM_EXPERTS, RANK_OF_ADAPTERS))[held].flatten(0, 1)
    return whole.unflatten(1, (RANK_OF_ADAPTERS, NUM_EXPERTS))[..., held].flatten(1)


def backward(model: Any, ids: Tensor) -> None:
    (model(input_ids=ids, labels=ids).loss * len(ids)).backward()


def one_step(model: Any) -> None:
    with torch.no_grad():
        for value in trained(model).values():
            value -= RATE * value.grad


def on_ranks(rank: int, world_size: int, family: str, folder: str) -> dict[str, Any]:
    """Load adapters, train them for a step, save, load again, merge; and what is refused."""
    found: dict[str, Any] = {}
    ids, given, out = tokens()[rank::world_size], f"{folder}/given", f"{folder}/{world_size}"
    with parallelize(model_of(family), max_tokens_per_rank=MAX_TOKENS, device="cpu") as parallel:
        adapted = parallel.with_adapters(given)
        model: Any = adapted.model
        with torch.no_grad():
            found["given"] = model(input_ids=ids).logits
        backward(model, ids)
        adapted.sum_gradients()
        found["gradients"] = {name: value.grad.clone() for name, value in trained(model).items()}
        found["norm"] = adapted.grad_norm()
        one_step(model)
        adapted.save_pretrained(f"{out}/trained")
        adapted.load_pretrained(given)
        with torch.no_grad():
            found["again"] = model(input_ids=ids).logits
        adapted.load_pretrained(f"{out}/trained")
        saves = {
            "peft": model.save_pretrained,
            "pickled": partial(model.save_pretrained, safe_serialization=False),
            "model": parallel.save_pretrained,
        }
        for name, save in saves.items():
            try:
                save(f"{out}/refused-{rank}")
            except moelink.UnsupportedError as error:
                found[name] = str(error)
        model.merge_and_unload()
        parallel.save_pretrained(f"{out}/merged")
    return found


@pytest.mark.parametrize(
    ("family", "world_size"), [("mixtral", 2), ("gpt_oss", 2), ("mixtral", 4), ("gpt_oss", 3), ("mixtral", 1)]
)
def test_adapters_train_save_load_and_merge_as_unsharded(family: str, world_size: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    model = get_peft_model(model_of(family), config_of(family, use_rslora=world_size == 4))
    with torch.no_grad():
        for value in trained(model).values():
            value.copy_(torch.randn(value.shape, generator=generator) / 8)
    model.save_pretrained(str(tmp_path / "given"))
    with torch.no_grad():
        bare, given = model_of(family)(tokens()).logits, model(input_ids=tokens()).logits
    assert (bare - given).abs().max() > 1e-2, "the adapters do not matter"
    for rank in range(world_size):
        backward(model, tokens()[rank::world_size])
    gradients = {name: value.grad for name, value in trained(model).items()}
    norm = torch.nn.utils.get_total_norm(gradients.values())

    said = run_ranks(on_ranks, world_size, family, str(tmp_path))
    first = 0
    for rank, found in enumerate(said):
        mine = range(first, first + NUM_EXPERTS // world_size + (rank < NUM_EXPERTS % world_size))
        first = mine.stop
        assert torch.allclose(found["given"], given[rank::world_size], atol=1e-5)
        assert torch.equal(found["again"], found["given"])
        assert torch.allclose(found["norm"], norm, rtol=1e-4)
        assert found["gradients"].keys() == gradients.keys()
        for name, got in found["gradients"].items():
            whole = gradients[name]
            want = of_experts(name, whole, mine) if ".experts." in name else whole
            assert torch.allclose(got, want, rtol=1e-3, atol=1e-4 * float(whole.abs().max())), name
            assert got.abs().max() > 0, name
        assert "adapters attached to it" in found["model"]
        for name in ("peft", "pickled"):
            assert world_size == 1 or "save_pretrained of the ParallelModel that with_adapters returns" in found[name]

    one_step(model)
    with torch.no_grad():
        want = model(input_ids=tokens()).logits
        got = unsharded(family, str(tmp_path / str(world_size) / "trained"))(input_ids=tokens()).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / str(world_size) / "merged")(tokens()).logits
    assert (want - given).abs().max() > 1e-3, "the step does not matter"
    assert torch.allclose(got, want, atol=1e-4)
    assert torch.allclose(merged, want, atol=1e-4)


def new_and_refused(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Adapters that each rank draws from another seed, seen by DistributedDataParallel's function on gradients; and
    what is refused."""
    said: dict[str, Any] = {}

    def refused(name: str, family: str, adapters: Any) -> None:
        with parallelize(model_of(family), max_tokens_per_rank=MAX_TOKENS, device="cpu") as parallel:
            try:
                parallel.with_adapters(adapters).model(input_ids=tokens())
            except (moelink.MoelinkError, ValueError) as error:
                said[name] = f"{type(error).__name__}: {error}"

    with parallelize(model_of("mixtral"), max_tokens_per_rank=MAX_TOKENS, device="cpu") as parallel:
        torch.manual_seed(rank)
        adapted: Any = parallel.with_adapters(config_of("mixtral")).model
        said["new"] = {name: value.detach().clone() for name, value in trained(adapted).items()}
        backward(adapted, tokens()[rank::world_size])
        all_reduce_gradients(adapted)
        clip_grad_norm_(adapted, MAX_NORM)
        said["clipped"] = clip_grad_norm_(adapted, MAX_NORM)
    biases = config_of("gpt_oss", target_parameters=["mlp.experts.down_proj_bias"])
    refused("biases", "gpt_oss", biases)
    refused("dropout", "mixtral", config_of("mixtral", lora_dropout=0.1))
    refused("kind", "mixtral", 3)
    refused("copies", "mixtral", config_of("mixtral", modules_to_save=["experts"], target_parameters=[]))
    refused("none", "mixtral", config_of("mixtral", modules_to_save=["mlp.gate"], target_parameters=[]))
    refused("folder", "mixtral", folder if rank == 0 else f"{folder}/missing")
    return said


def test_new_adapters_and_what_is_refused(tmp_path: Path) -> None:
    get_peft_model(model_of("mixtral"), config_of("mixtral")).save_pretrained(str(tmp_path))
    said = run_ranks(new_and_refused, 3, str(tmp_path))
    for found in said:
        for name, value in found["new"].items():
            assert ".experts." in name or torch.equal(value, said[0]["new"][name]), name
        assert torch.allclose(found["clipped"], torch.tensor(MAX_NORM), rtol=1e-3)
        assert "down_proj_bias: expected adapters of the weights of experts" in found["biases"]
        assert found["dropout"].startswith("ValueError: lora.ParamWrapper does not work with lora_dropout != 0")
        assert "modules_to_save: expected modules without experts, got 'experts'" in found["copies"]
        assert "none" not in found
        assert (
            found["kind"] == "ArgumentError: adapters: expected a peft.LoraConfig, or a folder with adapters, got int"
        )
    assert said[0]["folder"].startswith("CheckpointError: rank 1: ")
    drawn = [found["new"][next(n for n in found["new"] if ".experts." in n and "lora_A" in n)] for found in said]
    assert not torch.equal(drawn[0], drawn[1])


def alone(rank: int, world_size: int) -> str:
    """The error of gpt-oss with one expert on each rank."""
    sizes = {**COMMON, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 16}
    model = GptOssForCausalLM(GptOssConfig(**sizes, num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1))
    with parallelize(model, max_tokens_per_rank=MAX_TOKENS, device="cpu") as parallel:
        with pytest.raises(moelink.UnsupportedError) as error:
            parallel.with_adapters(config_of("gpt_oss"))
        return str(error.value)


def test_a_single_transposed_expert_on_a_rank_is_refused() -> None:
    assert all("two experts or more on each rank" in text for text in run_ranks(alone, 2))
