"""What a launch hands to Triton, without a GPU: Triton's part, a kernel on a device, is played."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

import moelink
from moelink.ops import record
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.symmetric import rank as module
from moelink.transports.symmetric.combine import Combine
from moelink.transports.symmetric.dispatch import Dispatch
from moelink.transports.symmetric.program import Program
from moelink.transports.symmetric.rank import Rank


class Compiled:
    """Notes its launches: how it was called, programs, stream, arguments."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, stream: self.launches.append(("hooks", grid, stream, args))

    def run(self, x, y, z, stream, function, metadata, *rest):
        assert (function, metadata) == (7, (4, 1, 0))
        assert rest[:3] == (None, None, None)
        self.launches.append(("run", (x, y, z), stream, rest[3:]))


@pytest.fixture
def rank(monkeypatch):
    one = Rank.__new__(Rank)
    one.stream, one.device, one._preparing = object(), torch.device("cuda", 0), False
    one.table, one.record, one.control = (torch.zeros(4, dtype=torch.int64) for _ in range(3))
    active = SimpleNamespace(get_current_stream=lambda index: 5)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    one.made = []
    monkeypatch.setattr(Rank, "_load", lambda self, program, arguments, key: self.made.append(key) or Compiled())
    return one


def tensors_of(x):
    """A tensor, an address, and a tuple; typed, the address is a tensor as well."""
    return lambda typed: (x, x if typed else x.data_ptr(), (x, (x,)))


def test_kernels_get_addresses(rank):
    program, x = Program("kernel", 6, 8, "spec", {}), torch.zeros(8)
    rank.launch(program, tensors_of(x), (3,), [x])
    ((compiled),) = program.compiled.values()
    at = x.data_ptr()
    expected = (rank.table.data_ptr(), rank.record, rank.control.data_ptr(), at, at, (at, (at,)), 3, 6, "spec")
    assert compiled.launches == [("run", (8, 1, 1), 5, expected)]


def test_hooks_of_a_profiler_are_called_by_triton(rank, monkeypatch):
    program, x = Program("kernel", 6, 8, "spec", {}), torch.zeros(8)
    rank.launch(program, tensors_of(x), (3,), [x])
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, name, SimpleNamespace(calls=[print]))
            rank.launch(program, tensors_of(x), (3,), [x])
    ((compiled),) = program.compiled.values()
    assert [how for how, *_ in compiled.launches] == ["run", "hooks", "hooks"]
    assert len({(grid, stream, args) for _, grid, stream, args in compiled.launches}) == 1


def test_a_kernel_is_looked_up_by_type_and_alignment_of_what_the_caller_gave(rank):
    program, x = Program("kernel", 6, 8, "spec", {}), torch.zeros(8)
    for given in (x, x[1:], torch.zeros(8), x.int(), x[4:]):
        rank.launch(program, tensors_of(given), (3,), [given])
    assert rank.made == [(torch.float32, 0), (torch.float32, 4), (torch.int32, 0)]


def test_preparing_launches_nothing(rank):
    program, x = Program("kernel", 6, 8, "spec", {}), torch.zeros(8)
    rank._preparing = True
    rank.launch(program, tensors_of(x), (3,), [x])
    ((compiled),) = program.compiled.values()
    assert compiled.launches == []


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128", "nvfp4"])
def test_addresses_are_those_of_what_kernels_are_compiled_for(fmt, layout):
    """Also over a routing, and of what an operator returned."""
    x, ids = torch.ones(3, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3], [1, -1]])
    sizes = dict(num_experts=4, topk=2, hidden_size=128, max_tokens_per_rank=4, dispatch_format=fmt, layout=layout)
    with moelink.init(**sizes, transport="symmetric", device="cpu") as ep:
        rank = ep._session.transport.ranks[0]
        first = Dispatch(rank, DispatchRequest(x, ids, torch.ones(3, 2)), "one")
        plan = record.unpack(record.pack(first.plan, ep.config), ep.config, transport="symmetric")
        restored = dataclasses.replace(first.output, handle=dataclasses.replace(first.output.handle, plan=plan))
        calls = [first]
        for routing in (first.output, restored):
            calls.append(Dispatch(rank, DispatchRequest(x, ids, routing=routing), "one"))
            calls.append(Dispatch(rank, DispatchRequest(x, ids, out=calls[-1].output, routing=routing), "one"))
        calls += [Combine(rank, CombineRequest(torch.ones(6, 128).bfloat16(), call.output)) for call in calls]
        for call in calls:
            roles = ("_sent", "_received", "_both") if isinstance(call, Dispatch) else ("_sent", "_home", "_both")
            for role in roles:
                tensors = getattr(call, role)
                assert module._address(tensors(False)) == module._address(tensors(True)), role
