"""Prints: the same for a kernel that was moved and renamed, another one for a kernel that does something else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moelink_testing import Lowered, prints
from moelink_testing.fingerprints import nameless

BEFORE = '''
import triton
import triton.language as tl


@triton.jit
def scaled(x, factor):
    """Twice, or so."""
    return x * factor


@triton.jit
def kernel(x, y, n, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + i, scaled(tl.load(x + i, mask=i < n), 2.0), mask=i < n)
'''
MOVED = """
import triton
import triton.language as tl

# It was somewhere else, under another name; its arguments were in another order.


@triton.jit
def times(value, by):
    return value * by


@triton.jit
def copy_rows(destination, source, BLOCK: tl.constexpr, count):
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < count
    loaded = tl.load(source + at, mask=inside)
    tl.store(destination + at, times(loaded, 2.0), mask=inside)
"""
SCRIPT = """
import json
from moelink_testing import lowered, prints
import before, moved, other, wider

kinds = {"x": "*fp32", "y": "*fp32", "n": "i32"}
renamed = {"destination": "*fp32", "source": "*fp32", "count": "i32"}
forms = {
    "before": lowered(before.kernel, kinds, {"SIZE": 128}, until="ttir"),
    "moved": lowered(moved.copy_rows, renamed, {"BLOCK": 128}, until="ttir"),
    "other": lowered(other.kernel, kinds, {"SIZE": 128}, until="ttir"),
    "wider": lowered(wider.kernel, kinds, {"SIZE": 128}, until="ttir"),
    "larger": lowered(before.kernel, kinds, {"SIZE": 256}, until="ttir"),
    "half": lowered(before.kernel, {**kinds, "y": "*fp16"}, {"SIZE": 128}, until="ttir"),
}
print(json.dumps(prints(forms)))
"""


def test_prints_are_of_what_a_kernel_does(tmp_path: Path):
    sources = {
        "before": BEFORE, "moved": MOVED, "other": BEFORE.replace("2.0", "3.0"),
        "wider": BEFORE.replace("mask=i < n), 2.0), mask=i < n", "mask=i < n), 2.0)"), "script": SCRIPT,
    }  # fmt: skip
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("moved") == found["before"]
    assert len(set(found.values())) == len(found) == 5, "each does something else"
    assert all(len(value) == 16 for value in found.values())


def test_names_and_places_of_constants_do_not_matter():
    line = "%b = tt.load %x, %a : i32 loc(#loc7)"
    assert nameless(f"%a = arith.constant 1 : i32\n{line}") == "%2 = tt.load %1, <1 : i32> : i32"
    kernel = "  %c = arith.constant 2 : i32\n  %m = arith.muli %y, %c : i32\n  tt.store %p, %m loc(#loc1)"
    moved = "  %m_1 = arith.muli %z, %k : i32 loc(#loc4)\n  tt.store %p, %m_1\n#loc4 = loc(unknown)"
    assert nameless(kernel) == nameless("  %k = arith.constant 2 : i32\n" + moved)
    assert nameless(kernel) != nameless("  %k = arith.constant 3 : i32\n" + moved)
    assert nameless(kernel) != nameless(kernel.replace("%y, %c", "%y, %y"))


def test_the_order_of_accesses_matters():
    one, two = "  %a = tt.load %p : i32", "  tt.store %q, %c : i32"
    assert nameless(f"{one}\n{two}") != nameless(f"{two}\n{one}")


def test_forms_have_names_of_their_own_and_an_intermediate_form():
    form = Lowered("sm_90", {"ttir": "tt.func public @kernel() {\n  tt.return\n}"})
    assert prints([("a", form), ("b", form)]) == prints({"a": form, "b": form})
    assert len(set(prints({"a": form, "b": form}).values())) == 1
    with pytest.raises(ValueError, match="forms: expected a name of its own for each, got 'a' twice"):
        prints([("a", form), ("a", form)])
    with pytest.raises(ValueError, match="until: expected a form lowered as far as ttir, got one with ir"):
        prints({"a": Lowered("sm_90", {"ir": ""})})
