"""Padding goes to no expert and is counted nowhere; real tokens, losses and gradients are those of the whole model."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moelink
from moelink.integrations.transformers import parallelize
from moelink.nn import Placement, load_report
from moelink.testing import run_ranks
from tests.integrations.transformers.transformers_models import (
    BATCH,
    LENGTH,
    MAX_TOKENS,
    MOE_LAYERS,
    NEW_TOKENS,
    NUM_EXPERTS,
    build,
    generate,
    tokens,
)

TOPK = {"mixtral": 2, "qwen3_moe": 3}
COEFFICIENT = 0.5
ONE: dict[str, Any] = {"max_tokens_per_rank": MAX_TOKENS, "device": "cpu"}


def mask(side: str) -> Tensor:
    """[BATCH, LENGTH]: sequence b has LENGTH - b tokens, and the last one begins or ends with the padding."""
    ones = torch.ones(BATCH, LENGTH, dtype=torch.long)
    real = ones.cumsum(1) <= LENGTH - torch.arange(BATCH)[:, None]
    return (real.flip(1) if side == "left" else real).long()


def learn(model: Any, ids: Tensor, present: Tensor, **options: Any) -> Any:
    """Backward of the loss with the auxiliary one, of real tokens that follow others; the result of the model."""
    follows = present.bool() & present.roll(1, dims=1).bool()
    labels = ids.where(follows, -100)
    out = model(ids, attention_mask=present, labels=labels, output_router_logits=True, use_cache=False, **options)
    out.loss.backward()
    return out


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sent(model: Any) -> list[int]:
    """Tokens that each layer has sent since it was made."""
    return [sum(layer["tokens_per_expert"]) for layer in load_report(model)["layers"]]


def padded(rank: int, world_size: int, family: str, mode: Any, side: str) -> dict[str, Any]:
    part = slice(None) if mode == "allreduce" else slice(rank, None, world_size)
    ids, present = tokens()[part], mask(side)[part]
    model = build(family)
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = COEFFICIENT
    with parallelize(model, mode=mode, placement=Placement.identity(NUM_EXPERTS), **ONE) as parallel:
        out = learn(model, ids, present)
        parallel.sum_gradients()
        said = {"sent": sent(model), "logits": out.logits.detach(), "aux": out.aux_loss.detach()}
        said["gradients"] = gradients(model)
        said["experts"] = next(m.ownership.experts for m in model.modules() if hasattr(m, "ownership"))
        with torch.no_grad():
            model(ids)
            said["whole"] = sent(model)
            said["continuation"] = generate(model, ids, synced_gpus=mode == "alltoall")
    return said


@pytest.mark.parametrize(
    ("family", "world_size", "mode", "side"),
    [
        ("mixtral", 2, "alltoall", "left"),
        ("qwen3_moe", 3, "alltoall", "right"),
        ("mixtral", 2, "allreduce", "right"),
        ("qwen3_moe", 1, "alltoall", "left"),
    ],
)
def test_padding_is_sent_nowhere(family: str, world_size: int, mode: str, side: str) -> None:
    """The auxiliary loss is that of the unsharded model with this rank's tokens."""
    said = run_ranks(padded, world_size, family, mode, side, timeout=200)
    model = build(family)
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = COEFFICIENT
    for rank, found in enumerate(said if mode == "alltoall" else said[:1]):
        part = slice(None) if mode == "allreduce" else slice(rank, None, world_size)
        ids, present = tokens()[part], mask(side)[part]
        want = learn(model, ids, present)
        real = present.bool()
        torch.testing.assert_close(found["logits"][real], want.logits[real], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(found["logits"][~real], want.logits[~real]), "padding had experts"
        torch.testing.assert_close(found["aux"], want.aux_loss)
        assert found["sent"] == [int(real.sum()) * TOPK[family]] * MOE_LAYERS
        assert found["whole"] == [count + ids.numel() * TOPK[family] for count in found["sent"]]
        assert found["continuation"].shape == (len(ids), NEW_TOKENS)
    for found in said:
        assert found["gradients"].keys() == gradients(model).keys()
        for name, whole in gradients(model).items():
            mine = whole[list(found["experts"])] if ".experts." in name else whole
            bound = 1e-4 * float(whole.abs().max())
            torch.testing.assert_close(found["gradients"][name], mine, atol=bound, rtol=1e-4)


def test_generation_of_padded_prompts(tmp_path: Path) -> None:
    """Also of tokens after the first, whose mask covers those in the cache."""
    model, ids, present = build("mixtral"), tokens(), mask("left")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": present}
    want = model.generate(ids, **options)
    with parallelize(model, placement=Placement.identity(NUM_EXPERTS), **ONE):
        assert torch.equal(model.generate(ids, **options), want)
        steps = BATCH * (NEW_TOKENS - 1)
        assert sent(model) == [(int(present.sum()) + steps) * TOPK["mixtral"]] * MOE_LAYERS


def test_checkpointed_layers_send_padding_in_both_computations() -> None:
    """A recomputation has no mask, so the gradients would be others if the first computation had one. Its tokens count
    once."""
    model = build("mixtral")
    learn(model, tokens(), mask("right"))
    want = gradients(model)
    model.zero_grad()
    model.train()
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)()
    with parallelize(model, placement=Placement.identity(NUM_EXPERTS), **ONE):
        learn(model, tokens(), mask("right"))
        assert sent(model) == [tokens().numel() * TOPK["mixtral"]] * MOE_LAYERS
        for name, got in gradients(model).items():
            torch.testing.assert_close(got, want[name], atol=1e-4 * float(want[name].abs().max()), rtol=1e-4)


def test_other_recomputations_of_a_layer_are_refused() -> None:
    model = build("mixtral")
    layer = model.model.layers[0].mlp
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    with parallelize(model, **ONE):
        model(tokens(), labels=tokens()).loss.backward()
        with pytest.raises(moelink.UnsupportedError, match="attention_mask: expected transformers' own activation"):
            learn(model, tokens(), mask("right"))


def test_a_mask_of_another_forward_is_forgotten() -> None:
    """After an error in a forward, and for a model that is called inside of another one."""
    model = build("mixtral")
    with parallelize(model, placement=Placement.identity(NUM_EXPERTS), **ONE), torch.no_grad():
        with pytest.raises(ValueError, match="input_ids"):
            model(tokens(), inputs_embeds=torch.zeros(BATCH, LENGTH, 128), attention_mask=mask("left"))
        model.model(tokens())
        assert sent(model) == [tokens().numel() * TOPK["mixtral"]] * MOE_LAYERS


def test_a_model_with_a_mask_compiles_as_one_graph() -> None:
    model = build("mixtral")
    with parallelize(model, placement=Placement.identity(NUM_EXPERTS), **ONE), torch.no_grad():
        want = model(tokens(), attention_mask=mask("right"), use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        got = compiled(tokens(), attention_mask=mask("right"), use_cache=False).logits
        torch.testing.assert_close(got, want)
        assert sent(model) == [2 * int(mask("right").sum()) * TOPK["mixtral"]] * MOE_LAYERS
