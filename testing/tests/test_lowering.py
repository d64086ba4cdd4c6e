"""Kernels compiled for GPUs that are not there, from a process that interprets them, and what is read from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import talking_kernels as kernels

from moelink_testing import Lowered, lowered
from moelink_testing.lowering import memory_instructions, source, unguarded_releases

TYPES = {"data": "*fp32", "flag": "*i32", "value": "fp32"}
PTX = """
//
.version 8.7
.visible .entry send(
	.param .u64 .ptr .global .align 1 send_param_0
)
{
	ld.param.b64 	%rd1, [send_param_0];
	griddepcontrol.wait;
	@%p1 ld.global.L1::evict_first.v4.b32 { %r1, %r2, %r3, %r4 }, [%rd1];
	bar.sync 	0;
	st.global.cs.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
	st.local.b32 [%rd2], %r1;
	bar.sync 	0;
	@%p2 atom.global.sys.release.exch.b32 %r5, [ %rd3 + 0 ], %r4;
	ret;
}
"""


def test_memory_instructions_of_ptx():
    form = Lowered("sm_90", {"ptx": PTX})
    assert form.memory == [
        "ld.param.b64", "ld.global.v4.b32", "bar.sync", "st.global.v4.b32", "st.local.b32", "bar.sync",
        "atom.global.sys.release.exch.b32",
    ]  # fmt: skip
    assert form.counts["bar.sync"] == 2
    assert form.cache_hints == {"ld": 1, "st": 1}
    assert (form.unguarded, form.local, form.before_the_wait, form.instructions) == (0, 1, 0, 9)
    with pytest.raises(ValueError, match="until: expected a form lowered as far as ttir, got one with ptx"):
        _ = form.ttir


def test_memory_instructions_of_amd():
    text = "\ts_waitcnt vmcnt(0)\n\tglobal_store_dwordx4 v[0:1], v[2:5], off\n\tscratch_load_dword v1, off, s0\n"
    form = Lowered("gfx942", {"amdgcn": text + "  .private_segment_fixed_size: 24\n"})
    assert form.memory == ["global_store_dwordx4", "scratch_load_dword"]
    assert (form.local, form.stack) == (1, 24)


@pytest.mark.parametrize("memory, count", [
    (["st.global.b32", "bar.sync", "atom.global.sys.release.exch.b32"], 0),
    (["st.global.b32", "atom.global.sys.release.exch.b32"], 1),
    (["bar.sync", "st.global.b32", "atom.global.release.sys.exch.b32"], 1),
    (["bar.sync", "atom.global.release.sys.exch.b32", "st.global.b32", "atom.global.release.sys.exch.b32"], 1),
    (["st.global.b32", "atom.global.sys.relaxed.exch.b32"], 0),
], ids=["right", "no barrier", "a store after it", "the second", "no release"])  # fmt: skip
@pytest.mark.quick("each is another mistake")
def test_releases_without_a_barrier(memory, count):
    assert unguarded_releases(memory) == count


def test_what_schedules_cannot_show_is_in_the_instructions():
    """A missing barrier, and a scope that ends at this device. The process that compiles is another one."""
    right, without, near = (
        lowered(kernel, TYPES, {"N": 1024})
        for kernel in (kernels.send, kernels.send_without_barrier, kernels.send_to_this_device)
    )
    assert (right.unguarded, near.unguarded) == (0, 0)
    assert without.unguarded + without.memory.count("bar.sync") == 1, "Triton puts one there itself from 3.9 on"
    assert "atom.global.sys.release.exch.b32" in right.memory
    assert "atom.global.gpu.release.exch.b32" in near.memory
    assert "st.global.v4.b32" in right.memory, "aligned rows are stored 16 bytes at a time"
    assert right.local == right.stack == 0
    assert right.asm["cubin"]
    assert ".func" not in right.assembly
    assert memory_instructions(right.assembly) == right.memory
    assert "tt.store" in right.ttir


def test_other_targets_and_other_stages():
    amd = lowered(kernels.receive, {"data": "*fp32", "flag": "*i32", "out": "*fp32"}, {"N": 512}, target="gfx942")
    assert {"buffer_inv", "buffer_store_dwordx2"} <= amd.counts.keys()
    assert amd.counts.keys() & {"global_load_dword", "global_atomic_add"}, "a flag is read; Triton 3.9 adds 0 to it"
    early = lowered(kernels.receive, {"data": "*fp32", "flag": "*i32", "out": "*fp32"}, {"N": 512}, until="ir")
    assert "tt.call" in early.asm["ir"], "functions are not in line yet"
    assert early.shared == 0


KERNEL = SimpleNamespace(__name__="send", arg_names=["data", "flag", "value", "N"])


def test_types_are_in_the_order_of_the_parameters(monkeypatch):
    class Pair(NamedTuple):
        first: str
        second: tuple[str, ...]

    made = []
    monkeypatch.setattr("triton.compiler.ASTSource", lambda *arguments: made.append(arguments))
    kinds = {"value": "i32", "flag": Pair("*i64", ("i32", "*fp32")), "data": "*u8"}
    source(KERNEL, kinds, {"N": 4}, aligned=8)
    ((_, signature, constants, divisible),) = made
    assert list(signature.items()) == [
        ("data", "*u8"), ("flag", Pair("*i64", ("i32", "*fp32"))), ("value", "i32"), ("N", "constexpr"),
    ]  # fmt: skip
    assert constants == {"N": 4}
    assert divisible == {place: [["tt.divisibility", 8]] for place in [(0,), (1, 0), (1, 1, 1)]}


@pytest.mark.parametrize("kinds, constants", [
    ({"data": "*u8"}, {"N": 4}), ({**TYPES, "more": "i32"}, {"N": 4}), ({**TYPES, "N": "i32"}, {"N": 4}),
], ids=["too few", "unknown", "both"])  # fmt: skip
@pytest.mark.quick("each is another mistake")
def test_arguments_must_be_those_of_the_kernel(kinds, constants):
    with pytest.raises(ValueError, match="send: expected each of data, flag, value, N in arguments or in constants"):
        source(KERNEL, kinds, constants)


def test_what_is_no_kernel_or_no_target_is_refused():
    with pytest.raises(TypeError, match="kernel: expected a function under @triton.jit, got function"):
        lowered(kernels.send.fn, TYPES)
    with pytest.raises(ValueError, match="target: expected sm_ and a number, or gfx and a number, got 'H100'"):
        lowered(kernels.send, TYPES, target="H100")


def test_the_message_of_another_process_is_passed_on():
    with pytest.raises(RuntimeError, match=r"talking_kernels.send: expected it to compile, got [^$]*expected each of"):
        lowered(kernels.send, {"data": "*fp32"})


def test_a_kernel_that_no_other_process_finds_is_refused(monkeypatch):
    monkeypatch.setattr(kernels.send.fn, "__module__", "__main__")
    with pytest.raises(TypeError, match="expected one at the top of a module, got __main__.send"):
        lowered(kernels.send, TYPES, {"N": 4})
