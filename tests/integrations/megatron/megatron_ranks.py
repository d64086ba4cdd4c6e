"""What ranks of tests/integrations/megatron/test_megatron.py do. They need Megatron-core, and run on CPUs over gloo."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.integrations.megatron import megatron_cpu  # noqa: F401 - for its effect, before anything of Megatron is imported

# isort: split

from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from moelink.errors import MoelinkError
from moelink.integrations.megatron import COMMUNICATORS, Settings, close
from moelink.integrations.megatron.layer import MoelinkTokenDispatcher
from moelink.integrations.megatron.spec import with_moelink

EXPERTS, HIDDEN, SEQUENCE, BATCH = 8, 64, 6, 4
TOKENS = SEQUENCE * BATCH
BIASED = {
    "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 0.125,
}  # fmt: skip
LATER = ("moe_router_padding_for_quantization", "moe_permute_fusion")
"""Options that Megatron accepts with an fp8 recipe or TransformerEngine only, which CPUs have not."""


class LatentLinear(torch.nn.Linear):
    """Stands for TransformerEngine's linear layer, of which Megatron makes the projections of ``moe_latent_size``."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **options) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


moe_layer.HAVE_TE, moe_layer.TELinear = True, LatentLinear


def begin(world_size: int, **sizes: int) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**{"expert_model_parallel_size": world_size, **sizes})


def end() -> None:
    close()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def config(world_size: int, **options) -> TransformerConfig:
    usual = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_moe_experts": EXPERTS,
        "moe_router_topk": 2, "expert_model_parallel_size": world_size, "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_router_dtype": "fp32",
        "use_cpu_initialization": True, "add_bias_linear": False, "gated_linear_unit": True, "activation_func": F.silu,
        "ffn_hidden_size": 32, "moe_ffn_hidden_size": 32, "moe_grouped_gemm": False, "bias_activation_fusion": False,
    }  # fmt: skip
    later = {name: options.pop(name) for name in LATER if name in options}
    made = TransformerConfig(**{**usual, **options})
    for name, value in later.items():
        setattr(made, name, value)
    return made


def settings(**given) -> Settings:
    return Settings(**{"max_tokens_per_rank": TOKENS, "device": "cpu", **given})


def moe_spec() -> ModuleSpec:
    return get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp


def built(spec: ModuleSpec, options: TransformerConfig, dtype: torch.dtype) -> MoELayer:
    torch.manual_seed(1)
    layer = build_module(spec, options)
    layer.set_layer_number(0)
    return layer.to(dtype)


