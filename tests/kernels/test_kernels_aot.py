"""Every kernel compiles for GPUs that are not there, and the instructions are the ones the protocol needs."""

from __future__ import annotations

import json

import pytest
import triton
from triton.runtime import JITFunction

from moelink.kernels.launch.cache_keys import settle_cache_key
from moelink_testing.fingerprints import nameless
from tests.kernels.matrix_configs import CONFIGS
from tests.support.cases import FORMATS
from tests.support.processes import run_compiled


def output_of(script, *args):
    """Lines that ``script`` prints in a process where kernels are not interpreted (AMD may abort it)."""
    done = run_compiled(f"tests.{script}", *args)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout.splitlines()


def compiled(target, part="kernels", prefix=""):
    """What ``aot.py`` says of the kernels of one of its parts whose names begin with ``prefix``."""
    return [json.loads(line) for line in output_of("kernels.aot", target, part, prefix) if line.startswith("{")]


@pytest.mark.parametrize("target, part, count", [
    ("sm_90", "kernels", 6), ("sm_90", "variants", 17), ("sm_100", "kernels", 6)
])  # fmt: skip
def test_memory_order_and_width_on_nvidia(target, part, count):
    kernels = compiled(target, part)
    assert len(kernels) == count
    for kernel in kernels:
        name, ops = kernel["name"], kernel["ops"]
        assert any(".sys.release.exch" in op or ".release.sys.exch" in op for op in ops), name
        assert any(".sys.acquire" in op or ".acquire.sys" in op for op in ops), name
        # To this device alone a launch says only that it has cleared the sums it read (``kernels.sync.lamport_slots``).
        near = {op for op in ops if ".gpu.release" in op or ".cta.release" in op}
        assert near == ({"atom.global.gpu.release.add.u64"} if name == "without_flags_combine_wait" else set()), name
        assert kernel["unguarded"] == 0, f"{name}: a release without a barrier after its stores"
        assert kernel["before_the_wait"] == 0, f"{name} does not wait for the launch before it, or not as its first act"
        # At its end, and where it waits for other ranks and then works, after the last wait.
        assert kernel["allows"] >= (1 if "async" in name else 2), f"{name} allows the next launch at its end only"
        assert kernel["local"] == 0, f"{name} spills"
        # Triton 3.6 reorders a reshaped block of values on its way to a histogram, but not the block of its mask.
        assert kernel["masked_histograms"] == 0, f"{name} counts other slots than the mask says"
        assert ops.get("st.global.v4.b32", 0) > 0, f"{name} copies rows in pieces of less than 16 bytes: {ops}"
        assert not any(op in ("st.global.b16", "ld.global.b16") for op in ops), f"{name}: {ops}"
        if "dispatch" in name:
            # The value would be moved in behind the load, which no prefetch survives.
            assert kernel["bare_loads"] > 0, f"{name} waits for rows where it begins to load them"
        # Of many tokens: what a receiver stores, what a sender of dispatch and home read. Up to 1024: experts' rows.
        assert ("st" in kernel["once"]) == name.startswith(("dispatch_wait", "fused_dispatch")), name
        reads = name.startswith(("dispatch_async", "combine_wait", "fused", "without_flags"))
        assert ("ld" in kernel["once"]) == reads, name
        if "dispatch_async" in name:
            # Once a piece, for its scales, and not once more for each of the 8 ranks.
            pieces = ops["st.global.v4.b32"] // 8
            assert kernel["barriers_between_rows"] <= 3 * pieces, f"{name} rearranges a piece for every rank"
        if "combine" in name:
            assert kernel["fma"] == 0, f"{name} fuses products into sums"


@pytest.mark.parametrize("prefix, count", [("combine_async-mxfp8-True", 1), ("", 8)], ids=["one", "all"])
def test_rows_in_a_combine_format(prefix, count):
    """What a thread encodes it stores in one piece: 8 codes of the 8 columns that it loaded."""
    kernels = compiled("sm_90", "home", prefix)
    assert len(kernels) == count
    for kernel in kernels:
        name, ops = kernel["name"], kernel["ops"]
        assert any(".sys.release.exch" in op or ".release.sys.exch" in op for op in ops), name
        assert any(".sys.acquire" in op or ".acquire.sys" in op for op in ops), name
        assert kernel["unguarded"] == 0, f"{name}: a release without a barrier after its stores"
        assert kernel["local"] == 0, f"{name} spills"
        wide = "st.global.v2.b32" if "async" in name else "ld.global.v2.b32"
        assert ops.get(wide, 0) > 0, f"{name}: {ops}"


