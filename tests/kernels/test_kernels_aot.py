"""Every kernel compiles for GPUs that are not there, and the instructions are the ones the protocol needs.

The quick tier compiles each entry kernel of the transport once for sm_90, but the fused ones, which are two others in
one, and brings a sample of all forms into the intermediate form. Other forms, sm_100 and gfx942 are in the full tier.
"""

from __future__ import annotations

import ast
import functools
import json
from collections import Counter
from pathlib import Path

import pytest
import triton
from triton.runtime import JITFunction

import moelink
from moelink.kernels.launch.cache_keys import settle_cache_key
from tests.support.processes import run_compiled

SOURCE = Path(moelink.__file__).parent
SPILLED = 0 if triton.__version__.startswith("3.6.") else 80
"""Bytes of local memory that products on rows may take in addition, compiled by another release of Triton than the one
that they were measured with."""


def output_of(script, *args, timeout=280):
    """Lines that ``script`` prints in a process where kernels are not interpreted (AMD may abort it)."""
    done = run_compiled(f"tests.{script}", *args, timeout=timeout)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout.splitlines()


def compiled(target, part="kernels", *prefixes):
    """What ``aot.py`` says of the kernels of one of its parts whose names begin with one of ``prefixes``."""
    return [json.loads(line) for line in output_of("kernels.aot", target, part, *prefixes) if line.startswith("{")]


ROLES = ("dispatch_", "combine_")


@pytest.mark.parametrize("target, part, count, prefixes", [
    pytest.param("sm_90", "kernels", 4, ROLES, id="sm_90-roles-4"),
    pytest.param("sm_90", "kernels", 6, (), id="sm_90-kernels-6"),
    pytest.param("sm_90", "variants", 17, (), id="sm_90-variants-17"),
    pytest.param("sm_100", "kernels", 6, (), id="sm_100-kernels-6"),
])  # fmt: skip
def test_memory_order_and_width_on_nvidia(target, part, count, prefixes):
    kernels = compiled(target, part, *prefixes)
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
        # The table of rows is read for addresses in three layouts. Words that all CTAs read at their start must not be.
        assert kernel["repeated_loads"] == (4 if "planned" in name else 0), f"{name} loads words of peers repeatedly"
        assert kernel["known_parameters"], f"{name}: only Triton's launcher, which is slower, can launch it"
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


def check_small(kernels):
    """The phases of the contract wait, copy and reduce; others are one CTA.

    Scales are stored in whole lines: columns by warps of 32 neighbours, 4 bytes each, as groups begin at any row; words
    of tiles 16 bytes a thread.
    """
    widths = {"scale_layout-fp8_block128": "st.global.b32", "scale_layout-nvfp4": "st.global.v4.b32"}
    for name, width in widths.items():
        stores = {op for op in kernels[name]["ops"] if op.startswith("st.global")}
        assert stores == {width}, (name, stores)
    for name, kernel in kernels.items():
        assert kernel["local"] == 0, f"{name} spills"
        assert kernel["unguarded"] == 0, f"{name}: a release without a barrier after its stores"
        assert kernel["fma"] == 0, f"{name} fuses products into sums"
        releases = any(".sys.release.exch" in op or ".release.sys.exch" in op for op in kernel["ops"])
        assert releases == (name in ("wait_phase", "reduce_phase", "give_up")), f"{name}: {kernel['ops']}"
    for name in ("copy_phase", "reduce_phase"):
        assert kernels[name]["ops"].get("st.global.v4.b32", 0) > 0, f"{name} stores in pieces of less than 16 bytes"


def check_home_formats(kernels):
    """What a thread encodes it stores in one piece: 8 codes of the 8 columns that it loaded."""
    for name, kernel in kernels.items():
        ops = kernel["ops"]
        assert any(".sys.release.exch" in op or ".release.sys.exch" in op for op in ops), name
        assert any(".sys.acquire" in op or ".acquire.sys" in op for op in ops), name
        assert kernel["unguarded"] == 0, f"{name}: a release without a barrier after its stores"
        assert kernel["local"] == 0, f"{name} spills"
        wide = "st.global.v2.b32" if "async" in name else "ld.global.v2.b32"
        assert ops.get(wide, 0) > 0, f"{name}: {ops}"