def one_step(layer: MoELayer, rank: int, dtype: torch.dtype, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Forward and backward of a layer: everything that came of it, by name."""
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(dtype).requires_grad_()
    heard = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(dtype)
    out, bias = layer(x, **given)
    assert bias is None
    (out * heard).sum().backward()
    parts = {"out": out.detach(), "x.grad": x.grad, "router.grad": layer.router.weight.grad}
    for part in ("experts", "shared_experts", "fc1_latent_proj", "fc2_latent_proj"):
        module = getattr(layer, part, None)
        if module is not None:
            flat = [p.grad if p.grad is not None else torch.zeros_like(p) for p in module.parameters()]
            parts[f"{part}.grad"] = torch.cat([gradient.flatten() for gradient in flat])
    return parts


def compared(rank: int, world_size: int, cases: list):
    """For each case (dispatcher of Megatron's, dtype, its options, settings of moelink): see :func:`one_case`."""
    begin(world_size)
    made = [one_case(rank, world_size, *case) for case in cases]
    end()
    return made


def one_case(rank: int, world_size: int, theirs: str, dtype: torch.dtype, options: dict, given: dict):
    """(what Megatron's dispatcher made, what moelink's made, both again, keys of checkpoints, who dispatched)."""
    types = {torch.bfloat16: {"bf16": True}, torch.float32: {}}[dtype]
    made = config(world_size, moe_token_dispatcher_type=theirs, params_dtype=dtype, **types, **options)
    unfused = copy.copy(made)
    unfused.moe_permute_fusion = False  # which gives Megatron's dispatchers the same rows, by other kernels
    reference = built(moe_spec(), unfused, dtype)
    ours = built(with_moelink(moe_spec(), settings(**given)), made, dtype)
    names = list(reference.state_dict()), list(ours.state_dict())
    assert ours.moe_layer_recompute == ("recompute_modules" in options)
    ours.load_state_dict(reference.state_dict())
    results = one_step(reference, rank, dtype), one_step(ours, rank, dtype)
    used = type(reference.token_dispatcher).__name__, type(ours.token_dispatcher).__name__
    repeated = one_step(reference, rank, dtype), one_step(ours, rank, dtype)  # gradients add up
    return *results, *repeated, names, used


def balanced(rank: int, world_size: int, cases: list) -> list:
    """For each case (options of Megatron's router, whether tokens are padding): what came of two micro-batches and an
    update of biases with Megatron's dispatcher, with moelink's, and with moelink's without the options; by name."""
    torch._dynamo.config.disable = True  # Megatron compiles the count of tokens, for GPUs
    begin(world_size)
    found = []
    for options, padded in cases:
        used = config(world_size, moe_token_dispatcher_type="alltoall", **options)
        unused = config(world_size, moe_router_score_function=used.moe_router_score_function)
        specs = (
            (moe_spec(), used),
            (with_moelink(moe_spec(), settings()), used),
            (with_moelink(moe_spec(), settings()), unused),
        )
        layers = [(built(spec, made, torch.float32), made) for spec, made in specs]
        for layer, _ in layers[1:]:
            layer.load_state_dict(layers[0][0].state_dict(), strict=False)
        found.append([balanced_step(layer, made, rank, padded) for layer, made in layers])
    end()
    return found


def balanced_step(layer: MoELayer, made: TransformerConfig, rank: int, padded: bool) -> dict[str, torch.Tensor]:
    clear_aux_losses_tracker()
    parts: dict[str, torch.Tensor] = {}
    mask = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool)
    mask[rank, 2:] = padded
    for number in range(2):
        parts |= one_step(layer, 10 * number + rank, torch.float32, **({"padding_mask": mask} if padded else {}))
    parts |= {name: entry["values"].clone() for name, entry in get_moe_layer_wise_logging_tracker().items()}
    if layer.router.expert_bias is not None:
        parts["counted"] = layer.router.local_tokens_per_expert.clone()
        _update_router_expert_bias([layer], made)
        parts["expert_bias"] = layer.router.expert_bias
    return parts


def bias_of_padded_tokens(rank: int, world_size: int) -> str:
    begin(world_size)
    options = config(world_size, **BIASED)
    layer = built(with_moelink(moe_spec(), settings()), options, torch.float32)
    mask = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool)
    x = torch.zeros(SEQUENCE, BATCH, HIDDEN)
    said = said_by(lambda: layer(x, padding_mask=mask))
    with torch.no_grad():
        layer(x, padding_mask=mask)  # counts nothing
    end()
    return said


def dropless(rank: int, world_size: int) -> bool:
    """Whether every token comes back as it was, with as many equal weights as it has experts, and so its gradient."""
    begin(world_size)
    layer = built(with_moelink(moe_spec(), settings()), config(world_size), torch.float32)
    used: MoelinkTokenDispatcher = layer.token_dispatcher
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
    probs, routing_map = layer.router(hidden)
    probs = torch.ones_like(probs) * routing_map / 2
    rows, weights = used.token_dispatch(*used.dispatch_preprocess(hidden, routing_map, probs))
    rows, counts, weights = used.dispatch_postprocess(rows, weights)
    assert counts.device.type == "cpu"
    assert counts.sum() == rows.shape[0] == weights.shape[0]
    out = used.combine_postprocess(used.token_combine(used.combine_preprocess(rows * weights[:, None])))
    out.backward(hidden.detach())
    same = torch.equal(out, hidden) and torch.equal(hidden.grad, hidden)
    end()
    return same


