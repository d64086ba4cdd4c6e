"""What torchtitan's configuration and an override come to. No torchtitan is needed; test_torchtitan.py has the rest."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from moelink.errors import ConfigError, UnsupportedError
from moelink.integrations.torchtitan.settings import init_arguments, resolve

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
