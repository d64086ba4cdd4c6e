"""The launchers of the contract over buffers and pointers of the caller, its layouts, launch facts and names."""

import ctypes
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import moelink
from cases import FIELDS, Case, Packed, Result, Setup, check_case
from contract_names import PAGES
from moelink.errors import ArgumentError, ConfigError, PeerTimeoutError, UnsupportedError
from moelink.hooks import Hook
from moelink.memory import SingleProcessMemory, create_all
from moelink.testing import assert_bitwise_equal

contract = pytest.importorskip("moelink.kernels.contract", reason="kernels need Triton")

DOCS = Path(__file__).parent.parent / "docs" / "contract.md"
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")


def params_of(setup: Setup, world_size: int, **changes):
    """A setup's fields by the contract's names."""
    fields = setup.fields
    replicated = fields.get("mode") == "allreduce"
    names = {
        "dispatch_fmt_str": fields["dispatch_format"],
        "hidden_size": fields["hidden_size"],
        "top_k": fields["topk"],
        "n_experts": fields["num_experts"],
        "max_token_per_rank": fields["max_tokens_per_rank"],
        "n_gpus_per_node": 1 if replicated else world_size,
        "combine_dtype": fields["combine_dtype"],
        "fused_shared_expert": fields.get("fused_shared_expert", False),
        "skip_a2a": replicated,
        "allreduce_world_size": world_size if replicated else 1,
        "pre_reduce": fields.get("pre_reduce", True),
        "expert_alignment": fields.get("expert_alignment", 1),
    }
    return contract.EPParams(**{**names, **changes})


