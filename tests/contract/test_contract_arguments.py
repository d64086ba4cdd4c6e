"""What the launchers of the contract refuse, before anything is launched."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from moelink import contract
from moelink.contract import EPRouting, combine_kernel
from moelink.contract import buffers as making
from moelink.contract.notes import Given, Noted
from moelink.epilogues import cast
from moelink.errors import ArgumentError, ConfigError
from moelink.hooks import Hook
from moelink.memory import create_all
from moelink.memory.protocol import COMBINE_SENT
from tests.contract.contract_ranks import Buffers, combine_all, dispatch_all, params_of, ranks_of, run, setup
from tests.support.cases import Case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")

CASE = Case(setup("bf16"), "uniform", weights="none")


def one_rank(case: Case = CASE, **changes) -> SimpleNamespace:
    """A rank alone, its tensors, and the arguments of its fused launchers. It waits for nobody, so not long either."""
    (ep,) = ranks_of(params_of(case.setup, 1, **{"timeout": 20, **changes}))
    own, data = Buffers.allocate(ep, weighted=case.weights == "dispatch"), case.data(0)
    dispatch = {
        "token_handler": own.handler,
        "row_offsets": own.row_offsets,
        "expert_ids": own.expert_ids,
        "src_info": own.src_info,
        "atomic_counters": ep.atomic_counters[0],
        "input_tokens": data.x,
        "topk_ids": data.topk_ids,
        "pointers": ep.pointers[0],
        "routing": own.routing,
    }
    combine = {
        "output_tokens": torch.empty(len(data.x), ep.params.hidden_size, dtype=ep.params.combine_dtype),
        "atomic_counters": ep.atomic_counters[1],
        "input_tokens": case.expert_rows(0, len(own.src_info)),
        "routing": own.routing,
        "pointers": ep.pointers[1],
        "topk_ids": data.topk_ids,
    }
    return SimpleNamespace(ep=ep, own=own, data=data, dispatch=dispatch, combine=combine)


def test_pointers_of_the_other_group_or_of_other_buffers_are_refused() -> None:
    one, other = one_rank(), one_rank()
    contract.ep_fused_dispatch(one.ep, **{**one.dispatch, "pointers": one.ep.pointers[contract.DISPATCH]})
    before = one.ep.memory.local.clone()
    for wrong in (one.ep.pointers[1], other.ep.pointers[0], one.ep.pointers[0].clone()):
        got = "ep.pointers[1], of combine" if wrong.data_ptr() == one.ep.pointers[1].data_ptr() else "a copy, or"
        expected = re.escape(f"pointers: expected ep.pointers[0], the table of dispatch, got {got}")
        with pytest.raises(ArgumentError, match=expected):
            contract.ep_fused_dispatch(one.ep, **{**one.dispatch, "pointers": wrong})
    for launch in (contract.ep_fused_combine, contract.ep_combine_wait):
        with pytest.raises(ArgumentError, match=re.escape("got ep.pointers[0], of dispatch")):
            launch(one.ep, **{**one.combine, "pointers": one.ep.pointers[0]})
    assert torch.equal(one.ep.memory.local, before)


def test_more_sms_than_the_device_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When buffers are made, and when a phase is launched with other facts. On a CPU there is no such number."""
    monkeypatch.setattr(combine_kernel, "sm_count", lambda device: 132)
    cuda = torch.device("cuda", 1)
    assert [combine_kernel.limit_sms(n, cuda) for n in (None, 1, 132)] == [132, 1, 132]
    with pytest.raises(ConfigError, match="^n_sms: expected at most 132, the SMs of cuda:1, got 133"):
        combine_kernel.limit_sms(133, cuda)
    assert one_rank().ep.n_sms == 2
    one, limit = one_rank(), combine_kernel.limit_sms
    monkeypatch.setattr(making, "limit_sms", lambda n_sms, device: limit(n_sms, cuda))
    with pytest.raises(ConfigError, match="^n_sms: expected at most 132"):
        ranks_of(params_of(CASE.setup, 1, n_sms=133))
    kernel = dataclasses.replace(one.ep.combine_kernel, n_sms=133)
    monkeypatch.setattr(combine_kernel, "limit_sms", lambda n_sms, device: limit(n_sms, cuda))
    ends = (one.own.routing, one.ep.pointers[1], one.ep.atomic_counters[1])
    with pytest.raises(ConfigError, match="^n_sms: expected at most 132"):
        kernel.send_tokens_back(one.ep, one.combine["input_tokens"], *ends)


