"""What people do to a model of transformers before and after ``parallelize``, beside the model that was left whole."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

import moelink
from moelink.integrations.transformers import from_pretrained, parallelize
from moelink.testing import run_ranks
from tests.integrations.transformers.transformers_models import HIDDEN, MAX_TOKENS, build, tokens

ONE = {"max_tokens_per_rank": MAX_TOKENS, "device": "cpu"}


class Adapter(nn.Module):
    """Wraps a module and forwards its attributes, as adapters of PEFT do."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_layer, name)


class Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value * 2


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def experts(model: Any, layer: int) -> Any:
    return model.model.layers[layer].mlp.experts


def test_hooks_of_experts_that_were_set_before_still_fire() -> None:
    model, heard = build("mixtral"), []
    module = experts(model, 0)
    handles = [
        module.register_forward_pre_hook(lambda module, args: heard.append(args[0].shape)),
        module.register_forward_hook(lambda module, args, out: heard.append(out.shape)),
    ]
    with parallelize(model, **ONE):
        logits(model)
        assert heard == [(MAX_TOKENS, HIDDEN)] * 2
        for handle in handles:
            handle.remove()
        logits(model)
        assert len(heard) == 2


def test_one_experts_module_in_two_layers() -> None:
    model = build("mixtral")
    model.model.layers[1].mlp.experts = experts(model, 0)
    want = logits(model)
    with parallelize(model, **ONE):
        assert experts(model, 1) is experts(model, 0)
        assert torch.allclose(logits(model), want, atol=5e-6)


@pytest.mark.parametrize("what", ["an adapter", "parametrisations"])
@pytest.mark.quick("milliseconds, each another way to attach something")
def test_what_is_attached_to_experts_before_is_refused(what: str) -> None:
    model = build("mixtral")
    if what == "an adapter":
        model.model.layers[1].mlp.experts = Adapter(experts(model, 1))
    else:
        nn.utils.parametrize.register_parametrization(experts(model, 1), "down_proj", Doubled())
    with pytest.raises(moelink.UnsupportedError, match=f"got {what} of all experts; call parallelize first"):
        parallelize(model, **ONE)


def test_a_parametrisation_that_is_attached_afterwards() -> None:
    model = build("mixtral")
    with parallelize(copy.deepcopy(model), **ONE) as parallel:
        for each in (model, parallel.model):
            nn.utils.parametrize.register_parametrization(experts(each, 1), "down_proj", Doubled())
        assert torch.allclose(logits(parallel.model), logits(model), atol=5e-6)
        for each in (model, parallel.model):
            each(tokens(), labels=tokens()).loss.backward()
        want = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert torch.allclose(parallel.grad_norm(), want, rtol=1e-5)


def test_a_model_that_is_cast_afterwards() -> None:
    model = build("mixtral")
    with parallelize(copy.deepcopy(model), **ONE) as parallel:
        got, want = logits(parallel.model.bfloat16()), logits(model.bfloat16())
        assert got.dtype == want.dtype == torch.bfloat16
        assert float((got - want).norm() / want.norm()) < 0.02


def test_a_model_that_is_cast_to_more_than_its_rows_carry() -> None:
    model = build("mixtral").bfloat16()
    with parallelize(copy.deepcopy(model), **ONE) as parallel:
        with pytest.warns(UserWarning, match=r"weights of torch.bfloat16 or less.*got a cast to torch.float32"):
            parallel.model.float()
        got, want = logits(parallel.model), logits(model.float())
        assert got.dtype == torch.float32
        assert float((got - want).norm() / want.norm()) < 0.02


def test_names_of_dtypes(tmp_path: Path) -> None:
    build("mixtral").to(torch.bfloat16).save_pretrained(tmp_path)
    for dtype, want in {"auto": torch.bfloat16, "float32": torch.float32, None: torch.bfloat16}.items():
        with from_pretrained(tmp_path, dtype=dtype, **ONE) as parallel:
            assert {p.dtype for p in parallel.model.parameters()} == {want}
    with pytest.raises(moelink.ArgumentError, match="dtype: expected a dtype of floating point.*got 'int8'"):
        from_pretrained(tmp_path, dtype="int8", **ONE)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(moelink.ArgumentError, match=r"folder: expected a folder on this machine.*got .*missing"):
        from_pretrained(tmp_path / "missing", **ONE)


def batches_that_differ(rank: int, world_size: int) -> dict[str, Any]:
    """What is said of ranks whose tokens differ, by the way in which they came to."""
    said: dict[str, Any] = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
        except moelink.ArgumentError as error:
            said[name] = str(error)

    options = {"attention_mask": torch.ones_like(tokens()), "max_new_tokens": 8}
    with parallelize(build("mixtral"), mode="allreduce", **ONE) as parallel:
        model = parallel.model
        torch.manual_seed(5)
        said["sampled"] = model.generate(tokens(), do_sample=True, **options)
        torch.manual_seed(rank)
        refused("seeds", lambda: model.generate(tokens(), do_sample=True, **options))
        said["afterwards"] = model.generate(tokens(), do_sample=False, **options)
    model = build("mixtral")
    model.config.router_jitter_noise = 0.1
    for layer in model.model.layers:
        layer.mlp.jitter_noise = 0.1
    with parallelize(model, mode="allreduce", **ONE):
        logits(model.train(False))
        torch.manual_seed(rank)
        refused("jitter", lambda: logits(model.train()))
        torch.manual_seed(5)
        said["same jitter"] = logits(model)
    os.environ["MOELINK_DEBUG"] = "1"
    with parallelize(build("mixtral"), mode="allreduce", **ONE) as parallel:
        logits(parallel.model)
        refused("another batch", lambda: logits_of(parallel.model, tokens() + rank))
        refused("another layer", lambda: experts(parallel.model, 0)(torch.ones(4, HIDDEN), *routed(rank)))
    return said


def routed(rank: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([[0, 1 + rank]] * 4), torch.ones(4, 2)


def logits_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def test_ranks_that_pass_different_batches_are_told_where_they_must_be_the_same() -> None:
    model = build("mixtral")
    options = {"attention_mask": torch.ones_like(tokens()), "max_new_tokens": 8}
    want = model.generate(tokens(), do_sample=False, **options)
    torch.manual_seed(5)
    sampled = model.generate(tokens(), do_sample=True, **options)
    for layer in model.model.layers:
        layer.mlp.jitter_noise = 0.1
    torch.manual_seed(5)
    jittered = logits(model.train())
    for said in run_ranks(batches_that_differ, 2):
        assert torch.equal(said.pop("sampled"), sampled)
        assert torch.equal(said.pop("afterwards"), want)
        assert torch.allclose(said.pop("same jitter"), jittered, atol=5e-6)
        for name, what in {
            "seeds": "input_ids", "jitter": "hidden_states", "another batch": "input_ids", "another layer": "topk_ids",
        }.items():  # fmt: skip
            text = said.pop(name)
            assert text.startswith(f"{what}: expected the same on all ranks"), name
            assert "on ranks [1]; pass the same batch" in text
        assert not said
