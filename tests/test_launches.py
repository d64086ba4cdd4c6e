"""What a launch hands to Triton, without a GPU: Triton's part, a kernel on a device, is played."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from moelink.transports.symmetric import rank as module
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


def arguments_of(x):
    """A tensor, an address, a tuple and a number; typed, the address is a tensor as well."""
    return lambda typed: (x, x if typed else x.data_ptr(), (x, (x,)), 3)


def test_kernels_get_addresses(rank):
    program, x = Program("kernel", 6, 8, "spec", {}), torch.zeros(8)
    rank.launch(program, arguments_of(x), [x])
    ((compiled),) = program.compiled.values()
    at = x.data_ptr()
    expected = (rank.table.data_ptr(), rank.record, rank.control.data_ptr(), at, at, (at, (at,)), 3, 6, "spec")
    assert compiled.launches == [("run", (8, 1, 1), 5, expected)]


def test_hooks_of_a_profiler_are_called_by_triton(rank, monkeypatch):
    program, x = Program("kernel", 6, 8, "spec", {}), torch.zeros(8)
    rank.launch(program, arguments_of(x), [x])
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, name, SimpleNamespace(calls=[print]))
            rank.launch(program, arguments_of(x), [x])
    ((compiled),) = program.compiled.values()
    assert [how for how, *_ in compiled.launches] == ["run", "hooks", "hooks"]
    assert len({(grid, stream, args) for _, grid, stream, args in compiled.launches}) == 1


def test_a_kernel_is_looked_up_by_type_and_alignment_of_what_the_caller_gave(rank):
    program, x = Program("kernel", 6, 8, "spec", {}), torch.zeros(8)
    for given in (x, x[1:], torch.zeros(8), x.int(), x[4:]):
        rank.launch(program, arguments_of(given), [given])
    assert rank.made == [(torch.float32, 0), (torch.float32, 4), (torch.int32, 0)]


def test_preparing_launches_nothing(rank):
    program, x = Program("kernel", 6, 8, "spec", {}), torch.zeros(8)
    rank._preparing = True
    rank.launch(program, arguments_of(x), [x])
    ((compiled),) = program.compiled.values()
    assert compiled.launches == []
