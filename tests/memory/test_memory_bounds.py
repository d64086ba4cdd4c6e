"""Bounds of interpreted kernels: what the guard refuses, what it says, and that it leaves no trace."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from moelink.errors import MoelinkError
from moelink.memory import create_all
from moelink.memory.layout import RegionTable

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")


@triton.jit
def store_at(address, values, n, B: tl.constexpr):
    """Stores values[0:n] at int32 ``address`` (a [1] int64 tensor), masked beyond n; then adds 0 to the first."""
    o = tl.arange(0, B)
    p = tl.load(address).to(tl.pointer_type(tl.int32))
    tl.store(p + o, tl.load(values + o, mask=o < n, other=0), mask=o < n)
    tl.atomic_add(p, 0, sem="relaxed", scope="sys")


TABLE = RegionTable.pack(("counts", torch.int32, (4,)), ("rows", torch.uint8, (100,)))


@pytest.fixture
def bounds():
    if not isinstance(tl.sum, interpreter.InterpretedFunction):
        pytest.skip("kernels are compiled here")
    from moelink.memory import bounds

    return bounds


@pytest.fixture
def memories():
    return create_all(["cpu", "cpu"], TABLE.nbytes)


def launch_store(address, n):
    store_at[(1,)](torch.tensor([address]), torch.arange(1, 9, dtype=torch.int32), n, B=8)


def test_host_views_are_checked():
    with pytest.raises(MoelinkError, match=r"region 'rows' \[128, 228\) does not fit memory of 227 torch.uint8"):
        TABLE["rows"].view(torch.zeros(227, dtype=torch.uint8))


def test_the_guard_passes_legal_accesses_and_leaves_no_trace(bounds, memories):
    names = ["create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas"]
    before = [getattr(interpreter.InterpreterBuilder, n) for n in names] + [interpreter.GridExecutor.__call__]
    with bounds.guard_accesses(bounds.region_ranges(TABLE, memories[0])):
        launch_store(memories[1].local.data_ptr(), 4)
    after = [getattr(interpreter.InterpreterBuilder, n) for n in names] + [interpreter.GridExecutor.__call__]
    assert before == after
    assert memories[0].peer(1)[:16].view(torch.int32).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "offset, n, says",
    [
        (0, 5, "store by program (0, 0, 0) of store_at: expected addresses in known ranges, got 1 of 5 addresses "
               "outside every known range, the first, {4} "
               "(4 bytes), 0 bytes after the end of 'counts' of rank 1 [{0}, {4})"),
        (16, 2, "2 of 2 addresses outside"),
        (120, 1, "{30} (4 bytes), 8 bytes before the start of 'rows' of rank 1"),
        (126, 1, "1 of 1 addresses outside"),
        (228, 1, "0 bytes after the end of 'rows' of rank 1"),
        (226, 1, "2 bytes of it past the end of 'rows' of rank 1"),
        (130, 1, "expected addresses that are multiples of the element's 4 bytes, got"),
    ],
    ids=["one-past", "padding", "before", "straddling", "end", "partly", "misaligned"],
)  # fmt: skip
def test_the_guard_names_the_access_and_the_nearest_region(bounds, memories, offset, n, says):
    base = memories[1].local.data_ptr()
    words = {str(i): f"{base + 4 * i:#x}" for i in range(60)}
    says = re.sub(r"\{(\d+)\}", lambda m: words[m.group(1)], says).replace(
        f"{words['4']}, 0 ", f"{words['4']} (4 bytes), 0 "
    )
    with pytest.raises(MoelinkError) as caught, bounds.guard_accesses(bounds.region_ranges(TABLE, memories[0])):
        launch_store(base + offset, n)
    assert says in str(caught.value)
    if n != 5:
        assert not memories[1].local[16:128].any(), "refused before it is done"


def test_atomics_and_loads_are_guarded_too(bounds, memories):
    with bounds.guard_accesses(bounds.region_ranges(TABLE, memories[0])):
        with pytest.raises(MoelinkError, match="atomic by program"):
            launch_store(memories[0].local.data_ptr() + 16, 0)
        with pytest.raises(MoelinkError, match="load by program"):
            store_at[(1,)](memories[0].pointers, torch.zeros(3, dtype=torch.int32), 4, B=4)


def test_guards_add_up(bounds, memories):
    spare = torch.zeros(8, dtype=torch.int32)
    outer = bounds.AccessRange("spare", None, spare.data_ptr(), 32)
    with bounds.guard_accesses([outer]):
        with bounds.guard_accesses(bounds.region_ranges(TABLE, memories[0])):
            launch_store(memories[0].local.data_ptr(), 4)
            launch_store(spare.data_ptr(), 8)
        with pytest.raises(MoelinkError, match="outside every known range"):
            launch_store(memories[0].local.data_ptr(), 4)
    launch_store(memories[0].local.data_ptr() + 16, 4)
    assert spare.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_whole_block_as_argument_does_not_open_its_padding(bounds, memories):
    block = memories[0].local.view(torch.int32)
    with bounds.guard_accesses(bounds.region_ranges(TABLE, memories[0])):
        store_at[(1,)](memories[0].pointers, block, 4, B=4)
        with pytest.raises(MoelinkError, match="after the end of 'counts' of rank 0"):
            store_at[(1,)](memories[0].pointers, block, 5, B=8)
