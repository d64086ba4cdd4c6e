"""Compile pieces of ``signals`` for a GPU that is not there, each for 4 and 8 warps, and print what is in them:
``block_uniform`` and how many barriers, ``publish`` and 1 if a barrier is between the stores and the signal, else 0.

Run without TRITON_INTERPRET: ``python aot_agree.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moelink.kernels.sync.signals import block_uniform, publish
from tests.kernels.aot import MEMORY, unguarded


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


def ptx_of(kernel, types: dict[str, str], num_warps: int) -> str:
    source = ASTSource(kernel, types, {}, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["ptx"]


def main() -> None:
    for num_warps in (4, 8):
        print("block_uniform", ptx_of(looks, {"word": "*i32", "out": "*i32"}, num_warps).count("bar.sync"))
        ops = MEMORY.findall(ptx_of(tells, {"out": "*i32", "flags": "*i64"}, num_warps))
        print("publish", int(any(".release." in op for op in ops) and unguarded(ops) == 0))


if __name__ == "__main__":
    main()
