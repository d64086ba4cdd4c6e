"""What torchtitan's configuration and an override come to. No torchtitan is needed; test_torchtitan.py has the rest."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from moelink.errors import ArgumentError, ConfigError, UnsupportedError
from moelink.integrations.torchtitan import set_padding_mask
from moelink.integrations.torchtitan.settings import aux_loss_of, init_arguments, resolve
from moelink.nn import AuxLossConfig

DEEPEP = {"num_experts": 8, "top_k": 2, "hidden_dim": 64, "num_max_tokens_per_rank": 32, "cudagraphable": False}
STANDARD = {"num_experts": 8, "top_k": 2}


def test_sizes_come_from_the_model() -> None:
    fields = resolve(DEEPEP, {})
    assert fields == {
        "hidden_dim": 64, "num_max_tokens_per_rank": 32, "dtype": "bfloat16", "dispatch_format": "bf16",
        "batch_invariant": False, "expert_alignment": 1, "capacity": None, "transport": "auto", "num_sms": None,
        "timeout": 60.0,
    }  # fmt: skip
    arguments = init_arguments(fields, num_experts=8, top_k=2, device=torch.device("cpu"))
    assert arguments == {
        "num_experts": 8, "topk": 2, "hidden_size": 64, "max_tokens_per_rank": 32, "combine_dtype": torch.bfloat16,
        "dispatch_format": "bf16", "batch_invariant": False, "expert_alignment": 1, "capacity": None,
        "transport": "auto", "num_sms": None, "timeout": 60.0, "device": torch.device("cpu"),
    }  # fmt: skip


def test_arguments_are_taken_where_the_model_has_none() -> None:
    given = {"hidden_dim": 128, "num_max_tokens_per_rank": 7, "dtype": "float32", "batch_invariant": True, "num_sms": 4}
    fields = resolve(STANDARD, given)
    assert {name: fields[name] for name in given} == given
    assert fields["dispatch_format"] == "fp32"
    assert resolve(STANDARD, {**given, "dispatch_format": "fp8_block128"})["dispatch_format"] == "fp8_block128"


def test_padding_and_dtype_of_the_replaced_dispatcher_are_kept() -> None:
    assert resolve({**DEEPEP, "pad_multiple": 32}, {})["expert_alignment"] == 32
    assert resolve({**DEEPEP, "dtype": torch.float32}, {})["dtype"] == "float32"
    assert resolve(DEEPEP, {"num_max_tokens_per_rank": 40})["num_max_tokens_per_rank"] == 40
    assert resolve({**DEEPEP, "non_blocking_capacity_factor": 1.0}, {})["capacity"] is None


def test_losses_are_those_of_the_layer_and_a_scale() -> None:
    assert aux_loss_of(None) == (None, 1.0)
    given = {"balance": 0.01, "z": 1e-3, "over": "all"}
    assert aux_loss_of(given) == (AuxLossConfig(**given), 1.0)
    assert aux_loss_of({**given, "scale": 0.25}) == (AuxLossConfig(**given), 0.25)


@pytest.mark.quick("each is a refusal of its own, in microseconds")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"load": 1}, r"aux_loss: expected fields of balance, sequence, z, over, scale, got \['load'\]"),
        ({"z": 1, "group": None}, r"aux_loss: expected fields .*, got \['group'\]"),
        ({"z": -1}, "aux_loss.z: expected a finite number >= 0, got -1"),
        ({"scale": 1}, "aux_loss: expected a positive coefficient of balance, sequence, z"),
        ({"z": 1, "scale": 0}, "aux_loss.scale: expected a finite number > 0, got 0"),
    ],
)
def test_losses_that_there_are_not_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        aux_loss_of(given)


def test_a_model_without_layers_that_take_a_mask_is_refused() -> None:
    with pytest.raises(ArgumentError, match="model: expected layers of the override moe, got Linear without any"):
        set_padding_mask(torch.nn.Linear(1, 1), None)


@pytest.mark.quick("each is a refusal of its own, in microseconds")
@pytest.mark.parametrize(
    ("configured", "given", "message"),
    [
        (STANDARD, {"num_max_tokens_per_rank": 1}, r"hidden_dim: expected the model's dim; .*'deepep'.*, got None"),
        (STANDARD, {"hidden_dim": 8}, r"num_max_tokens_per_rank: expected the most .*local_batch_size.*, got None"),
        (DEEPEP, {"hidden_dim": 65}, "hidden_dim: expected what the model is configured for, 64, .*, got 65"),
        (DEEPEP, {"num_max_tokens_per_rank": 31}, "num_max_tokens_per_rank: expected at least 32, .*, got 31"),
        (DEEPEP, {"dtype": "float16"}, "dtype: expected one of bfloat16, float32 .*, got 'float16'"),
        (DEEPEP, {"dispatch_format": "int3"}, "dispatch_format: expected one of .*, got 'int3'"),
        ({**DEEPEP, "pad_multiple": 32}, {"expert_alignment": 16}, "expert_alignment: expected .* 32, .*, got 16"),
        ({**DEEPEP, "non_blocking_capacity_factor": 0.5}, {}, "non_blocking_capacity_factor: .*capacity=.*, got 0.5"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(configured: dict, given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(configured, given)


@pytest.mark.skipif(find_spec("torchtitan") is not None, reason="torchtitan is installed, so nothing is missing")
@pytest.mark.parametrize("module", ["overrides", "dispatcher"])
def test_without_torchtitan_the_package_is_named(module: str) -> None:
    words = r"torchtitan: expected a release from 0.3.0 .*run pip install 'torchtitan>="
    with pytest.raises(UnsupportedError, match=words):
        __import__(f"moelink.integrations.torchtitan.{module}")