FLAGS = [
    *[(name, value) for name in ("fused_shared_expert", "skip_a2a", "pre_reduce") for value in (None, 0, 1, "no")],
    *[("use_shmem", value) for value in (0, 1, "no")],
]


@pytest.mark.parametrize("name, value", FLAGS)
@pytest.mark.quick("each flag is checked by itself")
def test_flags_that_are_no_flags_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected True"):
        dataclasses.replace(params_of(CASE.setup, 2), **{name: value})


def test_sizes_are_refused_under_the_names_of_the_contract() -> None:
    good = params_of(CASE.setup, 2)
    with pytest.raises(ConfigError, match="^max_token_per_rank: expected sizes with at most") as told:
        dataclasses.replace(good, max_token_per_rank=1 << 30)
    assert told.value.field == "max_token_per_rank"


def test_puts_that_nothing_would_travel_by_are_refused() -> None:
    good = params_of(CASE.setup, 2)
    with pytest.raises(ConfigError, match="use_shmem: expected None or False with n_nodes=1"):
        dataclasses.replace(good, use_shmem=True)
    with pytest.raises(ConfigError, match="use_shmem: expected None or False with skip_a2a"):
        dataclasses.replace(good, skip_a2a=True, allreduce_world_size=2, use_shmem=True)
    for value in (None, False):
        assert dataclasses.replace(good, use_shmem=value).n_ranks == 2
    assert dataclasses.replace(good, n_nodes=2, use_shmem=True).n_ranks == 4


REPLICATED = Case(setup("bf16", mode="allreduce", fused_shared_expert=True), "uniform", weights="combine")


def test_allreduce_takes_the_experts_of_the_model_or_of_one_rank() -> None:
    case = dataclasses.replace(REPLICATED, setup=dataclasses.replace(REPLICATED.setup, num_experts=6))
    model, one = params_of(case.setup, 3), params_of(case.setup, 3, n_gpus_per_node=1, n_experts=2)
    assert (one.num_experts, one.n_ranks, one.n_experts) == (6, 3, 2)
    assert one.config(1) == model.config(1)
    eps = ranks_of(one)
    assert [ep.first_expert for ep in eps] == [0, 2, 4]
    assert [ep.combine_kernel.n_local_experts for ep in eps] == [2, 2, 2]
    run(eps, case)  # global ids; every row is on its rank


def test_allreduce_refuses_ranks_that_do_not_fit() -> None:
    good = params_of(REPLICATED.setup, 4)
    for changes in ({"allreduce_world_size": 1}, {"n_gpus_per_node": 2}, {"n_nodes": 2}):
        with pytest.raises(ConfigError, match="allreduce_world_size: expected n_gpus_per_node .* those of one rank"):
            dataclasses.replace(good, **changes)
    assert dataclasses.replace(good, n_gpus_per_node=2, n_nodes=2).n_ranks == 4


def test_what_every_rank_would_add_is_refused_where_nothing_travels() -> None:
    """A bias, a residual or shared rows would be in every rank's partial result, and the later all-reduce adds all."""
    one = one_rank(dataclasses.replace(REPLICATED, setup=setup("bf16", mode="allreduce")))
    contract.ep_fused_dispatch(one.ep, **one.dispatch)
    x = one.data.x
    for launch in (contract.ep_fused_combine, contract.ep_combine_wait):
        for name, value in (("epilogue_fn", x[0]), ("epilogue_fn", x), ("shared", x)):
            with pytest.raises(ArgumentError, match=f"^{name}: expected None .*skip_a2a"):
                launch(one.ep, **one.combine, **{name: value})
    out = torch.full_like(x, 7.0)
    contract.ep_fused_combine(one.ep, **one.combine, epilogue_fn=cast(out))  # a Hook stores what the caller says
    contract.ep_fused_combine(one.ep, **one.combine)
    assert torch.equal(out, one.combine["output_tokens"])


