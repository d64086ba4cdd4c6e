"""moelink as torchtitan's token dispatcher, against torchtitan's AllToAll dispatcher, on CPU ranks."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed here: run by make test-frameworks", allow_module_level=True)

pytestmark = [
    # What torchtitan and torch say of CPUs: no fp32 autocast there, no CUDA for its kernels.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.qwen3 import model_registry
from torchtitan.overrides import fused_swiglu  # noqa: F401 - registers the override that is combined with ours

from moelink.errors import ConfigError
from moelink.integrations.torchtitan.dispatcher import MoelinkSelectiveAC
from moelink.testing import assert_bitwise_equal, run_ranks
from tests.integrations.torchtitan import torchtitan_ranks as ranks

DISPATCHER = f"{ranks.OVERRIDES}.dispatcher"
BOUND = ranks.BATCH * ranks.SEQ_LEN

# torchtitan rounds each weighted row to the dtype before it sums them; moelink sums in fp32, and rounds once per rank
# and once at home. Each of topk terms is off by half a step of its own, so the sum by less than topk steps of the
# largest.
STEP = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


def outputs_agree(theirs: dict, made: dict, topk: int, dtype: torch.dtype) -> None:
    for name, expected in theirs.items():
        # One term, or two in fp32: one rounding, wherever it is made.
        if name != "out" or topk == 1 or (topk == 2 and dtype == torch.float32):
            assert_bitwise_equal(made[name], expected, name)
        else:
            bound = topk * STEP[dtype] * expected.float().abs().max().item()
            assert (made[name].float() - expected.float()).abs().max().item() <= bound


@pytest.mark.parametrize(
    ("world_size", "topk", "dtype"),
    [
        (2, 1, torch.bfloat16), (2, 2, torch.bfloat16), (2, 2, torch.float32), (4, 2, torch.float32),
        (4, 2, torch.bfloat16),
    ],
)  # fmt: skip
def test_output_and_all_gradients_are_those_of_all_to_all(world_size: int, topk: int, dtype: torch.dtype) -> None:
    for theirs, made in run_ranks(ranks.compared, world_size, topk, dtype):
        outputs_agree(theirs, made, topk, dtype)


def test_more_experts_a_token_than_two_differ_by_rounding_alone() -> None:
    for theirs, made in run_ranks(ranks.compared, 4, 4, torch.float32):
        for name, expected in theirs.items():
            scale = expected.float().abs().max().item()
            bound = 0.0 if name in ("counts", "rows") else 8 * STEP[torch.bfloat16 if "w" in name else torch.float32]
            assert (made[name].float() - expected.float()).abs().max().item() <= bound * scale, name


def test_a_compiled_layer_is_that_of_all_to_all() -> None:
    for theirs, made in run_ranks(ranks.compared, 2, 2, torch.bfloat16, True):
        outputs_agree(theirs, made, 2, torch.bfloat16)


def test_rows_may_travel_in_fp8_and_be_padded() -> None:
    for rows, counts, total in run_ranks(ranks.quantised_and_padded, 2):
        assert rows == torch.bfloat16
        assert all(count % 16 == 0 for count in counts)
        assert total >= sum(counts)


def test_ranks_with_other_arguments_are_named() -> None:
    for text in run_ranks(ranks.other_arguments, 2):
        assert "ConfigMismatchError: dispatch_format" in text
        assert "rank 0" in text or "[0]" in text


def test_what_was_not_configured_is_refused() -> None:
    said = run_ranks(ranks.refusals, 2)
    for texts in said:
        assert "x_TD: expected activations of torch.bfloat16" in texts["dtype"]
        assert "spmd_typechecking: expected False" in texts["typechecking"]
        assert "spmd_backend: expected spmd_types or partial_dtensor" in texts["full_dtensor"]
        assert "num_max_tokens_per_rank: expected the most tokens" in texts["bound"]


def test_one_rank_reorders_locally() -> None:
    (same,) = run_ranks(ranks.without_a_mesh, 1)
    assert same


LOSSES: dict[str, list[float]] = {}


def losses(name: str, imports: list, **options) -> list[float]:
    if name not in LOSSES:
        said = run_ranks(ranks.trained, 2, imports, *options.values(), timeout=800)
        (first, replaced, traffic, *_), (second, *_) = said
        assert first == second
        ours = [line for line in replaced if "moelink" in line and ".layers." in line]
        assert len(ours) == (ranks.LAYERS if imports else 0), replaced
        assert len(traffic) == (1 if imports else 0), "layers of one size share one communicator"
        LOSSES[name] = first
    return LOSSES[name]


DEEPEP = {"backend": "deepep"}
TRAININGS = {
    "standard": ([(f"{ranks.OVERRIDES}.routed_experts", {"num_max_tokens_per_rank": BOUND})], {}),
    "deepep": ([DISPATCHER], DEEPEP),
    "selective": (
        [DISPATCHER, f"{ranks.OVERRIDES}.selective_checkpointing"],
        {**DEEPEP, "spmd_backend": "partial_dtensor", "checkpointing": True, "compiler": None, "steps": 3},
    ),
    "compiled": (
        [DISPATCHER],
        {**DEEPEP, "spmd_backend": "partial_dtensor", "checkpointing": False, "compiler": "inductor", "steps": 3},
    ),
}


@pytest.mark.parametrize("training", list(TRAININGS))
def test_training_follows_the_loss_curve_of_all_to_all(training: str) -> None:
    imports, options = TRAININGS[training]
    theirs = losses("all to all", [])
    made = losses(training, imports, **options)
    assert len(theirs) == 10
    assert theirs[-1] < theirs[0] - 0.1, "it learns"
    for step, (expected, got) in enumerate(zip(theirs, made, strict=False)):
        # bf16 activations: the first losses differ by rounding, later ones by what training made of that.
        assert abs(expected - got) <= 2e-3 * (1 + step), (training, step, theirs, made)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_updates_of_biases_are_those_of_all_to_all(checkpointing: bool) -> None:
    rate, steps = 2.0**-6, 3
    options = "standard", "partial_dtensor", checkpointing, None, steps, rate
    imports = [TRAININGS["standard"][0][0], f"{ranks.OVERRIDES}.selective_checkpointing"][: 1 + checkpointing]
    theirs, made = (run_ranks(ranks.trained, 2, used, *options, timeout=800) for used in ([], imports))
    for (expected, *_, biases), (got, _, traffic, *_, ours) in zip(theirs, made, strict=True):
        assert traffic
        assert got == expected, "one expert a token: the same bits"
        assert len(ours) == ranks.LAYERS
        for bias, our in zip(biases, ours, strict=True):
            assert_bitwise_equal(our, bias, "expert_bias_E")
            assert rate / 2 < our.abs().max() <= 2 * steps * rate


def test_the_dispatcher_and_other_overrides_are_siblings() -> None:
    spec = model_registry("debugmodel_moe", moe_comm_backend="deepep")
    for layer in spec.model.layers:
        layer.moe.routed_experts.token_dispatcher.hidden_dim = 256
        layer.moe.routed_experts.token_dispatcher.num_max_tokens_per_rank = 8
    fused = "torchtitan.overrides.fused_swiglu.fused_grouped_experts"
    replaced = apply_overrides(OverrideConfig(imports=[fused, DISPATCHER]), ranks.Root.Config(model_spec=spec))
    assert len(replaced) == 2 * len(spec.model.layers)
    made = spec.model.layers[0].moe.routed_experts
    assert (type(made.inner_experts).__qualname__, type(made.token_dispatcher).__qualname__) == (
        "FusedGroupedExperts.Config",
        "MoelinkTokenDispatcher.Config",
    )
    assert made.token_dispatcher.hidden_dim == 256


def test_a_model_without_sizes_is_refused_before_it_is_built() -> None:
    spec = model_registry("debugmodel_moe")
    with pytest.raises(ConfigError, match="hidden_dim: expected the model's dim"):
        apply_overrides(OverrideConfig(imports=[DISPATCHER]), ranks.Root.Config(model_spec=spec))


def test_checkpointing_keeps_moelinks_operators() -> None:
    root = ranks.Root.Config(activation_checkpoint=SelectiveAC.Config(preserve_rng_state=False))
    apply_overrides(OverrideConfig(imports=[f"{ranks.OVERRIDES}.selective_checkpointing"]), root)
    assert isinstance(root.activation_checkpoint, MoelinkSelectiveAC.Config)
    assert root.activation_checkpoint.preserve_rng_state is False
    saved = root.activation_checkpoint.build().get_save_ops()
    assert {torch.ops.moelink.dispatch.default, torch.ops.moelink.combine.default} <= saved
    assert SelectiveAC.Config().build().get_save_ops() < saved
