"""batch_invariant: bits of a token's result and gradient on any number of ranks, placements and batches; refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import moelink
from moelink.activation import Clamp
from moelink.errors import ConfigError, UnsupportedError
from moelink.nn import GatedMLP, MoE, RouterConfig, grouped_experts, route
from moelink.rows import batch_invariant
from moelink.testing import run_ranks
from tests.nn import batch_invariant_ranks as ranks
from tests.nn.batch_invariant_ranks import PERMUTED, REPLICAS, TOKENS, Case

PLAIN = Case()
CASES = [
    PLAIN,
    Case(torch.bfloat16, "bf16", router="deepseek", shared="fused"),
    Case(torch.bfloat16, "fp8_block128", shared="dense"),
    Case(router="deepseek", shared="dense", options={"expert_alignment": 8, "combine_format": "mxfp8"}),
]
PLACED = [dataclasses.replace(PLAIN, placement=placement) for placement in (PERMUTED, REPLICAS)]
BASE = {"num_experts": 4, "topk": 2, "hidden_size": 16, "max_tokens_per_rank": 4, "batch_invariant": True}


def whole(case: Case, tokens: int = TOKENS, **changes: Any) -> tuple[Tensor, Tensor]:
    """The case on one rank, all tokens in one call."""
    return case.run(slice(0, tokens), tokens, tokens, 1, **changes)


def over_ranks(world: int, cases: list[Case], sizes: list[int], tokens: int = TOKENS, **changes: Any) -> Any:
    """Results and gradients of all tokens in their order, by case and size."""
    answers = run_ranks(ranks.run, world, cases, sizes, tokens, changes, timeout=200)
    return [
        [[torch.cat([answer[c][s][part] for answer in answers]) for part in range(2)] for s in range(len(sizes))]
        for c in range(len(cases))
    ]


@pytest.mark.parametrize(
    ("world", "cases", "tokens"),
    [
        pytest.param(4, [PLACED[0], CASES[1]], 24, id="4-light"),
        pytest.param(2, [PLACED[1], CASES[2]], 24, id="2-light",
                     marks=pytest.mark.quick("with 4 all that differs between formats, routers and placements")),
        *(pytest.param(world, CASES + PLACED, TOKENS, id=str(world)) for world in range(2, 9)),
    ],
)  # fmt: skip
def test_bits_are_those_of_one_rank(world: int, cases: list[Case], tokens: int) -> None:
    for case, sizes in zip(cases, over_ranks(world, cases, [tokens, 7], tokens), strict=True):
        result, grad = whole(dataclasses.replace(case, placement=None), tokens)
        for got, got_grad in sizes:
            assert torch.equal(got, result), case
            if case.placement != REPLICAS:
                assert torch.equal(got_grad, grad), case


@pytest.mark.parametrize("case", CASES, ids=["plain", "fused", "fp8", "rows_in_mxfp8"])
def test_bits_do_not_depend_on_the_batch(case: Case) -> None:
    result, grad = whole(case)
    for size, calls in ((7, 10), (1, 8)):
        got, got_grad = case.run(slice(0, TOKENS), TOKENS, size, calls)
        assert torch.equal(got, result[: len(got)])
        assert torch.equal(got_grad, grad[: len(got)])


def test_the_symmetric_transport_gives_the_same_bits() -> None:
    case = dataclasses.replace(PLAIN, hidden=32)
    ((got, got_grad),) = over_ranks(2, [case], [9], tokens=9, transport="symmetric")[0]
    result, grad = whole(case, 9, transport="collective")
    assert torch.equal(got, result)
    assert torch.equal(got_grad, grad)


def test_without_it_bits_depend_on_ranks_and_batch() -> None:
    """These sizes show it, so the tests above would fail without the setting."""
    result, grad = whole(PLAIN, batch_invariant=False)
    got, got_grad = PLAIN.run(slice(0, TOKENS), TOKENS, 1, TOKENS, batch_invariant=False)
    assert not torch.equal(got, result)
    assert not torch.equal(got_grad, grad)
    sums = dataclasses.replace(CASES[1], shared="")  # bf16, whose products are the same in any batch on some CPUs
    ((got, _),) = over_ranks(2, [sums], [TOKENS], batch_invariant=True, pre_reduce=None)[0]
    assert torch.equal(got, whole(sums)[0])
    ((got, _),) = over_ranks(2, [sums], [TOKENS], batch_invariant=False)[0]
    assert not torch.equal(got, whole(sums, batch_invariant=False)[0])


def test_a_sum_on_the_experts_rank_depends_on_the_ranks() -> None:
    """Of 1, 2**-9 and -1 in bf16, two on one rank: the sum is rounded before the third comes."""
    y = torch.tensor([[1.0], [2.0**-9], [-1.0]]).expand(3, 16).bfloat16()
    sizes = {"num_experts": 3, "topk": 3, "hidden_size": 16, "max_tokens_per_rank": 1}
    results = [
        run_ranks(combine_rows, 2, sizes | {"batch_invariant": fixed}, y)[0][0, 0].item() for fixed in (True, False)
    ]
    with moelink.init(**sizes, batch_invariant=True) as ep:
        recv = ep.dispatch(torch.zeros(1, 16).bfloat16(), torch.arange(3)[None])
        assert ep.combine(y.contiguous(), recv)[0, 0].item() == results[0] == 2.0**-9
    assert results[1] != results[0]


def combine_rows(rank: int, world_size: int, sizes: dict[str, Any], y: Tensor) -> Tensor:
    """Combine row e of ``y`` as the output of expert e, for a token of rank 0."""
    with moelink.init(**sizes) as ep:
        tokens = torch.zeros(1 - rank, 16).bfloat16()
        recv = ep.dispatch(tokens, torch.arange(3).expand(1 - rank, 3).contiguous())
        first = 0 if rank == 0 else 2
        rows = torch.zeros(len(recv.tokens), 16).bfloat16()
        rows[: ep.config.num_local_experts] = y[first : first + ep.config.num_local_experts]
        return ep.combine(rows, recv)


def test_places_in_a_tensor_do_not_change_the_sigmoid_and_its_gradient() -> None:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 5
    leaf = x.clone().requires_grad_()
    all_of_them = batch_invariant.sigmoid(leaf)
    all_of_them.sum().backward()
    alone = torch.cat([batch_invariant.sigmoid(one) for one in x.split(1)])
    assert torch.equal(all_of_them.detach(), alone)
    torch.testing.assert_close(alone, torch.sigmoid(x), rtol=1e-6, atol=1e-38)
    torch.testing.assert_close(leaf.grad, torch.sigmoid(x) * (1 - torch.sigmoid(x)), rtol=1e-5, atol=1e-7)


def test_of_equal_scores_the_lower_id_is_first() -> None:
    config = RouterConfig(batch_invariant=True, num_groups=2, topk_groups=1)
    assert route(torch.zeros(3, 64), config, topk=4).topk_ids.tolist() == [[0, 1, 2, 3]] * 3


def test_products_are_as_exact_as_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, gate_up, down = (torch.randn(*s, generator=generator) for s in ((70, 24), (3, 32, 24), (3, 24, 16)))
    offsets = torch.tensor([0, 33, 33, 70], dtype=torch.int32)
    for activation in (torch.nn.functional.silu, Clamp()):
        leaves = [[t.clone().requires_grad_() for t in (rows, gate_up, down)] for _ in range(2)]
        for tensors, fixed in zip(leaves, (True, False), strict=True):
            grouped_experts(tensors[0], offsets, *tensors[1:], activation=activation, batch_invariant=fixed).sum(
            ).backward()  # fmt: skip
        for got, expected in zip(*leaves, strict=True):
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.full("seconds of compilation, of parts that the tests of compiled layers compile")
def test_compiled_layers_give_the_same_bits_and_leave_the_router_eager() -> None:
    with moelink.init(**BASE) as ep, torch.no_grad():
        layer, x = MoE(ep, intermediate_size=16), torch.randn(4, 16).bfloat16()
        assert torch.equal(torch.compile(layer, backend="aot_eager")(x), layer(x))
        torch.compiler.reset()
        with pytest.raises(Exception, match="batch_invariant: expected a router outside of compiled code"):
            torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    torch.compiler.reset()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick("no time, and each is another refusal")
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"activation": torch.nn.functional.gelu}, UnsupportedError, "batch_invariant: expected experts with a gate"),
        ({"dtype": torch.float64}, UnsupportedError, "at most 32 bits, got .* torch.float64"),
        ({"experts_backend": "torch"}, UnsupportedError, "experts_backend 'torch': expected batch_invariant=False"),
        ({"shared_expert": GatedMLP(16, 8)}, ConfigError, "shared_expert: expected a module with batch_invariant"),
        ({"shared_expert": torch.nn.Identity()}, ConfigError, "shared_expert: .*, got 'Identity'"),
    ],
)
def test_a_layer_refuses_parts_that_cannot_keep_the_promise(options: Any, error: type, text: str) -> None:
    with moelink.init(**BASE) as ep, pytest.raises(error, match=text):
        MoE(ep, **{"intermediate_size": 16, **options})


def test_auto_takes_the_products_that_keep_the_promise() -> None:
    with moelink.init(**BASE | {"hidden_size": 128, "dispatch_format": "fp8_block128"}) as ep:
        assert MoE(ep, intermediate_size=128, experts_backend="auto").experts_backend == "dequantize"


def test_sizes_whose_products_depend_on_a_rows_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a product that adds the number of the row to it."""
    mm = torch.mm

    def by_place(block: Tensor, matrix: Tensor, *, out: Tensor) -> Tensor:
        return mm(block, matrix, out=out).add_(torch.arange(len(block))[:, None])

    monkeypatch.setattr(torch, "mm", by_place)
    with moelink.init(**BASE) as ep, pytest.raises(UnsupportedError, match=r"a weight of \[54, 16\] on cpu"):
        MoE(ep, intermediate_size=27)
    monkeypatch.undo()
    batch_invariant._places_agree.cache_clear()


def test_a_router_refuses_fp64() -> None:
    with moelink.init(**BASE) as ep, pytest.raises(moelink.ArgumentError, match="x: expected bf16, fp16 or fp32"):
        MoE(ep, intermediate_size=16)(torch.zeros(2, 16, dtype=torch.float64))