def test_a_block_of_ones_own_needs_its_rank() -> None:
    params = params_of(REPLICATED.setup, 3)
    (alone,) = create_all(["cpu"], params.nbytes)
    with pytest.raises(
        ArgumentError, match=re.escape("my_rank: expected this process's rank in [0, 3), got None, and")
    ):
        contract.ep_init(params, alone)
    for wrong in (-1, 3, True, 1.0):
        with pytest.raises(ArgumentError, match=re.escape("my_rank: expected an integer in [0, 3)")):
            contract.ep_init(params, alone, my_rank=wrong)
    assert [contract.ep_init(params, alone, my_rank=rank).first_expert for rank in range(3)] == [0, 3, 5]
    second = create_all(["cpu"] * 3, params.nbytes)[1]
    assert contract.ep_init(params, second).my_rank == 1
    with pytest.raises(ArgumentError, match="memory: expected rank 2's view of 3 blocks, got rank 1's of 3"):
        contract.ep_init(params, second, my_rank=2)
    single = params_of(REPLICATED.setup, 1)
    assert contract.ep_init(single, alone).my_rank == 0


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Room for ``tensor`` that begins ``by`` bytes past a multiple of 16."""
    room = torch.zeros(tensor.nbytes + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + by
    return room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def test_outputs_begin_at_a_multiple_of_16_bytes() -> None:
    case = Case(setup("nvfp4", pre_reduce=True), "uniform", weights="dispatch")
    one = one_rank(case)
    right = {**one.dispatch, "router_weights": one.data.topk_weights}
    before = one.ep.memory.local.clone()
    for name in ("row_offsets", "expert_ids", "src_info"):
        with pytest.raises(ArgumentError, match=f"{name}: expected memory that begins at a multiple of 16 bytes"):
            contract.ep_fused_dispatch(one.ep, **{**right, name: shifted(right[name], 4)})
    for name in ("output_tokens", "output_scales", "scales_offsets", "weights"):
        part = getattr(one.own.handler, name)
        moved = dataclasses.replace(one.own.handler, **{name: shifted(part, 4)})
        with pytest.raises(ArgumentError, match=f"{name}: .* got an address 4 bytes past a multiple"):
            contract.ep_fused_dispatch(one.ep, **{**right, "token_handler": moved})
    assert torch.equal(one.ep.memory.local, before)
    handler = dataclasses.replace(one.own.handler, output_tokens=shifted(one.own.handler.output_tokens, 16))
    contract.ep_fused_dispatch(one.ep, **{**right, "token_handler": handler})


SHARED = Case(setup("bf16", fused_shared_expert=True), "uniform", weights="none")


def start_dispatch(one: SimpleNamespace, tokens: int, **options) -> None:
    """The first half of a dispatch of the rank's first so many tokens."""
    x, ids = one.data.x[:tokens], one.data.topk_ids[:tokens]
    contract.ep_dispatch_async(
        one.ep, one.ep.atomic_counters[0], x, ids, one.ep.pointers[0], one.own.routing, **options
    )


def finish_dispatch(one: SimpleNamespace, tokens: int, **changes) -> None:
    """The second half, with ``changes``."""
    names = ("token_handler", "row_offsets", "expert_ids", "src_info", "pointers", "atomic_counters", "routing")
    outputs = {name: one.dispatch[name] for name in names}
    contract.ep_dispatch_wait(one.ep, **{**outputs, **changes}, num_input_tokens=tokens)


