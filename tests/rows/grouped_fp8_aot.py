"""Compiles the grouped fp8 product for a GPU that is not there: ``python grouped_fp8_aot.py sm_90``.

Needs TRITON_INTERPRET unset. Prints a JSON object for each form of tiles: the launch settings of the target, and few
rows without descriptors.
"""

import dataclasses
import json
import re
import sys

import torch

from moelink.rows.grouped_fp8 import BLACKWELL, HOPPER, SMALL_CACHE, WITHOUT_FP8, constants_of, grouped_fp8_kernel
from moelink_testing import lowered

WEIGHT = torch.Size([32, 4096, 7168])


def compiled(target, tiles):
    """The compiled kernel for weights of DeepSeek-V3's gate and up."""
    fp8 = target.startswith("sm")
    constants = constants_of(tiles, WEIGHT, operands="fp8" if fp8 else "fp16", native=fp8)
    kind = "fp8e4nv" if fp8 else "u8"

    def source(rows):
        return f"tensordesc<{kind}[{rows},128]>" if tiles.descriptors else f"*{kind}"

    arguments = {
        "codes": source(tiles.rows), "scales": "*fp32", "row_offsets": "*i32", "weight": source(tiles.columns),
        "weight_scales": "*fp32", "out": "*bf16", "rows": "i32", "least": "i32", "most": "i32",
    }  # fmt: skip
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": True}
    return lowered(grouped_fp8_kernel, arguments, {"S": constants}, target=target, **options)


def describe(name, form):
    text = form.assembly
    return {
        "form": name, "wgmma": len(re.findall(r"wgmma\.mma_async\S*\.e4m3\.e4m3", text)),
        "tcgen05": len(re.findall(r"tcgen05\.mma", text)), "tma": len(re.findall(r"cp\.async\.bulk\.tensor", text)),
        "local": form.stack, "shared": form.shared,
    }  # fmt: skip


if __name__ == "__main__":
    target = sys.argv[1]
    settings = {"sm_90": HOPPER, "sm_100": BLACKWELL, "sm_89": SMALL_CACHE}.get(target, WITHOUT_FP8)
    forms = {"few": settings.few, "many": settings.many}
    if target.startswith("sm"):
        forms["few, pointers"] = dataclasses.replace(settings.few, descriptors=False)
    for name, tiles in forms.items():
        print(json.dumps(describe(name, compiled(target, tiles))), flush=True)