def ranks_of(params) -> list:
    memories = create_all(["cpu"] * params.n_ranks, params.nbytes)
    return [contract.ep_init(params, memory) for memory in memories]


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Everything that the caller of one rank owns."""

    handler: object
    row_offsets: torch.Tensor
    expert_ids: torch.Tensor
    src_info: torch.Tensor
    routing: object

    @classmethod
    def allocate(cls, ep, *, rows: int | None = None, weighted: bool = False) -> "Buffers":
        handler = contract.TokenHandler.allocate(ep, rows=rows, weighted=weighted)
        count, groups = len(handler.output_tokens), ep.config.num_groups
        made = cls(
            handler,
            torch.empty(groups + 1, dtype=torch.int32),
            torch.empty(groups, dtype=torch.int32),
            torch.empty(count, 3, dtype=torch.int32),
            contract.EPRouting.allocate(ep),
        )
        owned = (handler.output_tokens, handler.output_scales, handler.scales_offsets, handler.weights)
        for tensor in (*owned, made.row_offsets, made.expert_ids, made.src_info):
            if tensor is not None and tensor.numel():
                tensor.view(torch.uint8).fill_(0xAA)
        return made

    def fields(self) -> dict[str, Packed | None]:
        handler, routing = self.handler, self.routing
        values = {
            "tokens": handler.output_tokens,
            "scales": handler.output_scales,
            "row_offsets": self.row_offsets,
            "expert_ids": self.expert_ids,
            "src_info": self.src_info,
            "scales_offsets": handler.scales_offsets,
            "weights": handler.weights,
            "num_recv_tokens": routing.num_recv_tokens,
            "overflow": routing.overflow,
        }
        return {name: Packed.of(values.get(name)) for name in FIELDS}


def dispatch_all(eps: Sequence, buffers: Sequence[Buffers], case: Case) -> None:
    """One dispatch of a case on all ranks."""
    datas = [case.data(rank) for rank in range(len(eps))]
    contract.distributed_ep_dispatch(
        eps,
        [b.handler for b in buffers],
        [b.row_offsets for b in buffers],
        [b.expert_ids for b in buffers],
        [b.src_info for b in buffers],
        [ep.atomic_counters[contract.DISPATCH] for ep in eps],
        [d.x for d in datas],
        [d.topk_ids for d in datas],
        [ep.pointers[contract.DISPATCH] for ep in eps],
        [b.routing for b in buffers],
        router_weights=[d.topk_weights for d in datas] if case.weights == "dispatch" else None,
    )


def combine_all(eps: Sequence, buffers: Sequence[Buffers], case: Case) -> list[torch.Tensor]:
    """One combine of a case on all ranks."""
    datas = [case.data(rank) for rank in range(len(eps))]
    params = eps[0].params
    outs = []
    for d in datas:
        shape = (len(d.x), params.hidden_size) if case.reduce else (len(d.x), params.top_k, params.hidden_size)
        outs.append(torch.full(shape, float("nan"), dtype=params.combine_dtype))
    travelled = case.weights == "dispatch"
    contract.distributed_ep_combine(
        eps,
        outs,
        [ep.atomic_counters[contract.COMBINE] for ep in eps],
        [case.expert_rows(rank, len(b.src_info)) for rank, b in enumerate(buffers)],
        [b.routing for b in buffers],
        [ep.pointers[contract.COMBINE] for ep in eps],
        [d.topk_ids for d in datas],
        router_weights=[d.topk_weights for d in datas] if case.weights == "combine" else None,
        row_weights=[b.handler.weights for b in buffers] if travelled else None,
        shared=[case.shared_rows(rank) for rank in range(len(eps))] if case.shared else None,
    )
    for ep in eps:
        ep.raise_error()
    return outs


def run(eps: Sequence, case: Case) -> None:
    """A case through the launchers, against the oracle."""
    buffers = [Buffers.allocate(ep, weighted=case.weights == "dispatch") for ep in eps]
    dispatch_all(eps, buffers, case)
    outs = combine_all(eps, buffers, case)
    results = [Result(b.fields(), Packed.of(out)) for b, out in zip(buffers, outs, strict=True)]
    check_case(case, len(eps), results)


def setup(fmt: str = "bf16", **options) -> Setup:
    return Setup(fmt, tuple({"pre_reduce": False, **options}.items()))


CASES = [
    *[Case(setup(fmt), "skewed", weights="combine") for fmt in ("bf16", "fp8_block128", "nvfp4", "mxfp4", "fp32")],
    Case(setup("mxfp8"), "holes", weights="combine"),
    Case(setup("bf16"), "repeats", weights="combine"),
    Case(setup("bf16"), "one_rank_empty", weights="combine"),
    Case(setup("fp8_block128"), "all_empty", weights="combine"),
    Case(setup("bf16"), "holes", weights="none", reduce=False),
    Case(setup("bf16"), "uniform", weights="combine", shared=True),
    Case(setup("fp8_block128", pre_reduce=True), "holes", weights="dispatch"),
    Case(setup("nvfp4", pre_reduce=True, fused_shared_expert=True), "uniform", weights="dispatch"),
    Case(setup("bf16", fused_shared_expert=True, expert_alignment=4), "one_expert", weights="combine"),
    Case(setup("bf16", mode="allreduce", fused_shared_expert=True), "uniform", weights="combine"),
    Case(setup("mxfp8", mode="allreduce", pre_reduce=True), "repeats", weights="dispatch"),
]


@CPU_ONLY
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_split_launchers_equal_the_oracle(case: Case) -> None:
    eps = ranks_of(params_of(case.setup, 3))
    for seed in range(2):  # the second call meets what the first left behind
        run(eps, dataclasses.replace(case, seed=seed))


@CPU_ONLY
@pytest.mark.parametrize("fmt", ("bf16", "fp8_block128", "nvfp4"))
def test_fused_launchers_equal_the_oracle(fmt: str) -> None:
    case = Case(setup(fmt), "uniform", weights="combine")
    eps = ranks_of(params_of(case.setup, 1))
    for seed in range(3):
        run(eps, dataclasses.replace(case, seed=seed))


@CPU_ONLY
def test_a_dispatch_may_be_combined_after_a_later_one_and_twice() -> None:
    case = Case(setup("bf16"), "skewed", weights="combine")
    later = dataclasses.replace(case, seed=5)
    eps = ranks_of(params_of(case.setup, 2))
    first, second = ([Buffers.allocate(ep) for ep in eps] for _ in range(2))
    dispatch_all(eps, first, case)
    dispatch_all(eps, second, later)
    outs = [combine_all(eps, buffers, each) for buffers, each in ((second, later), (first, case), (first, case))]
    for buffers, each, out in zip((second, first, first), (later, case, case), outs, strict=True):
        results = [Result(b.fields(), Packed.of(o)) for b, o in zip(buffers, out, strict=True)]
        check_case(each, len(eps), results)


@CPU_ONLY
def test_rows_of_the_caller_are_the_capacity() -> None:
    case = Case(setup("bf16", capacity=9), "skewed", weights="combine")
    eps = ranks_of(params_of(case.setup, 2))
    buffers = [Buffers.allocate(ep, rows=9) for ep in eps]
    dispatch_all(eps, buffers, case)
    outs = combine_all(eps, buffers, case)
    check_case(case, 2, [Result(b.fields(), Packed.of(out)) for b, out in zip(buffers, outs, strict=True)])


@CPU_ONLY
def test_only_the_first_input_scale_counts() -> None:
    params = params_of(setup("nvfp4"), 1)
    (ep,) = ranks_of(params)
    data = Case(setup("nvfp4"), "uniform").data(0)
    buffers = Buffers.allocate(ep)
    contract.ep_fused_dispatch(
        ep,
        buffers.handler,
        buffers.row_offsets,
        buffers.expert_ids,
        buffers.src_info,
        ep.atomic_counters[0],
        data.x,
        data.topk_ids,
        ep.pointers[0],
        buffers.routing,
        input_scales=torch.tensor([3.0, 77.0]),
    )
    config = dataclasses.replace(ep.config, rank=0)
    (want,) = moelink.reference.reference_dispatch(config, [data.x], [data.topk_ids], input_scales=[torch.tensor(3.0)])
    n = want.num_rows
    assert_bitwise_equal(buffers.handler.output_tokens[:n], want.tokens[:n])


@CPU_ONLY
def test_an_epilogue_adds_before_the_rounding_or_stores_itself() -> None:
    case = Case(setup("fp32", combine_dtype=torch.float32), "uniform", weights="combine")
    (ep,) = ranks_of(params_of(case.setup, 1))
    data, (buffers,) = case.data(0), [Buffers.allocate(ep)]
    dispatch_all([ep], [buffers], case)
    y = case.expert_rows(0, len(buffers.src_info))
    outs = []
    for epilogue in (None, torch.ones(ep.params.hidden_size), torch.full((len(data.x), ep.params.hidden_size), 2.0)):
        outs.append(torch.empty(len(data.x), ep.params.hidden_size))
        contract.ep_fused_combine(
            ep, outs[-1], ep.atomic_counters[1], y, buffers.routing, ep.pointers[1], data.topk_ids, epilogue_fn=epilogue
        )
    assert_bitwise_equal(outs[1], outs[0] + 1)
    assert_bitwise_equal(outs[2], outs[0] + 2)
    with pytest.raises(ArgumentError, match="triton_fn"):
        contract.ep_fused_combine(
            ep,
            outs[0],
            ep.atomic_counters[1],
            y,
            buffers.routing,
            ep.pointers[1],
            data.topk_ids,
            epilogue_fn=Hook(None, print),
        )


def bytes_at(address: int, count: int) -> torch.Tensor:
    """What lies in memory from ``address`` on."""
    return torch.frombuffer(bytearray(ctypes.string_at(address, count)), dtype=torch.uint8)


@CPU_ONLY
@pytest.mark.parametrize("pre_reduce", (False, True))
def test_pointers_and_layouts_lead_to_the_data(pre_reduce: bool) -> None:
    case = Case(setup("bf16", pre_reduce=pre_reduce), "uniform", weights="none")
    eps = ranks_of(params_of(case.setup, 3))
    buffers = [Buffers.allocate(ep) for ep in eps]
    dispatch_all(eps, buffers, case)
    combine_all(eps, buffers, case)
    for me, (ep, own) in enumerate(zip(eps, buffers, strict=True)):
        assert ep.my_rank == me
        assert ep.dev_ptrs.shape == (2, 3)
        assert ep.dev_ptrs.tolist() == ep.pointers[:, :, me].tolist()
        assert ep.dev_ptrs[:, contract.SEND].tolist() == [0, 0]
        for group, names in enumerate((("messages", "counts"), ("rows", "combine_flag"))):
            for column, name in enumerate(names, start=1):
                region = ep.workspace.regions[name]
                assert ep.dev_ptrs[group, column] == ep.memory.local.data_ptr() + region.offset
                got = bytes_at(int(ep.dev_ptrs[group, column]), region.nbytes)
                assert torch.equal(got, region.view(ep.memory.local).reshape(-1).view(torch.uint8))

        # Dispatch: the message behind every received row, and the count that announced it.
        dispatch, (_, recv, recv_count) = ep.dispatch_kernel, ep.dev_ptrs[contract.DISPATCH].tolist()
        for source in range(3):
            for expert in range(ep.config.num_local_experts):
                word = bytes_at(recv_count + dispatch.recv_count_layout(source, expert), 4).view(torch.int32)
                assert word.item() == own.routing.counts[expert, source]
            for slot in range(int(own.routing.received[source, 0])):
                token = int(own.routing.message_token[source, slot])
                row = case.data(source).x[token]
                message = bytes_at(recv + dispatch.recv_buf_layout(source, slot), row.numel() * 2)
                assert torch.equal(message.view(torch.bfloat16), row)

        # Combine: the row that came home for every slot (or the sum of every rank), and the flag that announced it.
        combine, (_, recv, recv_count) = ep.combine_kernel, ep.dev_ptrs[contract.COMBINE].tolist()
        home = case.data(me)
        for rank, other in enumerate(buffers):
            y = case.expert_rows(rank, len(other.src_info))
            for token in range(len(home.x)):
                slot = int(own.routing.slot_of[token, rank])
                if slot < 0:
                    continue
                flag = bytes_at(recv_count + combine.recv_count_layout(rank, slot), 8).view(torch.int64)
                assert flag.item() == 1
                rows = other.routing.rows_of_message[me, slot].tolist()
                if pre_reduce:
                    total = torch.zeros(ep.params.hidden_size)
                    for row in rows:
                        total = total + y[row].float() if row >= 0 else total
                    want = {rank: total.to(torch.bfloat16)}
                else:
                    want = {k: y[row] for k, row in enumerate(rows) if row >= 0}
                for copy, row in want.items():
                    got = bytes_at(recv + combine.recv_buf_layout(token, copy), combine.msg_bytes)
                    assert torch.equal(got.view(torch.bfloat16), row)


FACTS = dict(
    num_threads=256, n_sms=132, top_k=8, n_experts=256, n_ranks=8, msg_bytes=14336, max_tokens_per_rank=128,
    p2p_world_size=8,
)  # fmt: skip


def test_launch_facts() -> None:
    kernel = contract.EPCombineKernel(**FACTS)
    assert (kernel.n_local_experts, kernel.n_warps) == (32, 8)
    assert (kernel.n_send_sms, kernel.n_reduce_sms, kernel.n_wait_sms) == (131, 132, 1)
    assert dataclasses.replace(kernel, n_experts=7, n_ranks=3, p2p_world_size=3).n_local_experts == 3
    assert dataclasses.replace(kernel, warp_size=64).n_warps == 4
    with pytest.raises(UnsupportedError, match="p2p_world_size=4"):
        dataclasses.replace(kernel, p2p_world_size=4)
    with pytest.raises(UnsupportedError, match="use_shmem=True"):
        dataclasses.replace(kernel, use_shmem=True)


def test_layouts_in_worked_numbers() -> None:
    combine = contract.EPCombineKernel(**FACTS)
    assert combine.send_buf_layout(3) == 43008
    assert combine.recv_buf_layout(5, 2) == 602112
    assert dataclasses.replace(combine, pre_reduce=True).recv_buf_layout(5, 2) == 3741696
    assert combine.recv_count_layout(1, 3) == 1048
    dispatch = contract.EPDispatchKernel(**{**FACTS, "msg_bytes": 7504})
    assert dispatch.recv_buf_layout(1, 2) == 975520
    assert dispatch.recv_count_layout(1, 0) == 192
    with pytest.raises(UnsupportedError, match="no send buffer"):
        dispatch.send_buf_layout(0)
    for call in (
        lambda: combine.recv_buf_layout(128, 0),
        lambda: combine.recv_buf_layout(0, 8),
        lambda: combine.recv_count_layout(8, 0),
        lambda: dispatch.recv_buf_layout(0, -1),
        lambda: dispatch.recv_count_layout(0, 32),
    ):
        with pytest.raises(ArgumentError, match="expected in"):
            call()


def test_layouts_of_a_deepseek_shape_match_the_workspace() -> None:
    params = contract.EPParams(
        dispatch_fmt_str="BlockwiseFP8", hidden_size=7168, top_k=8, n_experts=256, max_token_per_rank=128,
        n_gpus_per_node=8,
    )  # fmt: skip
    assert (params.config(0).dispatch_format, params.n_ranks, params.workspace.message_bytes) == (
        "fp8_block128",
        8,
        7504,
    )
    from moelink.kernels.contract.layouts import combine_kernel, dispatch_kernel

    regions = params.workspace.regions
    dispatch, combine = (make(params, n_sms=132) for make in (dispatch_kernel, combine_kernel))
    assert dispatch.recv_buf_layout(7, 127) + 7504 == regions["messages"].nbytes
    assert combine.recv_buf_layout(127, 7) + 14336 == regions["rows"].nbytes
    assert combine.recv_count_layout(7, 127) + 8 == regions["combine_flag"].nbytes
    assert dispatch.recv_count_layout(7, 31) + 4 == regions["counts"].nbytes


@CPU_ONLY
def test_ep_init_refuses_what_cannot_work() -> None:
    params = params_of(setup(), 2)
    memories = create_all(["cpu", "cpu"], params.nbytes)
    far = SingleProcessMemory(0, [memory.local for memory in memories])
    far.pointers[1] = 0
    with pytest.raises(UnsupportedError, match="rank 0 cannot address the memory of rank 1: P2P is not supported"):
        contract.ep_init(params, far)
    with pytest.raises(ArgumentError, match="blocks of at least"):
        contract.ep_init(params, create_all(["cpu", "cpu"], 16)[0])
    with pytest.raises(ArgumentError, match="3 blocks"):
        contract.ep_init(params_of(setup(), 3), memories[0])
    with pytest.raises(ArgumentError, match="my_rank"):
        contract.ep_init(params, memories[0], my_rank=2)
    replicated = params_of(setup(mode="allreduce"), 3)
    alone = create_all(["cpu"], replicated.nbytes)[0]
    assert contract.ep_init(replicated, alone, my_rank=2).first_expert == 5


def test_parameters_are_checked() -> None:
    good = params_of(setup(), 2)
    for name, expected in (("BF16", "bf16"), ("BlockwiseFP8", "fp8_block128"), ("NVFP4", "nvfp4"), ("MXFP4", "mxfp4")):
        assert dataclasses.replace(good, dispatch_fmt_str=name, hidden_size=384).config(0).dispatch_format == expected
    with pytest.raises(ConfigError, match="dispatch_fmt_str.*FP7"):
        dataclasses.replace(good, dispatch_fmt_str="FP7")
    with pytest.raises(ConfigError, match="hidden_size"):
        dataclasses.replace(good, dispatch_fmt_str="NVFP4")
    with pytest.raises(ConfigError, match="allreduce_world_size"):
        dataclasses.replace(good, allreduce_world_size=2)
    with pytest.raises(ConfigError, match="n_gpus_per_node"):
        dataclasses.replace(good, n_gpus_per_node=0)
    with pytest.raises(UnsupportedError, match="n_nodes=2"):
        dataclasses.replace(good, n_nodes=2)
    with pytest.raises(UnsupportedError, match="use_shmem=True"):
        dataclasses.replace(good, use_shmem=True)


@CPU_ONLY
def test_arguments_are_refused_before_anything_is_launched() -> None:
    params = params_of(setup("fp8_block128"), 1)
    (ep,) = ranks_of(params)
    case = Case(setup("fp8_block128"), "uniform")
    data, own = case.data(0), Buffers.allocate(ep)
    outputs = {
        "token_handler": own.handler,
        "row_offsets": own.row_offsets,
        "expert_ids": None,
        "src_info": own.src_info,
        "atomic_counters": ep.atomic_counters[0],
        "input_tokens": data.x,
        "topk_ids": data.topk_ids,
        "pointers": ep.pointers[0],
        "routing": own.routing,
    }
    many = params.max_token_per_rank + 1
    bad = [
        ("row_offsets", own.row_offsets.long()),
        ("src_info", own.src_info[:, :2]),
        ("input_tokens", data.x[:, :128]),
        ("topk_ids", torch.zeros(many, params.top_k, dtype=torch.int32)),
        ("topk_ids", data.topk_ids.float()),
        ("pointers", ep.pointers[0, :2]),
        ("atomic_counters", torch.zeros(3, dtype=torch.int32)),
        ("output_scales", dataclasses.replace(own.handler, output_scales=None)),
        ("routing.slot_of", dataclasses.replace(own.routing, slot_of=own.routing.slot_of[1:])),
        ("input_scales", torch.ones(1)),
        ("router_weights", data.topk_weights[:1]),
        ("token_handler.weights", contract.TokenHandler.allocate(ep, weighted=True)),
    ]
    places = {"output_scales": "token_handler", "token_handler.weights": "token_handler", "routing.slot_of": "routing"}
    for name, value in bad:
        with pytest.raises(ArgumentError, match=re.escape(name)):
            contract.ep_fused_dispatch(ep, **{**outputs, places.get(name, name): value})
    assert not ep.atomic_counters[0].any()
    y = torch.zeros(len(own.src_info), params.hidden_size, dtype=torch.bfloat16)
    inputs = {
        "output_tokens": torch.empty_like(data.x),
        "atomic_counters": ep.atomic_counters[1],
        "input_tokens": y,
        "routing": own.routing,
        "pointers": ep.pointers[1],
        "topk_ids": data.topk_ids,
    }
    bad = [
        ("output_tokens", data.x.float()),
        ("input_tokens", y[:, :4]),
        ("row_weights", torch.ones(len(y))),
        ("router_weights", torch.ones(1)),
        ("shared", y),
    ]
    for name, value in bad:
        with pytest.raises(ArgumentError, match=name):
            contract.ep_fused_combine(ep, **{**inputs, name: value})
    rows = torch.empty(len(data.x), params.top_k, params.hidden_size, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="output_tokens"):
        contract.ep_fused_combine(ep, **{**inputs, "output_tokens": rows, "router_weights": data.topk_weights})
    with pytest.raises(ArgumentError, match="a list of 1 entries"):
        contract.distributed_ep_dispatch([ep], *[[value] * 2 for value in outputs.values()])
    assert not ep.atomic_counters[1].any()


@CPU_ONLY
def test_a_peer_that_does_not_come_is_named() -> None:
    case = Case(setup("bf16"), "uniform")
    first, second = ranks_of(params_of(case.setup, 2, timeout=0.05))
    data, own = case.data(0), Buffers.allocate(first)
    contract.ep_dispatch_async(first, first.atomic_counters[0], data.x, data.topk_ids, first.pointers[0], own.routing)
    first.raise_error()
    outputs = (own.handler, own.row_offsets, own.expert_ids, own.src_info)
    for _ in range(2):  # once poisoned, a launch returns at once
        contract.ep_dispatch_wait(
            first, *outputs, first.pointers[0], first.atomic_counters[0], own.routing, num_input_tokens=len(data.x)
        )
        with pytest.raises(PeerTimeoutError, match="rank 1 did not arrive in dispatch"):
            first.raise_error()
    assert not own.row_offsets.any()
    data, other = case.data(1), Buffers.allocate(second)
    contract.ep_dispatch_async(
        second, second.atomic_counters[0], data.x, data.topk_ids, second.pointers[0], other.routing
    )
    with pytest.raises(PeerTimeoutError, match="told by rank 0"):
        second.raise_error()


def rows_of_docs() -> dict[str, set[str]]:
    """First cells of the tables of docs/contract.md, by section."""
    sections: dict[str, set[str]] = {}
    title = ""
    for line in DOCS.read_text().splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ").strip(" `")
        match = re.match(r"\| `([^`]+)`", line)
        if match:
            cells = line.split("|")
            assert len(cells) >= 4, line
            assert cells[2].strip(), line
            sections.setdefault(title, set()).update(re.findall(r"`([^`]+)`", cells[1]))
    return sections


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_the_contract_has_a_row(page: str) -> None:
    sections = rows_of_docs()
    assert page in sections, f"docs/contract.md has no section {page!r}"
    assert not set(PAGES[page]) - sections[page], f"{page}: names without a row"


def test_names_that_the_docs_promise_exist() -> None:
    text = DOCS.read_text()
    promised = set(re.findall(r"`(?:moelink\.)?(kernels\.[a-z_.]+)`", text))
    assert promised
    import importlib

    for name in promised:
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                thing = importlib.import_module("moelink." + ".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[cut:]:
                thing = getattr(thing, attribute)
            break
        else:
            pytest.fail(name)