def test_the_second_half_of_a_dispatch_takes_as_many_tokens_as_the_first() -> None:
    one = one_rank(SHARED)
    with pytest.raises(ArgumentError, match="routing: expected the one that ep_dispatch_async was given"):
        finish_dispatch(one, 3)
    start_dispatch(one, 3)
    for wrong in (2, 4, 0):
        with pytest.raises(ArgumentError, match=f"num_input_tokens: expected 3 tokens, as .* was given, got {wrong}"):
            finish_dispatch(one, wrong)
    for wrong in (True, 3.0, -1, None):
        with pytest.raises(ArgumentError, match="num_input_tokens: expected an integer in"):
            finish_dispatch(one, wrong)
    with pytest.raises(ArgumentError, match="routing: expected the one"):
        finish_dispatch(one, 3, routing=contract.EPRouting.allocate(one.ep))
    again = contract.EPRouting(
        **{f.name: getattr(one.own.routing, f.name) for f in dataclasses.fields(one.own.routing)}
    )
    finish_dispatch(one, 3, routing=again)  # another object around the same tensors
    one.ep.raise_error()
    assert one.own.row_offsets[1] == 3


def test_combine_takes_as_many_tokens_as_its_dispatch() -> None:
    one, other = one_rank(), one_rank()
    with pytest.raises(ArgumentError, match="routing: expected one that a dispatch of these buffers has filled"):
        contract.ep_fused_combine(one.ep, **one.combine)
    count = len(one.data.x)
    for buffers in (one, other):
        contract.ep_fused_dispatch(buffers.ep, **buffers.dispatch)
    for wrong in (count - 1, count + 1, 0):
        ids = torch.zeros(wrong, one.ep.params.top_k, dtype=torch.int32)
        output = torch.empty(wrong, one.ep.params.hidden_size, dtype=torch.bfloat16)
        changes = {"topk_ids": ids, "output_tokens": output}
        for launch in (contract.ep_fused_combine, contract.ep_combine_wait):
            with pytest.raises(ArgumentError, match=f"topk_ids: expected {count} tokens, as .* was given, got {wrong}"):
                launch(one.ep, **{**one.combine, **changes})
    assert not one.ep.atomic_counters[0][COMBINE_SENT]
    copied = EPRouting(**{f.name: getattr(other.own.routing, f.name).clone() for f in dataclasses.fields(EPRouting)})
    for wrong in (other.own.routing, copied):
        with pytest.raises(ArgumentError, match="a dispatch of these buffers has filled"):
            contract.ep_fused_combine(one.ep, **{**one.combine, "routing": wrong})
    outs = [torch.empty_like(one.combine["output_tokens"]) for _ in range(2)]
    for routing, out in zip((one.own.routing, one.own.routing.clone(one.ep)), outs, strict=True):
        contract.ep_fused_combine(one.ep, **{**one.combine, "routing": routing, "output_tokens": out})
    one.ep.raise_error()
    assert torch.equal(*outs)


def test_what_a_graph_captured_stays_right() -> None:
    noted = Noted()
    noted.add(Given(8, weighted=True), captured=True)
    noted.add(Given(3, weighted=False), captured=False)
    noted.add(Given(4, weighted=False), captured=False)
    noted.add(Given(5, weighted=False), captured=True)
    assert noted.given() == {(8, True), (4, False), (5, False)}


def test_weights_given_to_one_half_only_are_refused_there() -> None:
    one = one_rank(Case(setup("bf16", pre_reduce=True), "uniform", weights="dispatch"))
    count, weights = len(one.data.x), one.data.topk_weights
    bare = dataclasses.replace(one.own.handler, weights=None)
    start_dispatch(one, count, router_weights=weights)
    with pytest.raises(ArgumentError, match="token_handler.weights: expected a tensor, as router_weights of"):
        finish_dispatch(one, count, token_handler=bare)
    finish_dispatch(one, count)
    start_dispatch(one, count)
    with pytest.raises(ArgumentError, match="token_handler.weights: expected None without router_weights of"):
        finish_dispatch(one, count)
    finish_dispatch(one, count, token_handler=bare)
    for first, expected in ((True, "those of ep_combine_async"), (False, "None, as in ep_combine_async")):
        given = {True: one.own.handler.weights, False: None}
        sent = {name: one.combine[name] for name in ("atomic_counters", "input_tokens", "routing", "pointers")}
        contract.ep_combine_async(one.ep, **sent, row_weights=given[first])
        with pytest.raises(ArgumentError, match=f"row_weights: expected {expected}"):
            contract.ep_combine_wait(one.ep, **one.combine, row_weights=given[not first])
        contract.ep_combine_wait(one.ep, **one.combine, row_weights=given[first])
    one.ep.raise_error()


