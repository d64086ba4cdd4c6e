"""MoE layers on ranks against the same layer in one process: results, gradients, weights, checkpoints, options."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moelink
from moelink.nn import GatedMLP, MoE, RouterConfig, load_report, local_state_dict, merge_state_dicts
from moelink.testing import assert_bitwise_equal, run_ranks
from tests.gpu import moe_gpu_ranks
from tests.nn import moe_layers
from tests.nn.moe_layers import (
    EXPERTS,
    INNER,
    MAX_TOKENS,
    TOPK,
    Case,
    close,
    dense,
    first_state,
    judge_rounded,
    judge_training,
    model_of,
)

EXACT = [
    Case(shared=shared, router=router) for shared in ("", "overlapped", "fused") for router in ("softmax", "deepseek")
] + [
    Case("fp32", torch.float32, "overlapped", "deepseek"),
    Case("fp32", torch.float32, "fused"),
    Case(options=(("pre_reduce", False), ("expert_alignment", 4))),
    Case(shared="overlapped", host_counts=True),
]  # fmt: skip

SYMMETRIC = [Case("fp32", torch.float32, "overlapped", options=(("transport", "symmetric"),))]

ROUNDED = [
    Case("bf16", torch.bfloat16, shared)
    for shared in ("overlapped", "fused")
] + [
    Case("fp8_block128", torch.bfloat16, "overlapped", "deepseek"),
    Case("fp8_block128", torch.float32, "fused"),
    Case("mxfp8", torch.bfloat16),
    Case("nvfp4", torch.float32),
    Case("mxfp4", torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_equals_one_process(world: int) -> None:
    results = run_ranks(moe_layers.train, world, EXACT)
    for index, case in enumerate(EXACT):
        judge_training(case, [result[index] for result in results])


def test_training_equals_one_process_on_interpreted_kernels() -> None:
    results = run_ranks(moe_layers.train, 2, SYMMETRIC, timeout=200)
    for index, case in enumerate(SYMMETRIC):
        judge_training(case, [result[index] for result in results])


@pytest.mark.parametrize("world", [1, 4])
def test_rounded_rows_give_what_dequantised_rows_give(world: int) -> None:
    results = run_ranks(moe_layers.train, world, ROUNDED)
    for index, case in enumerate(ROUNDED):
        judge_rounded(case, [result[index] for result in results])


def test_fused_and_overlapped_shared_experts_are_the_same_layer() -> None:
    x, _ = Case().inputs(0)
    outs = []
    for shared in ("overlapped", "fused"):
        case = Case(shared=shared)
        with moelink.init(**case.fields) as ep:
            outs.append(case.make(ep)(x).detach())
    torch.testing.assert_close(outs[0], outs[1])


@pytest.mark.quick("each is another order")
@pytest.mark.parametrize("where", ["collective", "within a node", "between nodes"])
def test_the_shared_expert_runs_beside_dispatch_or_after_it(where: str) -> None:
    case, order = Case(), []

    class Noting(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            order.append("shared")
            return x

    with moelink.init(**case.fields) as ep, pytest.MonkeyPatch.context() as patch, torch.no_grad():
        layer = case.make(ep, shared_expert=Noting())
        start, whole = ep.dispatch_async, ep.dispatch
        if where != "collective":
            patch.setattr(type(ep._session.transport), "name", "symmetric")
        if where == "between nodes":
            object.__setattr__(ep.config, "ranks_per_node", 1)

        def noting(*args: Any, **options: Any) -> Any:
            order.append("start")
            pending = start(*args, **options)
            wait = pending.wait
            pending.wait = lambda: (order.append("wait"), wait())[1]
            return pending

        patch.setattr(ep, "dispatch_async", noting)
        patch.setattr(ep, "dispatch", lambda *args, **options: (order.append("dispatch"), whole(*args, **options))[1])
        layer(case.inputs(0)[0])
        said = repr(layer)
    after = where == "within a node"
    assert order == (["dispatch", "shared"] if after else ["start", "shared", "wait"])
    assert f"shared_expert {'after' if after else 'beside'} dispatch" in said


# --- fewer tokens than rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", ["", "overlapped", "fused"])
def test_rows_past_num_tokens_are_no_tokens(shared: str) -> None:
    case = Case("fp32", torch.float32, shared)
    with moelink.init(**case.fields) as ep:
        layer = case.make(ep)
        x = torch.randn(MAX_TOKENS, case.hidden)
        for count in (0, 1, 5, MAX_TOKENS):
            poisoned = x.clone()
            poisoned[count:] = float("nan")
            poisoned.requires_grad_()
            layer.zero_grad()
            layer.load.reset()
            got = layer(poisoned, num_tokens=torch.tensor(count))
            got.sum().backward()
            grads = [poisoned.grad[:count], *(parameter.grad.clone() for parameter in layer.parameters())]
            assert sum(layer.stats().tokens_per_expert) == count * TOPK
            real = x[:count].clone().requires_grad_()
            layer.zero_grad()
            want = layer(real)
            want.sum().backward()
            torch.testing.assert_close(got[:count], want)
            assert not got[count:].any()
            for a, b in zip(grads, [real.grad, *(p.grad for p in layer.parameters())], strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("case", moe_gpu_ranks.CAPTURED[-2:], ids=lambda case: case.id)
def test_the_ranks_of_the_graph_tests_with_calls_in_place_of_replays(case: Case) -> None:
    moe_gpu_ranks.judge_replays(run_ranks(moe_gpu_ranks.replay, 2, case, "cpu"))


def test_leading_dimensions_and_strides() -> None:
    case = Case()
    with moelink.init(**case.fields) as ep:
        layer = case.make(ep)
        x = torch.randn(2, 4, case.hidden, dtype=torch.float64)
        want = layer(x.view(8, case.hidden)).view(2, 4, -1)
        assert torch.equal(layer(x), want)
        padded = torch.cat([x, x], dim=-1)[..., : case.hidden]
        assert torch.equal(layer(padded), want)


# --- compilers --------------------------------------------------------------------------------------------------------


def step(layer: Any, run: Any, x: Tensor, count: Tensor | None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = run(x) if count is None else run(x, num_tokens=count)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


@pytest.mark.parametrize(
    "case",
    [
        Case("bf16", torch.bfloat16, "overlapped"),
        Case("fp32", torch.float32, "fused", "deepseek"),
        Case("fp8_block128", torch.bfloat16, "overlapped", "deepseek"),
    ],
    ids=lambda case: case.id,
)
def test_the_layer_compiles_without_a_graph_break(case: Case) -> None:
    torch._dynamo.reset()
    with moelink.init(**case.fields) as ep:
        layer = case.make(ep)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for tokens, count in ((8, None), (5, None), (8, torch.tensor(3))):
            x = torch.randn(tokens, case.hidden, dtype=case.combine_dtype)
            want = step(layer, layer, x, count)
            counted = layer.stats()
            layer.load.reset()
            for a, b in zip(step(layer, compiled, x, count), want, strict=True):
                assert_bitwise_equal(a, b)
            assert layer.stats() == counted
            layer.load.reset()


def test_activation_checkpointing_gives_the_same_gradients_and_counts_once() -> None:
    case = Case(shared="overlapped")
    with moelink.init(**case.fields) as ep:
        layer = case.make(ep)
        x = case.inputs(0)[0]
        want = step(layer, layer, x, None)
        counted = layer.stats().tokens_per_expert
        got = step(layer, lambda x: checkpoint(layer, x, use_reentrant=False), x, None)
        for a, b in zip(got, want, strict=True):
            assert_bitwise_equal(a, b)
        assert layer.stats().tokens_per_expert == tuple(2 * count for count in counted)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def load_full(rank: int, world_size: int, case: Case, saved: bytes) -> tuple[Tensor, dict[str, Tensor]]:
    """Load a rank's part of a full checkpoint into a layer that was made without weights."""
    with moelink.init(**case.fields, timeout=60) as ep:
        model = torch.nn.Sequential(torch.nn.Identity(), case.make(ep, seed=77))
        full = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(local_state_dict(model, full))
        with torch.no_grad():
            return model(case.inputs(rank)[0]), model.state_dict()


