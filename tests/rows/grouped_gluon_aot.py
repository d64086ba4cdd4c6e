"""Compiles a grouped fp8 product in Gluon for sm_90, on a machine without a GPU: ``python grouped_gluon_aot.py many``,
or with ``few`` that of few rows. Prints a JSON object for each form.

Needs TRITON_INTERPRET unset.
"""

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from moelink.rows import grouped_gluon as many
from moelink.rows import grouped_gluon_few as few
from moelink_testing.lowering import Lowered, source

FIRST, SECOND, ODD, ONE = map(torch.Size, ([32, 4096, 7168], [32, 7168, 2048], [130, 200, 384], [1, 136, 128]))
"""Of DeepSeek-V3, with odd columns, and of one block."""
FORMS = {
    "many": {
        "DeepSeek-V3": (FIRST, "bf16"), "its second product": (SECOND, "bf16"), "odd columns": (ODD, "bf16"),
        "one block": (ONE, "fp32"),
    },
    "few": {
        "DeepSeek-V3": (FIRST, "bf16", 16), "its second product": (SECOND, "bf16", 32),
        "odd columns": (ODD, "fp32", 64),
    },
}  # fmt: skip
"""Shape of the weights, dtype of the output, and rows of a tile."""

GIVEN_BACK = r"wgmma\.wait_group\S*\s+0;(?:(?!wgmma).)*?bar\.sync[^;]*;(?:(?!bar\.sync).)*?mbarrier\.arrive\.shared"
"""A consumer waits for its products, all of its warps meet, and then a stage is given back."""


def launch_of(weight, tile_rows=None):
    """The kernel, the rows of its boxes of rows and weights, its constants, its options, and registers of a thread."""
    early = weight == SECOND
    if tile_rows is None:
        registers = [many.CONSUMER_REGISTERS, many.PRODUCER_REGISTERS]
        boxes, constants = (many.PART_ROWS, many.BLOCK), many.constants_of(weight, early=early)
        return many.grouped_gluon_kernel, boxes, constants, {}, registers
    most = few.REGISTERS[tile_rows]
    boxes, constants = (few.ROW_BOX, few.COLUMNS), few.constants_of(weight, tile_rows, early=early)
    return few.grouped_gluon_few_kernel, boxes, constants, {"maxnreg": most}, [most, few.PRODUCER_REGISTERS]


def compiled(weight, out, *rows):
    """The compiled kernel for weights of shape ``weight``, and the registers that it asks for."""
    kernel, boxes, constants, options, registers = launch_of(weight, *rows)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    codes, codes_of_weight = (f"tensordesc<fp8e4nv[{box}, 128],{layout!r}>" for box in boxes)
    arguments = {
        "codes": codes, "scales": "*fp32", "row_offsets": "*i32", "weight": codes_of_weight, "weight_scales": "*fp32",
        "out": f"*{out}", "rows": "i32",
    }  # fmt: skip
    made = source(kernel, arguments, {"S": constants})
    made = GluonASTSource(made.fn, made.signature, made.constants, made.attrs)
    options = {"num_warps": 4, "enable_fp_fusion": False, **options}
    binary = triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)
    stages = {name: code for name, code in binary.asm.items() if isinstance(code, str | bytes)}
    return Lowered("sm_90", stages, binary.metadata.shared), registers


def describe(name, form, registers):
    """Counts of what the kernel rests on."""
    text = form.assembly
    back = re.findall(GIVEN_BACK, text, re.S)
    return {
        "form": name, "wgmma": len(re.findall(r"wgmma\.mma_async\S*m64n\d+k32\S*\.e4m3\.e4m3", text)),
        "tma": len(re.findall(r"cp\.async\.bulk\.tensor\S*global", text)),
        "registers": list(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", text))),
        "wanted_registers": registers,
        "given_back": len(back), "local": form.stack, "shared": form.shared,
        "stays_in_cache": "createpolicy.fractional.L2::evict_last" in text,
        "narrow_stores": len(re.findall(r"st\.global\.(?!\S*v4\.b32)", text)),
    }  # fmt: skip


if __name__ == "__main__":
    for name, form in FORMS[sys.argv[1]].items():
        print(json.dumps(describe(name, *compiled(*form))), flush=True)
