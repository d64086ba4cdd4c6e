"""What a launch hands to Triton, without a GPU: Triton's part, a kernel on a device, is played."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

import moelink
from moelink.kernels.launch import launcher as module
from moelink.kernels.launch.arguments import of_any_value
from moelink.kernels.launch.direct import DirectKernel, Driver
from moelink.kernels.launch.launcher import CompiledKernel, Launcher
from moelink.kernels.records import (
    CreditNumbers,
    DispatchInputs,
    DispatchNumbers,
    DispatchOutputs,
    GiveUpNumbers,
    Peers,
)
from moelink.memory.nodes.network import OneNode
from moelink.ops import record
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.symmetric.combine import Combine
from moelink.transports.symmetric.dispatch import Dispatch


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


NUMBERS = CreditNumbers(3, 6)


@pytest.fixture
def launcher(monkeypatch):
    table, words, control = (torch.zeros(4, dtype=torch.int64) for _ in range(3))
    network = OneNode(SimpleNamespace(pointers=table))
    one = Launcher(Peers(table, words, control), torch.device("cuda", 0), network=network)
    active = SimpleNamespace(get_current_stream=lambda index: 5)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    one.made = []
    monkeypatch.setattr(
        Launcher, "_load", lambda self, kernel, arguments, key: self.made.append(key) or (Compiled(), None)
    )
    return one


@pytest.fixture
def kernel():
    return CompiledKernel("kernel", 6, 8, "spec", {})


def records_of(x):
    """A tensor, a record of an address, and one with a tuple; typed, the address is a tensor as well."""
    return lambda typed: (x, (x if typed else x.data_ptr(),), (x, (x,)))


def loaded(kernel):
    ((compiled, _),) = kernel.loaded.values()
    return compiled


def test_kernels_get_addresses(launcher, kernel):
    x = torch.zeros(8)
    launcher.launch(kernel, records_of(x), NUMBERS, [x])
    at, (table, words, control) = x.data_ptr(), launcher.peers
    expected = ((table.data_ptr(), words, control.data_ptr()), at, (at,), (at, (at,)), NUMBERS, "spec")
    assert loaded(kernel).launches == [("run", (8, 1, 1), 5, expected)]


def test_other_peers_take_the_place_of_the_launchers_own(launcher, kernel):
    x, other = torch.zeros(8), Peers(*(torch.ones(4, dtype=torch.int64) for _ in range(3)))
    launcher.launch(kernel, records_of(x), NUMBERS, [x], peers=other)
    ((_, _, _, args),) = loaded(kernel).launches
    assert args[0] == (other.table.data_ptr(), other.record, other.control.data_ptr())


def test_hooks_of_a_profiler_are_called_by_triton(launcher, kernel, monkeypatch):
    x = torch.zeros(8)
    launcher.launch(kernel, records_of(x), NUMBERS, [x])
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, name, SimpleNamespace(calls=[print]))
            launcher.launch(kernel, records_of(x), NUMBERS, [x])
    assert [how for how, *_ in loaded(kernel).launches] == ["run", "hooks", "hooks"]
    assert len({(grid, stream, str(args)) for _, grid, stream, args in loaded(kernel).launches}) == 1


def test_a_kernel_is_looked_up_by_type_and_alignment_of_what_the_caller_gave(launcher, kernel):
    x = torch.zeros(8)
    for given in (x, x[1:], torch.zeros(8), x.int(), x[4:]):
        launcher.launch(kernel, records_of(given), NUMBERS, [given])
    assert launcher.made == [(torch.float32, 0), (torch.float32, 4), (torch.int32, 0)]


def test_preparing_launches_nothing(launcher, kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    x = torch.zeros(8)
    with launcher.preparing():
        launcher.launch(kernel, records_of(x), NUMBERS, [x])
    assert loaded(kernel).launches == []


def test_kernels_are_compiled_for_no_numbers_in_particular(monkeypatch):
    """Triton specialises integers of a tuple for 1 and for multiples of 16, and a call with others would compile."""
    asked = []

    class Function:
        __name__ = "function"

        def warmup(self, *arguments, **options):
            asked.append(arguments)
            return SimpleNamespace(_init_handles=lambda: None)

    table, words, control = (torch.zeros(4, dtype=torch.int64) for _ in range(3))
    one = Launcher(
        Peers(table, words, control), torch.device("cuda", 0), network=OneNode(SimpleNamespace(pointers=table))
    )
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: 5)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(one, "_direct", lambda loaded: None)
    numbers = DispatchNumbers(*range(17))
    with one.preparing():
        one.launch(one.kernel(Function(), 16, S="spec"), lambda typed: (), numbers)
    ((_, compiled_for),) = asked
    for name, value in compiled_for._asdict().items():
        assert value != 1
        assert value % 16
        assert (value >= 2**31) == (name in ("limit", "call")), name


def test_a_report_of_a_failure_has_room_for_a_mismatch():
    """Its field and values are one number of 63 bits."""
    numbers = of_any_value(GiveUpNumbers(*range(7)))
    assert [name for name, value in numbers._asdict().items() if value >= 2**31] == ["call", "expected", "got"]


class DirectForm:
    """Notes its launches."""

    def __init__(self):
        self.launches = []

    def copy(self):
        return DirectForm()

    def pack(self, *given):
        self.packed = given

    def launch(self, *given):
        self.launches.append((*given, *self.packed))


def test_a_direct_form_gets_flat_addresses(launcher, kernel, monkeypatch):
    direct = DirectForm()
    monkeypatch.setattr(Launcher, "_load", lambda *_: (Compiled(), direct))
    launcher._own_addresses = [1, 2, 3]
    x, other = torch.zeros(8), Peers(*(torch.ones(4, dtype=torch.int64) for _ in range(3)))
    launcher.launch(kernel, records_of(x), NUMBERS, [x])
    assert direct.launches == [(8, 5, [1, 2, 3, *[x.data_ptr()] * 4], NUMBERS)]
    launcher.launch(kernel, records_of(x), NUMBERS, [x], peers=other)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
    launcher.launch(kernel, records_of(x), NUMBERS, [x])
    assert len(direct.launches) == 1, "Triton launches with another error record, and where there are hooks"
    assert [how for how, *_ in loaded(kernel).launches] == ["run", "hooks"]


def test_a_direct_form_gets_the_callers_table_and_counters(launcher, kernel, monkeypatch):
    """So the launchers of the contract launch as the communicator does, dependent launches included."""
    direct = DirectForm()
    monkeypatch.setattr(Launcher, "_load", lambda *_: (Compiled(), direct))
    launcher._own_addresses = [1, 2, 3]
    x, table, control = (torch.zeros(8, dtype=torch.int64) for _ in range(3))
    peers = Peers(table, launcher.peers.record, control)
    launcher.launch(kernel, records_of(x), NUMBERS, [x], peers=peers)
    assert direct.launches == [(8, 5, [table.data_ptr(), 2, control.data_ptr(), *[x.data_ptr()] * 4], NUMBERS)]
    assert not loaded(kernel).launches


def test_a_bound_launch_packs_its_parameters_once(launcher, kernel, monkeypatch):
    direct, copy = DirectForm(), DirectForm()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(direct, "copy", lambda: copy)
    monkeypatch.setattr(Launcher, "_load", lambda *_: (Compiled(), direct))
    launcher._own_addresses = [1, 2, 3]
    x = torch.zeros(8)
    again = launcher.bind(kernel, records_of(x), NUMBERS, [x])
    assert not copy.launches, "binding launches nothing"
    launcher.launch(kernel, records_of(other := torch.zeros(8)), NUMBERS, [other])
    again(5)
    again(6)
    assert copy.launches == [(8, stream, [1, 2, 3, *[x.data_ptr()] * 4], NUMBERS) for stream in (5, 6)]
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
    again(5)
    assert [how for how, *_ in loaded(kernel).launches] == ["hooks"]


class PlayedDriver:
    """libcuda, as far as launches need it; ``parameters`` is what it says of every kernel."""

    def __init__(self, parameters, version=12030):
        self.parameters, self.launches, self.status, self.version = parameters, [], 0, version
        self.early = []
        self.cuFuncGetParamInfo = self._info

    def cuLaunchKernelEx(self, config, function, arguments, extra):  # noqa: N802
        size = ctypes.c_size_t.from_address(extra[3]).value
        assert (extra[0], extra[2], extra[4], arguments.value) == (1, 2, None, None)
        # As cuda.h has the struct: seven 32-bit numbers, the stream, the attributes and how many these are.
        *numbers, stream, attributes, many = struct.unpack("@7IQQI", ctypes.string_at(config, 52))
        if (
            many
        ):  # as cuda.h has the struct: a name, four bytes that are not used, 64 bytes of which the first four count
            assert (many, struct.unpack("@ii", ctypes.string_at(attributes, 8))[0]) == (1, 6)
            assert struct.unpack("@i", ctypes.string_at(attributes + 8, 4)) == (1,)
        self.early.append(many == 1)
        self.launches.append((function.value, numbers[:6], numbers[6], stream, ctypes.string_at(extra[1], size)))
        return self.status

    def cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = self.version
        return 0

    def _info(self, function, index, offset, size):
        if index.value >= len(self.parameters):
            return 1
        offset._obj.value, size._obj.value = self.parameters[index.value]
        return 0

    def cuGetErrorString(self, status, words):  # noqa: N802
        words._obj.value = b"out of patience"
        return 0


METADATA = {
    "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0,
    "profile_scratch_size": 0,
}  # fmt: skip
SIGNATURE = {"peers": ("*i64", "*i64"), "x": "*bf16", "numbers": ("i32", "i64", "i32"), "S": "constexpr"}
NATURAL = type("Natural", (ctypes.Structure,), {"_fields_": [
    (f"f{i}", kind) for i, kind in enumerate([*[ctypes.c_uint64] * 3, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32,
                                               *[ctypes.c_uint64] * 2])
]})  # fmt: skip
PLACES = [(getattr(NATURAL, name).offset, getattr(NATURAL, name).size) for name, _ in NATURAL._fields_]


def played(signature=SIGNATURE, ptx="", **changes):
    metadata, source = (
        SimpleNamespace(name="one_kernel", **{**METADATA, **changes}),
        SimpleNamespace(signature=signature),
    )
    return SimpleNamespace(function=7, packed_metadata=(4, 1, 96), metadata=metadata, src=source, asm={"ptx": ptx})


def test_parameters_lie_as_the_members_of_a_struct():
    library = PlayedDriver(PLACES)
    direct = DirectKernel.of(played(), Driver(library))
    direct.pack([1, 2, 3], numbers := (4, 1 << 40, -6))
    direct.launch(8, 5)
    direct.pack([1, 2, 9], numbers)
    direct.launch(9, 5)
    direct.copy().pack([7, 7, 7], (7, 7, 7))
    direct.pack([1, 2, 9], (4, 1 << 40, 7))
    direct.launch(9, 5)
    want = [NATURAL(1, 2, 3, 4, 1 << 40, -6), NATURAL(1, 2, 9, 4, 1 << 40, -6), NATURAL(1, 2, 9, 4, 1 << 40, 7)]
    assert library.launches == [
        (7, [grid, 1, 1, 128, 1, 1], 96, 5, bytes(struct)) for grid, struct in zip((8, 9, 9), want, strict=True)
    ]
    library.status = 700
    with pytest.raises(RuntimeError, match="error 700: out of patience"):
        direct.launch(8, 5)


WAITING = ".entry kernel() { griddepcontrol.wait; ret; }"


@pytest.mark.quick("each of three reasons decides alone")
@pytest.mark.parametrize(
    "ptx, version, early",
    [(WAITING, 12030, True), ("ret;", 12030, False), (WAITING, 12020, False)],
    ids=["both", "no wait", "old driver"],
)
def test_only_a_kernel_that_waits_may_start_before_the_last_one_has_ended(ptx, version, early):
    library = PlayedDriver(PLACES, version)
    direct = DirectKernel.of(played(ptx=ptx), Driver(library))
    direct.launch(8, 5)
    direct.copy().launch(8, 5)
    assert library.early == [early, early]


def test_what_only_triton_can_launch_has_no_direct_form():
    driver = Driver(PlayedDriver(PLACES))
    assert DirectKernel.of(played(), driver) is not None
    for change in (
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 8},
    ):
        assert DirectKernel.of(played(**change), driver) is None, change
    for signature in ({"x": "*bf16", "scale": "fp32"}, {"number": "i32", "x": "*bf16"}):
        assert DirectKernel.of(played(signature), driver) is None, signature
    mute = Driver(PlayedDriver(PLACES))
    mute._parameter = None
    assert DirectKernel.of(played(), mute) is None, "the driver cannot say"


def test_parameters_of_another_layout_are_left_to_triton_with_a_warning():
    for signature, places in (({**SIGNATURE, "more": "i32"}, PLACES), (SIGNATURE, PLACES[:-1])):
        with pytest.warns(UserWarning, match="one_kernel: expected .* got .* launches this kernel"):
            assert DirectKernel.of(played(signature), Driver(PlayedDriver(places))) is None


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128", "nvfp4"])
def test_addresses_are_those_of_what_kernels_are_compiled_for(fmt, layout):
    """Also over a routing, and of what an operator returned."""
    x, ids = torch.ones(3, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3], [1, -1]])
    sizes = dict(num_experts=4, topk=2, hidden_size=128, max_tokens_per_rank=4, dispatch_format=fmt, layout=layout)
    with moelink.init(**sizes, transport="symmetric", device="cpu") as ep:
        rank = ep._session.transport.ranks[0]
        first = Dispatch(rank, DispatchRequest(x, ids, torch.ones(3, 2)), "one")
        plan = record.unpack(record.pack(first.notes, ep.config), ep.config, transport="symmetric")
        restored = dataclasses.replace(first.output, handle=dataclasses.replace(first.output.handle, routing=plan))
        calls = [first]
        for routing in (first.output, restored):
            calls.append(Dispatch(rank, DispatchRequest(x, ids, routing=routing), "one"))
            calls.append(Dispatch(rank, DispatchRequest(x, ids, out=calls[-1].output, routing=routing), "one"))
        calls += [Combine(rank, CombineRequest(torch.ones(6, 128).bfloat16(), call.output)) for call in calls]
        for call in calls:
            forms: tuple[dict[str, Any], ...] = ({}, {"home": False})
            if isinstance(call, Dispatch):
                forms = ({}, {"without": DispatchInputs}, {"without": DispatchOutputs})
            for form in forms:
                tensors = partial(call._records, **form)
                assert module.addresses_of(tensors(False)) == module.addresses_of(tensors(True)), form
