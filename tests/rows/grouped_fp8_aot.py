"""Compiles the grouped fp8 product for a GPU that is not there: ``python grouped_fp8_aot.py sm_90``.

Needs TRITON_INTERPRET unset. Prints a JSON object for each form of tiles: the launch settings of the target, and few
rows without descriptors.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moelink.kernels.grouped_fp8 import BLACKWELL, HOPPER, SMALL_CACHE, WITHOUT_FP8, constants_of, grouped_fp8_kernel

WEIGHT = torch.Size([32, 4096, 7168])


def compiled(target, tiles):
    """The assembly of the kernel, and its shared memory, for weights of DeepSeek-V3's gate and up."""
    fp8 = target.startswith("sm")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if fp8 else GPUTarget("hip", target, 64)
    constants = constants_of(tiles, WEIGHT, operands="fp8" if fp8 else "fp16", native=fp8)
    kind = "fp8e4nv" if fp8 else "u8"

    def source(rows):
        return f"tensordesc<{kind}[{rows},128]>" if tiles.descriptors else f"*{kind}"

    signature = {
        "codes": source(tiles.rows), "scales": "*fp32", "row_offsets": "*i32", "weight": source(tiles.columns),
        "weight_scales": "*fp32", "out": "*bf16", "rows": "i32", "least": "i32", "most": "i32", "S": "constexpr",
    }  # fmt: skip
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return triton.compile(
        ASTSource(grouped_fp8_kernel, signature, {"S": constants}, aligned), target=gpu, options=options
    )


def stack_of(cubin):
    """Bytes of stack a thread, which is where registers are spilled to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return sum(int(size) for size in re.findall(r"STACK:(\d+)", done.stdout))


def describe(form, binary):
    text = binary.asm.get("ptx") or binary.asm["amdgcn"]
    amd_stack = re.search(r"\.private_segment_fixed_size: (\d+)", text)
    local = stack_of(binary.asm["cubin"]) if amd_stack is None else int(amd_stack[1])
    return {
        "form": form, "wgmma": len(re.findall(r"wgmma\.mma_async\S*\.e4m3\.e4m3", text)),
        "tcgen05": len(re.findall(r"tcgen05\.mma", text)), "tma": len(re.findall(r"cp\.async\.bulk\.tensor", text)),
        "local": local, "shared": binary.metadata.shared,
    }  # fmt: skip


if __name__ == "__main__":
    target = sys.argv[1]
    settings = {"sm_90": HOPPER, "sm_100": BLACKWELL, "sm_89": SMALL_CACHE}.get(target, WITHOUT_FP8)
    forms = {"few": settings.few, "many": settings.many}
    if target.startswith("sm"):
        forms["few, pointers"] = dataclasses.replace(settings.few, descriptors=False)
    for form, tiles in forms.items():
        print(json.dumps(describe(form, compiled(target, tiles))), flush=True)