def check_rows_in_place(kernels):
    """Rows are neither read nor stored: the receiver with ``zero_copy`` has fewer instructions than the one that
    copies, and none of 16 bytes that loads."""
    for name, kernel in kernels.items():
        assert kernel["local"] == 0, f"{name} spills"
        assert kernel["unguarded"] == 0, f"{name}: a release without a barrier after its stores"
        assert name == "overwrite_expired_rows" or any(".acquire" in op for op in kernel["ops"]), name
        assert kernel["repeated_loads"] == 0, f"{name} loads words of peers repeatedly"
        assert ("ld.global.v4.b32" in kernel["ops"]) == name.endswith("-copied"), f"{name}: {kernel['ops']}"
        if name.endswith("-in_place"):
            copied = kernels[name.replace("-in_place", "-copied")]
            assert kernel["instructions"] < copied["instructions"], name
            assert kernel["bare_loads"] == 0 < copied["bare_loads"], f"{name} loads rows"


def check_own_rows(kernels):
    """As launched: 4 warps of 96 registers. The sender stores a row at one place, home loads one of two that came.

    Sums without flags, here those of layout "rank", spill 10 registers; they are faster all the same (docs/lab).
    """
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


def check_amd(kernels):
    for name, kernel in kernels.items():
        assert kernel["local"] == 0, f"{name} spills"
        assert any("store_dwordx4" in op for op in kernel["ops"]), name