@pytest.mark.parametrize("prefix, count", [("dispatch_wait-", 2), ("", 5)], ids=["one", "all"])
def test_rows_in_place_are_neither_read_nor_stored(prefix, count):
    """The receiver with ``zero_copy`` has fewer instructions than the one that copies, and none of 16 bytes that
    loads."""
    kernels = {kernel["name"]: kernel for kernel in compiled("sm_90", "in_place", prefix)}
    assert len(kernels) == count
    for name, kernel in kernels.items():
        assert kernel["local"] == 0, f"{name} spills"
        assert kernel["unguarded"] == 0, f"{name}: a release without a barrier after its stores"
        assert name == "spoil_rows" or any(".acquire" in op for op in kernel["ops"]), name
        assert ("ld.global.v4.b32" in kernel["ops"]) == name.endswith("-copied"), f"{name}: {kernel['ops']}"
        if name.endswith("-in_place"):
            copied = kernels[name.replace("-in_place", "-copied")]
            assert kernel["instructions"] < copied["instructions"], name
            assert kernel["bare_loads"] == 0 < copied["bare_loads"], f"{name} loads rows"


@pytest.mark.parametrize("prefix, count", [("rank-4096", 3), ("", 7)], ids=["one", "all"])
def test_own_rows_that_stay_are_added_from_registers(prefix, count):
    """As launched: 4 warps of 96 registers. The sender stores a row at one place, home loads one of two that came.

    Sums without flags, here those of layout "rank", spill 10 registers; they are faster all the same (docs/lab).
    """
    kernels = {kernel["name"]: kernel for kernel in compiled("sm_90", "own_rows", prefix)}
    assert len(kernels) == count
    for name, kernel in kernels.items():
        ops = kernel["ops"]
        assert kernel["stack"] <= (40 if name.startswith("rank") and "async" not in name else 0), f"{name} spills"
        assert kernel["local"] == 0, f"{name} has tables in memory"
        assert kernel["unguarded"] == 0, f"{name}: a release without a barrier after its stores"
        assert any(".sys.acquire" in op or ".acquire.sys" in op for op in ops), name
        assert kernel["fma"] == 0, f"{name} fuses products into sums"
        assert min(ops.get(wide, 0) for wide in ("ld.global.v4.b32", "st.global.v4.b32")) > 0, f"{name}: {ops}"
        assert not any(op in ("st.global.b16", "ld.global.b16") for op in ops), f"{name}: {ops}"
        if name == "expert-4096-stay":
            travel = kernels[name.replace("-stay", "-travel")]
            assert kernel["ops"] != travel["ops"], f"{name} is the form in which own rows travel"


def test_scales_are_laid_out_in_whole_lines():
    """Columns by warps of 32 neighbours, 4 bytes each, as groups begin at any row; words of tiles 16 bytes a thread."""
    widths = {"scale_layout-fp8_block128": "st.global.b32", "scale_layout-nvfp4": "st.global.v4.b32"}
    kernels = {kernel["name"]: kernel for kernel in compiled("sm_90", "scales")}
    assert kernels.keys() == widths.keys()
    for name, width in widths.items():
        stores = {op for op in kernels[name]["ops"] if op.startswith("st.global")}
        assert stores == {width}, (name, stores)
        assert kernels[name]["local"] == 0, f"{name} spills"


def test_what_all_warps_agree_on_passes_a_barrier():
    """A compiler that took a scalar for the same in all threads would leave it to each warp what it has seen. And a
    signal speaks for the stores of all threads."""
    lines = [line.split() for line in output_of("kernels.aot_agree")]
    assert [what for what, _ in lines] == ["block_uniform", "publish"] * 2
    assert all(int(count) >= 1 for _, count in lines), lines


@pytest.mark.parametrize("prefix, count", [("combine_async", 1), ("", 6)], ids=["one", "all"])
def test_compiles_for_amd(prefix, count):
    kernels = compiled("gfx942", "kernels", prefix)
    assert len(kernels) == count
    for kernel in kernels:
        assert kernel["local"] == 0, f"{kernel['name']} spills"
        assert any("store_dwordx4" in op for op in kernel["ops"]), kernel["name"]