def test_a_bad_argument_on_one_device_leaves_all_of_them_usable() -> None:
    case = Case(setup("bf16", pre_reduce=True), "uniform", weights="dispatch")
    eps = ranks_of(params_of(case.setup, 2, timeout=20))
    good = [Buffers.allocate(ep, weighted=True) for ep in eps]
    bare = dataclasses.replace(good[1], handler=dataclasses.replace(good[1].handler, weights=None))
    late = dataclasses.replace(good[1], src_info=good[1].src_info.long())
    for bad, name in ((bare, "token_handler.weights"), (late, "src_info")):
        with pytest.raises(ArgumentError, match=name):
            dispatch_all(eps, [good[0], bad], case)
        assert not any(ep.memory.local.any() for ep in eps)
    dispatch_all(eps, good, case)
    before = [ep.memory.local.clone() for ep in eps]
    swapped = dataclasses.replace(good[1], handler=dataclasses.replace(good[1].handler, weights=torch.ones(1)))
    with pytest.raises(ArgumentError, match="row_weights"):
        combine_all(eps, [good[0], swapped], case)
    assert all(torch.equal(ep.memory.local, was) for ep, was in zip(eps, before, strict=True))
    run(eps, dataclasses.replace(case, seed=1))


def test_every_rank_is_there_once() -> None:
    eps = ranks_of(params_of(CASE.setup, 3, timeout=20))
    buffers = [Buffers.allocate(ep) for ep in eps]
    other = ranks_of(params_of(CASE.setup, 3, timeout=21))
    refused = (
        ((0, 1, 1), "ep: expected each rank once, got rank 1 2 times; pass what each rank's own"),
        ((0, 1), "ep: expected all 3 ranks, because each waits for the others, got 2, without rank 2; with a process"),
        ((2,), "got 1, without rank 0, 1;"),
        ((), "ep: expected a list of what ep_init returned, one per device, got list"),
    )
    for launch in (dispatch_all, combine_all):
        for which, expected in refused:
            with pytest.raises(ArgumentError, match=re.escape(expected)):
                launch_on(launch, [eps[i] for i in which], [buffers[i] for i in which])
        with pytest.raises(ArgumentError, match="ep: expected buffers of equal EPParams, got different ones"):
            launch_on(launch, [*eps[:2], other[2]], buffers)
        assert not any(ep.memory.local.any() for ep in eps)
    with pytest.raises(ArgumentError, match="ep: expected a list of what ep_init returned"):
        contract.distributed_ep_dispatch(eps[0], *[None] * 9)
    run(eps, CASE)


def test_ranks_over_blocks_of_their_own_are_refused() -> None:
    """Each would wait for rows that its peers store elsewhere."""
    params = params_of(CASE.setup, 3, timeout=20)
    eps, others = ranks_of(params), ranks_of(params)
    mixed = [eps[0], others[1], eps[2]]
    allocated = [Buffers.allocate(ep) for ep in mixed]
    for launch in (dispatch_all, combine_all):
        with pytest.raises(ArgumentError, match="^ep: expected ranks over the same blocks, got rank 1 over other"):
            launch_on(launch, mixed, allocated)
    assert not any(ep.memory.local.any() for ep in (*eps, *others))
    run(eps, CASE)


def launch_on(launch, eps, buffers) -> None:
    """``launch`` on some ranks; where there are none, the launchers get as few arguments."""
    if eps:
        launch(eps, buffers, CASE)
    elif launch is dispatch_all:
        contract.distributed_ep_dispatch([], *[[]] * 9)
    else:
        contract.distributed_ep_combine([], *[[]] * 6)


