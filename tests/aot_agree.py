"""Compile ``signals.block_uniform`` for a GPU that is not there, and print how many barriers are in it, for 4 and 8
warps.

Run without TRITON_INTERPRET: ``python aot_agree.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moelink.kernels.sync.signals import block_uniform


@triton.jit
def looks(word, out):
    """What all threads of a program make of a word that changes."""
    seen = tl.load(word, volatile=True)
    tl.store(out + tl.arange(0, 256), tl.zeros([256], tl.int32) + block_uniform(seen))


def main() -> None:
    for num_warps in (4, 8):
        source = ASTSource(looks, {"word": "*i32", "out": "*i32"}, {}, {})
        binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        print(binary.asm["ptx"].count("bar.sync"))


if __name__ == "__main__":
    main()