@pytest.mark.parametrize("names", [
    ("fused_combine-True",), ("dispatch_async", "dispatch_wait", "dispatch_async_cached", "fused_combine-False"),
    ("relays_async", "relays_async_cached", "relays_wait"), ("collected_async-None", "collected_wait-None"),
    ("collected_async-fp8_block128", "collected_wait-fp8_block128"),
], ids=str)  # fmt: skip
def test_between_nodes_nvshmem_is_linked_in_and_puts_follow_a_fence(names):
    lines = output_of("nodes.aot_nodes", *names)
    if lines[0].startswith("no library"):
        pytest.skip(lines[0])  # pyproject.toml asks for the library on Linux x86-64 alone, where its wheels are
    kernels = [json.loads(line) for line in lines]
    assert [kernel["name"] for kernel in kernels] == list(names)
    for kernel in kernels:
        name, ops = kernel["name"], kernel["ops"]
        assert kernel["puts"] > 0, f"{name} puts nothing"
        # At least one each: a compiler that unrolls loops over ranks repeats them.
        assert kernel["transfers"] >= kernel["puts"], f"{name}: NVSHMEM's device code is not in: {kernel}"
        assert kernel["undefined"] == [], name
        assert kernel["state"], f"{name} has no device state for NVSHMEM to fill in"
        assert kernel["operations"] == [9], (
            f"{name}: signals are not set (NVSHMEM_SIGNAL_SET) but {kernel['operations']}"
        )
        assert kernel["unfenced"] == 0, f"{name}: a put after a store, without a system-wide fence between the two"
        assert kernel["unguarded"] == 0, f"{name}: a release without a barrier after its stores"
        assert ops.get("membar.sys", 0) >= kernel["puts"], f"{name}: NVSHMEM's own fence before its signal is gone"
        assert any(".sys.acq_rel" in op for op in ops), name
        assert any(".sys.release.exch" in op for op in ops), name
        assert any(".sys.acquire" in op for op in ops), name
        # Only the count of a role's CTAs is for this device alone.
        assert not any((".gpu.release" in op and ".add." not in op) or ".cta.release" in op for op in ops), name
        assert kernel["local"] == 0, f"{name} uses local memory"


@pytest.mark.parametrize("parts", [(0,), range(1, 22), range(22, 43), range(43, 64)], ids=str)
def test_every_form_is_a_program(parts):
    *lines, total = output_of("kernels.aot_forms", "64", *map(str, parts))
    assert int(total) > 3 * len(CONFIGS)
    assert len(lines) == sum(number % 64 in parts for number in range(int(total)))
    between_nodes = range(int(total) - 3 * len(FORMATS), int(total))  # the last ones
    assert sum(line.startswith("nodes of 2: ") for line in lines) == sum(n % 64 in parts for n in between_nodes)
    assert all(line.endswith(": fine") for line in lines)


def test_names_and_places_of_constants_do_not_matter_for_what_a_kernel_is():
    line = "%b = tt.load %x, %a : i32 loc(#loc7)"
    assert nameless(f"%a = arith.constant 1 : i32\n{line}") == "%2 = tt.load %1, <1 : i32> : i32"
    kernel = "  %c = arith.constant 2 : i32\n  %m = arith.muli %y, %c : i32\n  tt.store %p, %m loc(#loc1)"
    moved = "  %m_1 = arith.muli %z, %k : i32 loc(#loc4)\n  tt.store %p, %m_1\n#loc4 = loc(unknown)"
    assert nameless(kernel) == nameless("  %k = arith.constant 2 : i32\n" + moved)
    assert nameless(kernel) != nameless("  %k = arith.constant 3 : i32\n" + moved)
    assert nameless(kernel) != nameless(kernel.replace("%y, %c", "%y, %y"))


def test_cache_keys_do_not_depend_on_what_came_before():
    forwards, backwards = (output_of("kernels.cache_keys", order) for order in ("forwards", "backwards"))
    assert forwards == backwards
    assert len(set(line.split()[1] for line in forwards)) == len(forwards)


@triton.constexpr_function
def width(n):
    return 2 * n


@triton.constexpr_function
def other_width(n):
    return 4 * n


def store_width(p):
    p.store(width(8))


def test_a_cache_key_covers_functions_that_run_as_a_kernel_compiles(monkeypatch):
    key = settle_cache_key(JITFunction(store_width)).cache_key
    assert settle_cache_key(JITFunction(store_width)).cache_key == key
    monkeypatch.setitem(globals(), "width", other_width)
    assert settle_cache_key(JITFunction(store_width)).cache_key != key