def test_a_part_of_the_ranks_will_do_where_nothing_travels() -> None:
    eps = ranks_of(params_of(REPLICATED.setup, 3))
    own, data = Buffers.allocate(eps[1]), REPLICATED.data(1)
    arguments = (own.handler, own.row_offsets, own.expert_ids, own.src_info, eps[1].atomic_counters[0], data.x,
                 data.topk_ids, eps[1].pointers[0], own.routing)  # fmt: skip
    contract.distributed_ep_dispatch([eps[1]], *[[each] for each in arguments])
    eps[1].check()
    assert int(own.row_offsets[1]) == 1
    with pytest.raises(ArgumentError, match="each rank once"):
        contract.distributed_ep_dispatch([eps[1]] * 2, *[[each] * 2 for each in arguments])


def test_hooks_are_refused_or_checked() -> None:
    one = one_rank(Case(setup("nvfp4"), "uniform", weights="none"))
    hook = Hook(None, lambda tensors: torch.ones(1))
    for name in ("input_scales", "router_weights"):
        with pytest.raises(ArgumentError, match=f"{name}: expected .* got Hook"):
            contract.ep_fused_dispatch(one.ep, **one.dispatch, **{name: hook})
    contract.ep_fused_dispatch(one.ep, **one.dispatch)
    with pytest.raises(ArgumentError, match="router_weights: expected .* got Hook"):
        contract.ep_fused_combine(one.ep, **one.combine, router_weights=hook)
    short = cast(torch.zeros(len(one.data.x) - 1, one.ep.params.hidden_size))
    with pytest.raises(ArgumentError, match=f"at least {len(one.data.x)} rows"):
        contract.ep_fused_combine(one.ep, **one.combine, epilogue_fn=short)
    with pytest.raises(ArgumentError, match="epilogue_fn: expected a tensor or a Hook, got function"):
        contract.ep_fused_combine(one.ep, **one.combine, epilogue_fn=one_rank)
    assert not one.ep.atomic_counters[0][COMBINE_SENT]


SIZES = [  # ranks, experts, top_k
    (8, 8, 8), (8, 256, 8), (3, 7, 4), (2, 4, 1),
]  # fmt: skip


@pytest.mark.parametrize("ranks, experts, top_k", SIZES)
@pytest.mark.quick("each has another bound")
def test_rows_at_worst_of_distinct_ids(ranks: int, experts: int, top_k: int) -> None:
    params = contract.EPParams(
        dispatch_fmt_str="BF16", hidden_size=8, top_k=top_k, n_experts=experts, max_token_per_rank=5,
        n_gpus_per_node=ranks,
    )  # fmt: skip
    # Every token names rank 0's experts first.
    most = sum(min(top_k, params.config(0).num_local_experts) for _ in range(5 * ranks))
    assert params.max_recv_tokens == most
    if experts % ranks == 0:
        assert most == 5 * min(experts, ranks * top_k)
    replicated = dataclasses.replace(params, skip_a2a=True, allreduce_world_size=ranks)
    assert replicated.max_recv_tokens == most // ranks
    shared = dataclasses.replace(params, fused_shared_expert=True, expert_alignment=4)
    assert shared.max_recv_tokens == most + 5 + 3 * shared.config(0).num_groups


def test_the_bound_holds_all_rows() -> None:
    case = Case(setup("bf16"), "one_expert", weights="none")
    params = params_of(case.setup, 3)
    eps = ranks_of(params)
    ids = [torch.arange(3, dtype=torch.int32).repeat(params.max_token_per_rank, 1) for _ in eps]  # all of rank 0
    buffers = [Buffers.allocate(ep, rows=params.max_recv_tokens) for ep in eps]
    contract.distributed_ep_dispatch(
        eps,
        *[[getattr(b, name) for b in buffers] for name in ("handler", "row_offsets", "expert_ids", "src_info")],
        [ep.atomic_counters[0] for ep in eps],
        [torch.ones(len(each), params.hidden_size, dtype=torch.bfloat16) for each in ids],
        ids,
        [ep.pointers[0] for ep in eps],
        [b.routing for b in buffers],
    )
    for ep in eps:
        ep.check()
    assert int(buffers[0].row_offsets[-1]) == params.max_recv_tokens