@pytest.mark.parametrize("shared", ["overlapped", "fused"])
def test_a_full_checkpoint_is_loaded_and_made_again(shared: str) -> None:
    case = Case(shared=shared, router="deepseek")
    full = {f"1.{name}": value for name, value in first_state(case).items()}
    file = io.BytesIO()
    torch.save(full, file)
    results = run_ranks(load_full, 4, case, file.getvalue())
    model = torch.nn.Sequential(torch.nn.Identity(), model_of(case))
    again = merge_state_dicts(model, [part for _, part in results])
    assert again.keys() == full.keys()
    for name, value in full.items():
        assert_bitwise_equal(again[name], value, name)
    state = {name.removeprefix("1."): value for name, value in full.items()}
    want = dense(case, torch.cat([case.inputs(rank)[0] for rank in range(4)]), state)
    close(torch.cat([out for out, _ in results]), want, torch.float64, "out")


def test_what_is_wrong_with_a_checkpoint_is_named() -> None:
    case = Case()
    model, full = model_of(case), first_state(case)
    with pytest.raises(moelink.ArgumentError, match=r"full: expected an entry 'experts.down_proj'"):
        local_state_dict(model, {name: value for name, value in full.items() if name != "experts.down_proj"})
    with pytest.raises(moelink.ArgumentError, match=r"full\['experts.gate_up_proj'\]: expected shape \[6, 48, 16\]"):
        local_state_dict(model, {**full, "experts.gate_up_proj": full["experts.gate_up_proj"][1:]})
    with pytest.raises(moelink.ArgumentError, match="6 experts in all, got 12 in 2 parts"):
        merge_state_dicts(model, [full, full])
    with pytest.raises(moelink.ArgumentError, match="^parts: expected the state_dicts of all ranks.*, got none"):
        merge_state_dicts(model, [])


