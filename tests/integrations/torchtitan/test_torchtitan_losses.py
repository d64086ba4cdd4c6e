"""torchtitan's layer with auxiliary losses and padding over moelink, against its own layer in one process."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed here: run by make test-frameworks", allow_module_level=True)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

from torchtitan.models.gpt_oss import model_registry

from moelink.errors import UnsupportedError
from moelink.testing import run_ranks
from tests.integrations.torchtitan import losses_ranks, torchtitan_ranks

BOUND = torchtitan_ranks.BATCH * torchtitan_ranks.SEQ_LEN


@pytest.mark.parametrize(
    ("world_size", "scoring", "by"),
    [(2, "sigmoid", "scale"), (2, "softmax", "add_aux_losses"), (1, "softmax", "scale")],
)
def test_gradients_are_those_of_one_process_with_the_losses_added(world_size: int, scoring: str, by: str) -> None:
    for pairs in run_ranks(losses_ranks.compared, world_size, scoring, by):
        for name, (expected, made) in pairs.items():
            # Experts get the same rows in the same order; sums over ranks and tokens are of fp32 in another one.
            same = name in ("counts", "out") or "inner_experts" in name
            bound = 0.0 if same else 2.0**-20 * expected.abs().max().item()
            assert (made - expected).abs().max().item() <= bound, name


def test_what_has_no_losses_or_masks_is_refused_by_name() -> None:
    for said in run_ranks(losses_ranks.refusals, 2):
        assert "tensor_parallel_degree: expected 1 with the override moe" in said["tensor"]
        assert "aux_loss.sequence: expected 0 with context parallelism" in said["context"]
        assert "model: expected layers of the override moe" in said["model"]
        assert "padding_mask: expected torch.bool of shape [1, 3]" in said["mask"]


def test_a_layer_of_another_class_is_refused() -> None:
    from moelink.integrations.torchtitan.overrides import moe

    cfg = model_registry("debugmodel").model.layers[0].moe
    with pytest.raises(UnsupportedError, match="moe: expected torchtitan's own layer, got the configuration GptOssMoE"):
        moe(cfg, num_max_tokens_per_rank=8)


def test_training_with_losses_and_padding_is_the_same_checkpointed_and_compiled() -> None:
    losses = {"balance": 0.02, "z": 0.001, "over": "all"}
    override = (f"{torchtitan_ranks.OVERRIDES}.moe", {"aux_loss": losses, "num_max_tokens_per_rank": BOUND})
    checkpointing = f"{torchtitan_ranks.OVERRIDES}.selective_checkpointing"

    def trained(imports: list, checkpointed: bool, compiler: str | None) -> tuple:
        said = run_ranks(
            torchtitan_ranks.trained, 2, imports, "standard", "partial_dtensor", checkpointed, compiler, 3, None, True,
            timeout=800,
        )  # fmt: skip
        (first, replaced, traffic, terms, _), (second, _, _, others, _) = said
        assert first == second
        assert len(replaced) == torchtitan_ranks.LAYERS + checkpointed + torchtitan_ranks.LAYERS
        assert len(traffic) == 1
        return first, torch.stack(terms) + torch.stack(others)

    curve, terms = trained([override], False, None)
    assert curve[-1] < curve[0]
    assert (terms[:, 0] > losses["balance"] * 0.99).all(), "1 for even load, in every layer"
    assert (terms[:, 2] > 0).all()
    assert trained([override, checkpointing], True, None)[0] == curve
    for eager, compiled in zip(curve, trained([override], False, "inductor")[0], strict=True):
        assert abs(eager - compiled) <= 1e-2
