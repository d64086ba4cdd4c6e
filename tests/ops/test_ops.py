"""The operators: what torch's own checks say, compiled layers, the order of calls, and when they are bypassed."""

from __future__ import annotations

import gc
import json
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import moelink
from moelink import ops
from moelink.ops import autograd, library, record
from moelink.ops.context import REGISTRY
from moelink.output import DispatchOutput
from moelink.testing import assert_bitwise_equal, run_ranks
from tests.ops.op_layers import HIDDEN, IDS, E, H, K, T, noting, one_rank
from tests.support.cases import Case, Setup
from tests.support.commands import run_python
from tests.support.paths import ROOT
from tests.support.seen import Seen

# --- what torch's own checks say --------------------------------------------------------------------------------------

SETUPS = [
    *({"dispatch_format": name, "hidden_size": hidden} for name, hidden in HIDDEN.items()),
    {"pre_reduce": False},
    {"layout": "rank"},
    {"fused_shared_expert": True},
    {"mode": "allreduce"},
    {"capacity": 3},
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_opcheck(setup: dict[str, Any]) -> None:
    fmt = setup.get("dispatch_format", "bf16")
    # fp8_block128 pads groups to 4 rows; a capacity that is filled leaves nothing undefined to compare.
    exact = {"capacity": 4 * E} if fmt == "fp8_block128" else {}
    dtype = torch.float64 if fmt == "fp64" else torch.bfloat16
    with one_rank(**setup, **exact, combine_dtype=dtype) as ep:
        hidden, name, order = ep.config.hidden_size, ep._context.name, ep._context.order
        x = torch.randn(T, hidden, dtype=dtype)
        weights = torch.rand(T, K, dtype=ep.config.weight_dtype)
        # torch sums every output to make gradients, which 8-bit floats cannot.
        learning = ep.config.format.payload_dtype.itemsize > 1

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(learning)

        recv = ep.dispatch(x, IDS, weights)
        rows = torch.randn(len(recv.tokens), hidden, dtype=dtype)
        saved = ep._context.record(recv)
        late = not ep.config.pre_reduce
        row_weights = None if recv.weights is None or late else leaf(recv.weights)
        own = leaf(weights) if late else None
        refused = ep.config.fused_shared_expert or ep.config.mode == "allreduce"
        shared = None if refused else leaf(x)
        bias = None if ep.config.mode == "allreduce" else leaf(x[0])
        by_slot = torch.rand(len(rows), K, dtype=weights.dtype)
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (library.dispatch, (leaf(x), IDS, leaf(weights), None, None, [], False)),
            (library.dispatch, (leaf(x), IDS, None, None, None, saved, False)),
            (library.dispatch, (leaf(x), IDS, None, None, None, [], True)),
            (library.combine, (leaf(rows), row_weights, own, shared, None, None, IDS, None, saved, True)),
            (library.combine, (leaf(rows), None, None, None, bias, None, IDS, None, saved, True)),
            (library.dispatch_backward, (rows, by_slot, IDS, saved)),
            (library.dispatch_backward, (None, by_slot, IDS, saved)),
            (library.dispatch_backward, (rows, None, IDS, saved)),
            (library.combine_backward, (x, weights, IDS, saved)),
            (library.combine_backward, (x, None, IDS, saved)),
        ]
        # Tiles of scales are partly undefined; what cannot be compared is not compared.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        if recv.scales_offsets is None:
            checks += ("test_aot_dispatch_dynamic",)
        for op, args in calls:
            given, named = ((*args, name), {}) if op is not library.combine else (args[:-1], {})
            if op is library.combine:
                named = {"reduce": args[-1], "communicator": name}
            torch.library.opcheck(op, (order, *given), named, test_utils=checks)


# --- when operators are bypassed, and what passes between both worlds -------------------------------------------------


@pytest.fixture
def operator_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    for name in ("dispatch", "combine"):
        monkeypatch.setattr(autograd, name, noting(made, name, getattr(autograd, name)))
    return made


