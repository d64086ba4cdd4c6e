"""Models of transformers on one rank: what is refused and how, what a checkpoint may look like, other families."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import moelink
from moelink.integrations.transformers import (
    CheckpointError,
    empty_model,
    from_pretrained,
    parallelize,
    register,
)
from moelink.integrations.transformers.checkpoint import Checkpoint
from moelink.integrations.transformers.forms import experts_of, form_of
from moelink.integrations.transformers.loading import Part, fill, only_own
from tests.integrations.transformers.transformers_models import (
    COMMON,
    HIDDEN,
    MAX_TOKENS,
    NUM_EXPERTS,
    build,
    files_by_expert,
    tensors_of,
    tokens,
    write,
)

ONE = {"max_tokens_per_rank": MAX_TOKENS, "device": "cpu"}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "mixtral"
    build("mixtral").save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_model_of_no_experts_at_all() -> None:
    model = LlamaForCausalLM(LlamaConfig(**COMMON, num_hidden_layers=1))
    with pytest.raises(moelink.ArgumentError, match="that use transformers' experts interface.*got LlamaForCausalLM"):
        parallelize(model, **ONE)


def test_a_model_without_experts() -> None:
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON, num_hidden_layers=1, first_k_dense_replace=1))
    with pytest.raises(moelink.ConfigError, match="experts_backend: expected one of"):
        parallelize(model, **ONE, experts_backend="trition")
    with pytest.raises(moelink.ArgumentError, match="model: expected layers with experts"):
        parallelize(model, **ONE)


def test_a_model_parallelised_before() -> None:
    model = build("mixtral")
    with parallelize(model, **ONE), pytest.raises(moelink.ArgumentError, match="not yet parallelised"):
        parallelize(model, **ONE)


def gpt_oss() -> GptOssForCausalLM:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {"num_hidden_layers": 1, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 8}
    return GptOssForCausalLM(GptOssConfig(**COMMON, **sizes, rope_parameters=rope))


def test_experts_with_parameters_that_they_do_not_declare() -> None:
    model = gpt_oss()
    model.model.layers[0].mlp.experts.temperature = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(moelink.UnsupportedError, match=r"GptOssExperts: expected parameters gate_up_proj.*temperature"):
        parallelize(model, **ONE)


def test_experts_whose_gate_is_not_where_they_say() -> None:
    model = gpt_oss()
    model.model.layers[0].mlp.experts.is_concatenated = True
    with pytest.raises(moelink.UnsupportedError, match="expected gate and up one after the other"):
        parallelize(model, **ONE)


def test_a_configuration_that_names_no_topk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral")
    del vars(model.config)["num_experts_per_tok"]
    monkeypatch.delattr(type(model.config), "num_experts_per_tok")
    with pytest.raises(moelink.ArgumentError, match="topk: expected the number of experts of a token"):
        parallelize(model, **ONE)
    with parallelize(model, topk=2, **ONE) as parallel:
        assert parallel.ep.config.topk == 2


def test_another_topk_than_that_of_the_configuration() -> None:
    model = build("mixtral")
    with pytest.raises(moelink.ConfigError, match="^topk: expected None or 2, as the model's configuration .*, got 3"):
        parallelize(model, topk=3, **ONE)
    with parallelize(model, topk=2, **ONE) as parallel:
        assert parallel.ep.config.topk == 2


def test_rows_of_another_width() -> None:
    model = build("mixtral")
    with parallelize(model, **ONE), torch.no_grad():
        experts = model.model.layers[1].mlp.experts
        for more in (-8, 8):
            rows = torch.zeros(2, experts.hidden_dim + more)
            with pytest.raises(
                moelink.ArgumentError, match=rf"hidden_states: expected shape \[T, {experts.hidden_dim}\]"
            ):
                experts(rows, torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))


def test_layers_with_experts_of_two_shapes() -> None:
    model = build("mixtral")
    model.model.layers[1].mlp = build("mixtral", num_local_experts=4).model.layers[1].mlp
    with pytest.raises(moelink.UnsupportedError, match="expected experts of one shape in all layers"):
        parallelize(model, **ONE)


@pytest.mark.quick("one check each")
@pytest.mark.parametrize("call", ["parallelize", "from_pretrained", "register"])
def test_a_release_of_transformers_that_was_not_tested(call: str, mixtral: Path, monkeypatch: Any) -> None:
    """It is refused before anything is built or patched."""
    model = build("mixtral")
    monkeypatch.setattr("moelink.integrations.versions.version", lambda package: "4.57.1")
    calls = {
        "parallelize": lambda: parallelize(model, **ONE),
        "from_pretrained": lambda: from_pretrained(mixtral, **ONE),
        "register": lambda: register(max_tokens_per_rank=1),
    }
    with pytest.raises(moelink.UnsupportedError, match="transformers: expected a release from .* got 4.57.1"):
        calls[call]()


def test_an_empty_model_without_a_checkpoint(mixtral: Path) -> None:
    with pytest.raises(moelink.ArgumentError, match="checkpoint: expected a folder"):
        parallelize(empty_model(mixtral), **ONE)


def test_more_tokens_than_agreed(mixtral: Path) -> None:
    with (
        from_pretrained(mixtral, max_tokens_per_rank=4, device="cpu") as parallel,
        pytest.raises(moelink.ArgumentError, match="at most max_tokens_per_rank = 4 rows"),
    ):
        logits(parallel.model)


def test_a_closed_model(mixtral: Path) -> None:
    with from_pretrained(mixtral, **ONE) as parallel:
        pass
    with pytest.raises(moelink.ClosedError):
        logits(parallel.model)


def test_a_transformers_without_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(moelink.UnsupportedError, match="no registry of expert-parallel implementations"):
        register(max_tokens_per_rank=1)


# --- checkpoints ------------------------------------------------------------------------------------------------------

GATE = "model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.5.w3.weight"


def without(name: str) -> Callable[[Path, Path], None]:
    def make(target: Path, source: Path) -> None:
        tensors = tensors_of(source)
        del tensors[name]
        write(target, source, {"all.safetensors": tensors}, leave_out=set())

    return make


def wrong_shape(target: Path, source: Path) -> None:
    tensors = tensors_of(source)
    tensors[EXPERT] = tensors[EXPERT][:-1].contiguous()
    write(target, source, {"all.safetensors": tensors}, leave_out=set())


def not_where_the_index_says(target: Path, source: Path) -> None:
    files = files_by_expert(source)
    write(target, source, files, leave_out=set())
    del files["expert-5.safetensors"][EXPERT]
    save_file(files["expert-5.safetensors"], target / "expert-5.safetensors", metadata={"format": "pt"})


def cut_short(target: Path, source: Path) -> None:
    write(target, source, files_by_expert(source), leave_out=set())
    file = target / "expert-5.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def no_file(target: Path, source: Path) -> None:
    write(target, source, files_by_expert(source), leave_out={"rest.safetensors"})


def nothing(target: Path, source: Path) -> None:
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())


BROKEN: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a tensor of an expert": (without(EXPERT), f"missing tensor {EXPERT}"),
    "a replicated tensor": (without(GATE), f"missing tensor {GATE}"),
    "wrong shape": (wrong_shape, rf"{EXPERT}: expected shape \[48, 128\], got \[47, 128\]"),
    "a wrong index": (not_where_the_index_says, EXPERT),
    "cut short": (cut_short, "expert-5.safetensors"),
    "a file": (no_file, "missing file rest.safetensors, which should hold tensors"),
    "everything": (nothing, "expected a folder with model.safetensors or model.safetensors.index.json"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_checkpoint_that_lacks(what: str, mixtral: Path, tmp_path: Path) -> None:
    make, message = BROKEN[what]
    make(tmp_path / "broken", mixtral)
    with pytest.raises(CheckpointError, match=message):
        from_pretrained(tmp_path / "broken", **ONE)


def test_a_quantised_checkpoint(mixtral: Path, tmp_path: Path) -> None:
    config = json.loads((mixtral / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(moelink.UnsupportedError, match="quantised"):
        from_pretrained(tmp_path, **ONE)


def test_files_that_hold_a_layers_experts_together(mixtral: Path, tmp_path: Path) -> None:
    """Everything is called as in the model then, as ``save_original_format=False`` writes it."""
    model = AutoModelForCausalLM.from_pretrained(mixtral)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_of(tmp_path))
    with from_pretrained(tmp_path, **ONE) as parallel:
        assert parallel.loaded is not None
        assert not parallel.loaded.ignored
        torch.testing.assert_close(logits(parallel.model), logits(model))


def test_of_experts_together_a_rank_reads_a_slice(mixtral: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(mixtral).save_pretrained(tmp_path, save_original_format=False)
    whole = tensors_of(tmp_path)["model.layers.0.mlp.experts.down_proj"]
    model = empty_model(tmp_path)
    layers = dict(experts_of(model))
    stacked = {name: form_of(module).stacked for name, module in layers.items()}
    own = dict.fromkeys(layers, Part(places=(6, 3, 4, 3), num_experts=NUM_EXPERTS))
    with only_own(layers, stacked, own, stored=None) as parts, Checkpoint(tmp_path) as checkpoint:
        report = fill(model, checkpoint, parts, torch.device("cpu"))
    assert torch.equal(model.model.layers[0].mlp.experts.down_proj, whole[[6, 3, 4, 3]])
    replicated = sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name)
    assert report.nbytes == replicated + 2 * 3 * 3 * 48 * HIDDEN * 4


def test_what_could_not_be_loaded_can_be_loaded_again(mixtral: Path, tmp_path: Path) -> None:
    model = empty_model(mixtral)
    no_file(tmp_path / "broken", mixtral)
    with pytest.raises(CheckpointError):
        parallelize(model, checkpoint=tmp_path / "broken", **ONE)
    with parallelize(model, checkpoint=mixtral, **ONE):
        torch.testing.assert_close(logits(model), logits(build("mixtral")))


def test_tensors_without_a_place_are_named(mixtral: Path, tmp_path: Path) -> None:
    tensors = tensors_of(mixtral) | {"model.layers.2.eh_proj.weight": torch.ones(2)}
    write(tmp_path / "more", mixtral, {"all.safetensors": tensors}, leave_out=set())
    with from_pretrained(tmp_path / "more", **ONE) as parallel:
        assert parallel.loaded is not None
        assert parallel.loaded.ignored == ("model.layers.2.eh_proj.weight",)


def test_the_router_bias_of_deepseek_stays_fp32(tmp_path: Path) -> None:
    build("deepseek_v3").save_pretrained(tmp_path)
    with from_pretrained(tmp_path, dtype=torch.bfloat16, **ONE) as parallel:
        ours = dict(parallel.model.named_buffers())
        theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_buffers())
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert ours[bias].dtype == theirs[bias].dtype == torch.float32
    assert {name: tensor.dtype for name, tensor in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_attention_is_the_callers_choice(mixtral: Path) -> None:
    with from_pretrained(mixtral, attn_implementation="eager", **ONE) as parallel:
        assert parallel.model.config._attn_implementation == "eager"


def test_a_checkpoint_knows_how_to_generate(mixtral: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixtral)
    model.generation_config.eos_token_id = 17
    model.save_pretrained(tmp_path)
    with from_pretrained(tmp_path, **ONE) as parallel:
        assert parallel.model.generation_config.eos_token_id == 17
        assert not parallel.model.training


def test_weights_that_do_not_learn_still_do_not() -> None:
    model = build("mixtral")
    model.requires_grad_(False)
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(True)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    with parallelize(model, **ONE):
        assert {name for name, p in model.named_parameters() if p.requires_grad} == learning
        model(tokens()).logits.sum().backward()
        assert model.model.layers[0].mlp.experts.down_proj.grad is not None