def test_a_layer_without_memory_gets_its_weights_assigned() -> None:
    case = Case()
    with moelink.init(**case.fields) as ep:
        layer = case.make(ep, device="meta")
        assert all(parameter.is_meta for parameter in layer.parameters())
        layer.load_state_dict(local_state_dict(layer, first_state(case)), assign=True)
        x, _ = case.inputs(0)
        assert torch.equal(layer(x), case.make(ep)(x))
        layer.to_empty(device="cpu")
        layer.load.reset()
        layer.reset_parameters()
        assert torch.equal(layer(x), case.make(ep)(x))


# --- construction -----------------------------------------------------------------------------------------------------


def test_a_layer_closes_what_it_made_and_nothing_else() -> None:
    case = Case()
    owner = MoE(case.fields, intermediate_size=INNER)
    owner.close()
    with pytest.raises(moelink.ClosedError):
        owner(case.inputs(0)[0])
    with moelink.init(**case.fields) as ep:
        layer, other = case.make(ep), case.make(ep)
        layer.close()
        assert torch.equal(other(case.inputs(0)[0]), layer(case.inputs(0)[0]))


def test_what_cannot_be_is_named() -> None:
    fields = Case().fields
    shared = GatedMLP(16, INNER)
    wrong: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("layout", {"layout": "rank"}, {}),
        ("intermediate_size", {}, {"intermediate_size": 0}),
        ("num_groups", {}, {"router": RouterConfig(num_groups=4)}),
        ("shared_expert", {"fused_shared_expert": True}, {"shared_expert": shared}),
        ("shared_expert", {"mode": "allreduce"}, {"shared_expert": shared}),
        *(("load_steps", {}, {"load_steps": steps}) for steps in (-1, "x", False, True, 0.0, 1.5)),
        ("router", {}, {"router": "softmax"}),
        ("aux_loss", {}, {"aux_loss": 0.1}),
        ("placement", {}, {"placement": (0, 1, 2, 3)}),
        ("activation", {}, {"activation": "silu"}),
        ("topk", {"topk": 0}, {}),
    ]
    for name, changes, options in wrong:
        with pytest.raises(moelink.ConfigError, match=f"^{name}: expected"):
            MoE({**fields, **changes}, **{"intermediate_size": INNER, **options})
    with pytest.raises(moelink.ConfigError, match="^communicator: expected"):
        MoE("ep", intermediate_size=INNER)  # type: ignore[arg-type]
    with moelink.init(**fields) as ep, pytest.raises(moelink.ArgumentError, match=r"^x: expected shape \[..., 16\]"):
        Case().make(ep)(torch.zeros(3, 8))