def test_what_nothing_differentiates_bypasses_the_operators(operator_calls: list[str]) -> None:
    with one_rank() as ep:
        x, y = torch.randn(T, H).bfloat16(), torch.nn.Parameter(torch.randn(2 * T, H).bfloat16())
        recv = ep.dispatch(x, IDS)
        ep.combine(y.detach(), recv)
        with torch.no_grad():
            ep.combine(y, recv)
        with torch.inference_mode():
            ep.combine(y, recv)
        assert operator_calls == []
        ep.combine(y, recv)
        assert operator_calls == ["combine"]
        ep.dispatch(x.requires_grad_(), IDS)
        assert operator_calls[1:] == ["dispatch"]


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_an_eager_gradient_is_that_of_the_operators_without_torchs_dispatcher(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mode of the dispatcher sees every operator, of the backward too. Without one, none is called."""
    with one_rank(layout=layout, dispatch_format="fp32", combine_dtype=torch.float32) as ep:
        x, weights = torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True)

        def gradients() -> list[Tensor]:
            recv = ep.dispatch(x, IDS, weights)
            out = ep.combine(2 * recv.tokens, recv)
            return [out, *torch.autograd.grad(out.square().sum(), [x, weights] if layout == "expert" else [x])]

        with Seen() as seen:
            want = gradients()
        phases = ("dispatch", "combine", "combine_backward", "dispatch_backward")
        assert {f"moelink.{phase}.default" for phase in phases} <= set(seen.names)

        def refuse(*given: Any, **options: Any) -> None:
            raise AssertionError("an operator was called")

        for name in phases:
            monkeypatch.setattr(type(getattr(library, name)), "__call__", refuse)
        got = gradients()
        monkeypatch.undo()
        for one, other in zip(got, want, strict=True):
            assert_bitwise_equal(one, other)


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_outputs_of_operators_serve_direct_calls_and_the_other_way_round(transport: str, layout: str) -> None:
    with one_rank(transport=transport, layout=layout, dispatch_format="fp32", combine_dtype=torch.float32) as ep:
        x = torch.randn(T, H)
        weights = torch.rand(T, K)
        direct = ep.dispatch(x, IDS, weights)
        traced = ops.call(ep._context, moelink.transports.base.DispatchRequest(x, IDS, weights))
        for name in direct.__dataclass_fields__.keys() - {"handle"}:
            assert_bitwise_equal(getattr(traced, name), getattr(direct, name), name)
        assert_bitwise_equal(traced.handle.counts, direct.handle.counts)
        want = ep.combine(direct.tokens, direct)
        assert_bitwise_equal(ep.combine(traced.tokens, traced), want)
        learning = direct.tokens.clone().requires_grad_()
        assert_bitwise_equal(ep.combine(learning, direct).detach(), want)
        assert_bitwise_equal(ep.dispatch(x, None, routing=traced).tokens, direct.tokens)
        again = ep.dispatch(x.requires_grad_(), None, weights, routing=traced)
        assert_bitwise_equal(ep.combine(again.tokens, again).detach(), want)


def plans(rank: int, world_size: int, cases: list[Case]) -> bool:
    for case in cases:
        with moelink.init(**case.setup.fields, timeout=60, transport="collective") as ep:
            data = case.data(rank)
            plan = ep.dispatch(data.x, data.topk_ids, data.topk_weights).handle.routing
            packed = record.pack(plan, ep.config)
            sizes = record.allocate(
                ep.config, transport="collective", num_tokens=len(data.x), device=torch.device("cpu")
            )
            assert [t.shape for t in packed] == [t.shape for t in sizes]
            assert_equal_plans(record.unpack(packed, ep.config, transport="collective"), plan)
    return True


def assert_equal_plans(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    for name, value in vars(want).items():
        other = getattr(got, name)
        if isinstance(value, Tensor):
            assert_bitwise_equal(other, value, name)
        elif hasattr(value, "__dataclass_fields__"):
            assert_equal_plans(other, value)
        else:
            assert other == value, name


def test_a_plan_survives_as_tensors() -> None:
    options: list[dict[str, Any]] = [
        *({}, {"layout": "rank"}, {"fused_shared_expert": True}, {"mode": "allreduce", "fused_shared_expert": True}),
    ]
    cases = [
        Case(Setup("bf16", tuple(chosen.items())), scenario)
        for chosen in options
        for scenario in ("uniform", "one_rank_empty", "all_empty", "repeats")
    ]
    assert run_ranks(plans, 2, cases) == [True] * 2


def test_dequantised_rows_are_what_was_sent() -> None:
    torch.manual_seed(1)
    for layout in ("expert", "rank"):
        for name, hidden in HIDDEN.items():
            with one_rank(dispatch_format=name, hidden_size=hidden, layout=layout, combine_dtype=torch.float32) as ep:
                x = torch.randn(T, hidden, dtype=torch.float64 if name == "fp64" else torch.float32)
                scale = torch.tensor([0.5]) if name == "nvfp4" else None
                recv = ep.dispatch(x, IDS, input_scale=scale)
                fmt = ep.config.format
                rows = fmt.quantize(x, scale)
                want = fmt.dequantize(rows.payload, rows.scales, scale).float()
                got = ops.dequantize(ep, recv, input_scale=scale)
                source = recv.src_info[: int(recv.row_offsets[-1])]
                there = source[:, 0] >= 0
                assert_bitwise_equal(got[: len(source)][there], want[source[there, 1].long()], f"{name} {layout}")


def test_the_registry_holds_nothing_alive() -> None:
    ep = one_rank()
    context = ep._context
    name, order = context.name, context.order
    with one_rank() as other:
        assert other._context.name != name
        assert other._context.order is order
    assert re.fullmatch(r"\d+:[0-9a-f]{8}", name)
    assert REGISTRY.find(name, "dispatch") is context
    ep.close()
    del ep, context, other
    gc.collect()
    with pytest.raises(moelink.ClosedError, match="dispatch: the communicator is closed"):
        library.dispatch(order, torch.ones(1, H), IDS[:1], None, None, None, [], False, name)


def test_an_output_of_another_communicator_is_refused_as_that() -> None:
    """Before anything is made of its plan, which has the other one's sizes."""
    with one_rank() as a, one_rank(max_tokens_per_rank=2 * T, layout="rank") as b:
        x, weights = torch.randn(T, H, requires_grad=True), torch.rand(T, K)
        recv = a.dispatch(x.bfloat16(), IDS, weights)
        for other in (b, a):
            call = pytest.raises(moelink.ForeignHandleError) if other is b else nullcontext()
            with call:
                other.dispatch(x.bfloat16(), None, weights, routing=recv)
            with call, torch.no_grad():
                other.dispatch(x.bfloat16(), None, weights, routing=recv)


def test_names_tell_configurations_apart_and_repeat() -> None:
    with one_rank() as a, one_rank(capacity=5) as b, one_rank() as c:
        digests = [ep._context.name.split(":")[1] for ep in (a, b, c)]
    assert digests[0] == digests[2] != digests[1]


def test_every_field_of_an_output_passes_through_the_operator() -> None:
    assert {*ops.context.FIELDS, "expert_ids", "handle", "host_counts"} == DispatchOutput.__dataclass_fields__.keys()


def test_the_guide_says_what_was_measured() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "ops_overhead_cpu.json").read_text())
    us = {name: times["median"] for name, times in document["rows"][0]["us"].items()}
    assert document["gate"] == "passed"
    assert us["choice"] < (us["operator"] - us["direct"]) / 10  # or there would be no reason to bypass the operators
    done = run_python("-m", "moelink_bench.render", "--check")
    assert done.returncode == 0, done.stderr
