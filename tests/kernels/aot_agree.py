"""Compile pieces of ``signals`` for a GPU that is not there, each for 4 and 8 warps, and print what is in them:
``block_uniform`` and how many barriers, ``publish`` and 1 if a barrier is between the stores and the signal, else 0.

Run without TRITON_INTERPRET: ``python aot_agree.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moelink.kernels.sync.signals import block_uniform, publish
from moelink_testing import lowered


@triton.jit
def looks(word, out):
    """What all threads of a program make of a word that changes."""
    seen = tl.load(word, volatile=True)
    tl.store(out + tl.arange(0, 256), tl.zeros([256], tl.int32) + block_uniform(seen))


@triton.jit
def tells(out, flags):
    """All threads store, then one of them says so."""
    i = tl.arange(0, 256)
    tl.store(out + i, i)
    publish(flags + i, i < 1, tl.zeros([256], tl.int64) + 1)


def main() -> None:
    for num_warps in (4, 8):
        form = lowered(looks, {"word": "*i32", "out": "*i32"}, num_warps=num_warps, enable_fp_fusion=False)
        print("block_uniform", form.assembly.count("bar.sync"))
        form = lowered(tells, {"out": "*i32", "flags": "*i64"}, num_warps=num_warps, enable_fp_fusion=False)
        print("publish", int(any(".release." in op for op in form.memory) and form.unguarded == 0))


if __name__ == "__main__":
    main()