def too_few(rank: int, world_size: int) -> str:
    try:
        MoE({**Case().fields, "num_experts": 1, "topk": 1}, intermediate_size=INNER)
    except moelink.ConfigError as error:
        return str(error)
    return "no error"


def test_fewer_experts_than_ranks_are_refused() -> None:
    for said in run_ranks(too_few, 2):
        assert said == "num_experts: expected at least one for each of 2 ranks, got 1"


def replicated(rank: int, world_size: int, case: Case) -> Tensor:
    with moelink.init(**case.fields, timeout=60) as ep:
        out = case.make(ep)(case.inputs(0)[0]).detach()
    torch.distributed.all_reduce(out)
    return out


@pytest.mark.parametrize("shared", ["", "fused"])
def test_replicated_tokens_give_parts_of_the_sum(shared: str) -> None:
    case = Case(shared=shared, options=(("mode", "allreduce"),))
    want = dense(case, case.inputs(0)[0], first_state(case))
    for out in run_ranks(replicated, 3, case):
        close(out, want, torch.float64, "out")


def test_a_layer_that_counts_nothing() -> None:
    case = Case()
    with moelink.init(**case.fields) as ep:
        layer = case.make(ep, load_steps=0)
        assert torch.equal(layer(case.inputs(0)[0]), case.make(ep)(case.inputs(0)[0]))
        with pytest.raises(moelink.StateError, match="load_steps=0"):
            layer.stats()
        assert load_report(torch.nn.ModuleList([layer, case.make(ep)]))["layers"][0]["name"] == "1"


def test_repr_says_what_is_where() -> None:
    text = repr(model_of(Case(shared="fused")))
    assert f"16, 24, experts 0 to 5 of {EXPERTS}, shared expert in group 0" in text
    assert "topk=3, RouterConfig(scoring='softmax'" in text


@pytest.mark.parametrize("count", [torch.tensor([1, 1]), torch.tensor(2.5), torch.tensor(True)], ids=str)
def test_a_count_of_tokens_is_one_integer(count: Any) -> None:
    """Lengths of sequences were compared with rows, and tokens left out."""
    with moelink.init(**Case().fields) as ep:
        layer = Case().make(ep)
        with pytest.raises(moelink.ArgumentError, match="^num_tokens: expected a tensor of one integer, got"):
            layer(torch.ones(2, 16, dtype=ep.config.combine_dtype), num_tokens=count)


def test_too_many_tokens_are_named_as_rows_of_x() -> None:
    """Also where the layer itself gives the bound that it knows of one rank."""
    with moelink.init(**Case().fields) as ep:
        layer, most = Case().make(ep), ep.config.max_tokens_per_rank
        with pytest.raises(moelink.ArgumentError, match=f"^x: expected at most max_tokens_per_rank = {most} rows"):
            layer(torch.ones(most + 1, 16, dtype=ep.config.combine_dtype))