@pytest.mark.parametrize("target, part, count, check", [
    ("sm_90", "small", 8, check_small),
    ("sm_90", "home", 8, check_home_formats), ("sm_90", "in_place", 5, check_rows_in_place),
    ("sm_90", "own_rows", 7, check_own_rows), ("gfx942", "kernels", 6, check_amd),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_compiled_kernels(target, part, count, check):
    kernels = {kernel["name"]: kernel for kernel in compiled(target, part)}
    assert len(kernels) == count
    check(kernels)


def test_what_all_warps_agree_on_passes_a_barrier():
    """A compiler that took a scalar for the same in all threads would leave it to each warp what it has seen. And a
    signal speaks for the stores of all threads."""
    lines = [line.split() for line in output_of("kernels.aot_agree")]
    assert [what for what, _ in lines] == ["block_uniform", "publish"] * 2
    assert all(int(count) >= 1 for _, count in lines), lines


@pytest.mark.parametrize("names", [
    ("collected_wait-None",), ("fused_combine-True",),
    ("dispatch_async", "dispatch_wait", "dispatch_async_cached", "fused_combine-False"),
    ("relays_async", "relays_async_cached", "relays_wait"), ("collected_async-None",),
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


SAMPLE = ("40", "7", "27")
"""Of 40 forms the eighth and the 28th."""


@functools.cache
def sample():
    """What ``aot_facts.py`` prints of a sample."""
    return output_of("kernels.aot_facts", *SAMPLE)


def facts():
    """What it says of all forms together."""
    return json.loads(sample()[-1])


def launched_kernels():
    """Names of ``triton.jit`` functions that host code of the library launches, and of those called ``..._kernel``.

    A function is launched as ``kernel[grid](...)``, or given to ``launch``, ``launch_tiles`` or a launcher's
    ``kernel``. The benchmark's kernels are its own.
    """
    files = [path for path in SOURCE.rglob("*.py") if "tools" not in path.parts]
    trees = [ast.parse(path.read_text()) for path in files]
    compiled = {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    }
    launched = {name for tree in trees for name in launched_in(tree)} & compiled
    return launched, {name for name in compiled if name.endswith("_kernel")}


def launched_in(tree):
    """Names that a file launches: of its own functions, of imported ones, and of those of imported modules."""
    known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            known |= {alias.asname or alias.name for alias in node.names}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function, given = call.func, []
        if isinstance(function, ast.Subscript):  # kernel[grid](...), settle_cache_key(kernel)[grid](...)
            given = [function.value, *(function.value.args if isinstance(function.value, ast.Call) else [])]
        elif ast.unparse(function).split(".")[-1] in ("kernel", "launch", "launch_tiles"):
            given = call.args
        for each in given:
            first, *_, last = ast.unparse(each).split(".") * 2
            if first in known:
                yield last


def test_every_kernel_that_is_launched_has_a_form():
    launched, named = launched_kernels()
    assert launched == named, "what the host launches, and nothing else, is called ..._kernel"
    missing = launched - facts()["kernels"].keys()
    assert not missing, f"{missing}: expected forms of every kernel, got none; add them to aot_forms.py or row_forms.py"


def test_every_constant_that_a_kernel_tests_has_two_values_among_the_forms():
    """A branch that no form takes would be in no print. Forms of kernels in Gluon are in ``rows.grouped_gluon_aot``."""
    tested = set()
    for path in (file for room in ("kernels", "rows", "tracing/device") for file in (SOURCE / room).rglob("*.py")):
        if path.name.startswith("grouped_gluon"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.If, ast.IfExp, ast.While)):
                tested |= {
                    name.attr for name in ast.walk(node.test)
                    if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id == "S"
                }  # fmt: skip
    values = {
        f"{name} of {kind}": count for kind, fields in facts()["values"].items() for name, count in fields.items()
    }
    assert tested <= {name.split()[0] for name in values}
    single = {name for name, count in values.items() if count == 1 and name.split()[0] in tested}
    assert not single, f"{single}: expected two values or more, got one; add a value to the switches"


def test_switches_that_follow_from_others_are_what_the_library_says():
    assert facts()["broken"] == []


UNREACHED = {
    "kernels/dispatch/padding.py": (1, "more experts on a rank than a step has elements"),
    "kernels/dispatch/unpack.py": (2, "scales in tiles are stored in words, so no single place of them is asked for"),
    "kernels/epilogues.py": (1, "interpreted"),
    "rows/grouped_fp8.py": (1, "interpreted"),
    "kernels/launch/sm_limit.py": (1, "interpreted"),
    "kernels/nodes/internode.py": (8, "interpreted: the ring of the network's proxy"),
    **{
        f"kernels/nodes/{name}.py": (count, "interpreted: past masked ranks, which NVSHMEM cannot lose")
        for name, count in (("level_rows", 15), ("levels", 2), ("past", 17), ("relay", 4))
    },
    "kernels/sync/signals.py": (1, "interpreted"),
    "tracing/device/stamps.py": (7, "interpreted"),
}
"""Files with statements that are in no form: how many, and why."""


@pytest.mark.parametrize("part", [SAMPLE, ()], ids=["sample", "all"])
def test_every_form_is_a_program(part):
    """And all of them together have every statement of every kernel."""
    *lines, end = sample() if part == SAMPLE else output_of("kernels.aot_facts", timeout=1500)
    left_out = [line for line in lines if line.startswith("in no form: ")]
    programs = lines[: len(lines) - len(left_out)]
    divisor, *parts = map(int, part or ("1", "0"))
    total = sum(json.loads(end)["kernels"].values())
    assert len(programs) == sum(number % divisor in parts for number in range(total))
    assert [line for line in programs if not line.endswith(": fine")] == []
    files = Counter(line.split(": ")[1] for line in left_out)
    assert files == ({} if part else {file: count for file, (count, _) in UNREACHED.items()}), "\n".join(left_out)


def test_prints_see_changes_and_nothing_else():
    """A sum in place of a product, a credit less, a row further; not a name, nor what a constant leaves out."""
    changed = [json.loads(line)["changed"] for line in output_of("kernels.planted_prints")]
    assert changed == [True, True, False, True, False]


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
