"""Traces of compiled kernels: ranks that share one GPU, and ranks on GPUs of their own. Run by hand: ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

import moelink
from moelink.memory import create_all
from moelink.memory.workspace import Workspace
from moelink.testing import run_ranks
from moelink.tools.trace import TraceConfig, run_trace
from moelink.tracing.device.layout import ROLES
from moelink.tracing.records import read_rows, rows_of
from moelink.tracing.summary import summarise
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.symmetric import SymmetricTransport
from tests.gpu.gpu_compile import FUSED, HALVES, Kernel, kernels_of
from tests.support.cases import Case, Setup
from tests.tracing.trace_ranks import REPLAYED, check_order, traced_replays

WORLD, DEVICES = 2, torch.cuda.device_count()
MICROSECOND = 1000

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def both(fields: dict[str, object], world_size: int, parts: tuple[str, ...]) -> list[Kernel]:
    """Kernels that stamp, and the same that do not."""
    return [kernel for traced in (True, False) for kernel in kernels_of(fields, world_size, parts, traced=traced)]


def setup_of(fmt: str, tokens: int) -> Setup:
    return Setup(fmt, (("max_tokens_per_rank", tokens),))


@pytest.mark.kernels(of=lambda fmt, tokens: both(setup_of(fmt, tokens).fields, WORLD, HALVES))
@pytest.mark.parametrize("tokens", [4, 300, 1100])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128"])
def test_ranks_that_share_a_gpu(fmt, tokens):
    """Two ranks of one process in split form, whose clock is one."""
    setup = setup_of(fmt, tokens)
    configs = [moelink.EPConfig(**setup.fields, world_size=WORLD, rank=rank) for rank in range(WORLD)]
    memories = create_all(["cuda:0"] * WORLD, Workspace(configs[0]).nbytes)
    transport = SymmetricTransport(configs, memories, "test")
    case = Case(setup, "uniform", seed=1)
    data = [case.data(rank) for rank in range(WORLD)]
    requests = [DispatchRequest(d.x.cuda(), d.topk_ids.cuda(), d.topk_weights.cuda()) for d in data]

    def pair():
        recvs = transport.dispatch(requests).wait()
        ys = [case.expert_rows(rank, len(recv.tokens)).cuda() for rank, recv in enumerate(recvs)]
        return transport.combine([CombineRequest(y, recv) for y, recv in zip(ys, recvs, strict=True)]).wait()

    plain = pair()
    transport.open_trace()
    stamped = [pair() for _ in range(3)]
    rows = [rows_of(buffer.numpy()) for buffer in transport.close_trace()]
    assert all(torch.equal(a, b) for outs in (*stamped, pair()) for a, b in zip(plain, outs, strict=True))
    records = [record for rank, each in enumerate(rows) for record in read_rows(each, rank)]
    check_order(records, slack=2 * MICROSECOND)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert all(0 <= record.sm < sms for record in records)
    assert all(record.end - record.begin < 1_000_000_000 for record in records)
    for rank in range(WORLD):
        for role in ROLES:
            mine = [record for record in records if (record.rank, record.role) == (rank, role)]
            assert {record.call for record in mine} == {2, 3, 4}
            stamped_names = {name for record in mine for name in record.times}
            assert {"begun", "told", "last published" if role.name == "send" else "last " + (
                "row stored" if role.phase == "dispatch" else "result stored")} <= stamped_names  # fmt: skip
    print(summarise(records, unit="ns", clock_error=0))
    transport.check()
    transport.close()


def config_of(tokens: int, graph: bool = True) -> TraceConfig:
    return TraceConfig(max(1, DEVICES), "cuda", tokens, 4, 64, 4, 1024, "fp8_block128", graph)


def kernels_of_trace(tokens: int) -> list[Kernel]:
    """What a run of ``moelink trace`` launches."""
    config = config_of(tokens)
    fields = dict(
        num_experts=config.experts, topk=config.topk, hidden_size=config.hidden, max_tokens_per_rank=tokens,
        dispatch_format=config.format,
    )  # fmt: skip
    return kernels_of(fields, DEVICES, traced=True)


@pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")
@pytest.mark.kernels(of=kernels_of_trace)
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("tokens", [8, 512, 2048])
def test_ranks_on_gpus_of_their_own(graph, tokens):
    found = run_trace(config_of(tokens, graph))
    print(found.table)
    facts = found.document["otherData"]
    assert facts["unit"] == "ns"
    assert facts["clock_errors"][0] == 0
    assert all(0 < error < 50 * MICROSECOND for error in facts["clock_errors"][1:])
    slices = [event for event in found.document["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(DEVICES))
    assert len({event["args"]["call"] for event in slices if event["cat"] == "dispatch"}) == 4


@pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")
@pytest.mark.kernels(of=lambda: both(REPLAYED, DEVICES, FUSED))
def test_a_captured_graph_stamps_only_while_a_trace_is_open():
    planned = Workspace(moelink.EPConfig(**REPLAYED, world_size=DEVICES)).row_table
    for records, errors, same in run_ranks(traced_replays, DEVICES):
        assert same
        check_order(records, slack=2 * max(errors) + 2 * MICROSECOND, planned=planned)
        assert {record.call for record in records} >= {4, 5}