def shared_by_layers(rank: int, world_size: int) -> tuple[int, int]:
    """Communicators of three layers of which two are alike, and of none after they were closed."""
    begin(world_size)
    options = config(world_size)
    for given in ({}, {}, {"capacity": 100}):
        built(with_moelink(moe_spec(), settings(**given)), options, torch.float32)
    counts = [sum(len(eps) for eps in COMMUNICATORS._open.values())]
    close()
    counts.append(len(COMMUNICATORS._open))
    end()
    return tuple(counts)


def recomputed_block(rank: int, world_size: int) -> dict[str, list[torch.Tensor]]:
    """Output and gradients of a block of two layers whose MoE layers dispatch with moelink, by name: with nothing
    recomputed, and with ``recompute_granularity="full"``, where backward runs whole layers again."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.transformer_block import TransformerBlock

    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    begin(world_size)
    get_cuda_rng_tracker().set_states({"model-parallel-rng": None})  # which attention asks for, without dropout too
    found, state = {}, None
    for name, recomputed in (("kept", {}), ("full", full)):
        options = config(world_size, num_layers=2, hidden_dropout=0.0, attention_dropout=0.0, **recomputed)
        spec = with_moelink(get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False), settings())
        torch.manual_seed(1)
        block = TransformerBlock(options, spec, post_process=False).train()
        state = block.state_dict() if state is None else state
        block.load_state_dict(state)
        generator = torch.Generator().manual_seed(10 + rank)
        x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).requires_grad_()
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        dispatches = count_dispatches(block)
        out = block(x, mask)
        (out * out.detach().flip(0)).sum().backward()
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in block.parameters()]
        found[name] = [out.detach(), x.grad, *gradients, torch.tensor(len(dispatches))]
    end()
    return found


def count_dispatches(block) -> list[int]:
    """A list that grows by one with each dispatch of the block's MoE layers."""
    made: list[int] = []
    for layer in block.layers:
        used: MoelinkTokenDispatcher = layer.mlp.token_dispatcher
        dispatch = used.token_dispatch
        used.token_dispatch = lambda *args, dispatch=dispatch: (made.append(1), dispatch(*args))[1]
    return made


def said_by(fn) -> str:
    try:
        fn()
    except (MoelinkError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def other_options(rank: int, world_size: int) -> dict[str, str]:
    """What a rank is told when it has an option of Megatron's, or of moelink's, that rank 0 has not."""
    begin(world_size)
    factor = {"moe_expert_capacity_factor": 1.0 + rank}
    said = {}
    for name, options, given in (("theirs", factor, {}), ("ours", {}, {"pre_reduce": rank == 0})):
        spec, made = with_moelink(moe_spec(), settings(**given)), config(world_size, **options)
        said[name] = said_by(lambda spec=spec, made=made: built(spec, made, torch.float32))
    end()
    return said


def expert_tensor_parallel(rank: int, world_size: int) -> str:
    begin(1, tensor_model_parallel_size=world_size, expert_tensor_parallel_size=world_size)
    model_parallel = {"tensor_model_parallel_size": world_size, "expert_tensor_parallel_size": world_size}
    options = config(1, sequence_parallel=True, **model_parallel)
    said = said_by(lambda: built(with_moelink(moe_spec(), settings()), options, torch.float32))
    end()
    return said


def whole_block(rank: int, world_size: int) -> list[str]:
    """Classes of the MoE layers of a block whose spec was changed, built by Megatron, and of the spec it came from."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_block import TransformerBlock

    begin(world_size)
    options = config(world_size, num_layers=2, moe_layer_freq=[0, 1], bf16=False)
    spec = get_gpt_decoder_block_spec(options, use_transformer_engine=False)
    changed = with_moelink(spec, settings())
    block = TransformerBlock(options, changed, post_process=False)
    found = [type(layer.mlp).__name__ for layer in block.layers]
    found += [layer.submodules.mlp.module.__name__ for layer in spec.layer_specs]
    end()
    return found
