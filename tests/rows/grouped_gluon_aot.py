"""Compiles the grouped fp8 product in Gluon for sm_90, on a machine without a GPU. Prints a JSON object for each form.

Needs TRITON_INTERPRET unset.
"""

import json
import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from moelink.rows.grouped_gluon import PART_ROWS, constants_of, grouped_gluon_kernel
from moelink_testing.lowering import Lowered, source

FORMS = {
    "DeepSeek-V3": (torch.Size([32, 4096, 7168]), "bf16"), "its second product": (torch.Size([32, 7168, 2048]), "bf16"),
    "odd columns": (torch.Size([130, 200, 384]), "bf16"), "one block": (torch.Size([1, 136, 128]), "fp32"),
}  # fmt: skip

GIVEN_BACK = r"wgmma\.wait_group\S*\s+0;(?:(?!wgmma).)*?bar\.sync[^;]*;(?:(?!bar\.sync).)*?mbarrier\.arrive\.shared"
"""A consumer waits for its products, all of its warps meet, and then a stage is given back."""


def compiled(weight, out):
    """The compiled kernel for weights of shape ``weight``."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    arguments = {
        "codes": f"tensordesc<fp8e4nv[{PART_ROWS}, 128],{layout!r}>", "scales": "*fp32", "row_offsets": "*i32",
        "weight": f"tensordesc<fp8e4nv[128, 128],{layout!r}>", "weight_scales": "*fp32", "out": f"*{out}",
        "rows": "i32",
    }  # fmt: skip
    made = source(grouped_gluon_kernel, arguments, {"S": constants_of(weight)})
    made = GluonASTSource(made.fn, made.signature, made.constants, made.attrs)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    binary = triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)
    return Lowered("sm_90", {k: v for k, v in binary.asm.items() if isinstance(v, str | bytes)}, binary.metadata.shared)


def describe(name, form):
    """Counts of what the kernel rests on."""
    text = form.assembly
    back = re.findall(GIVEN_BACK, text, re.S)
    return {
        "form": name, "wgmma": len(re.findall(r"wgmma\.mma_async\S*m64n128k32\S*\.e4m3\.e4m3", text)),
        "tma": len(re.findall(r"cp\.async\.bulk\.tensor\S*global", text)),
        "registers": re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", text),
        "given_back": len(back), "local": form.stack, "shared": form.shared,
        "narrow_stores": len(re.findall(r"st\.global\.b(?:8|16)\b", text)),
    }  # fmt: skip


if __name__ == "__main__":
    for name, form in FORMS.items():
        print(json.dumps(describe(name, compiled(*form))), flush=True)
