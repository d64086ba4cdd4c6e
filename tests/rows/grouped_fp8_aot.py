"""Compiles the grouped fp8 product for a GPU that is not there: ``python grouped_fp8_aot.py sm_90``, and with ``mxfp4``
behind it the product by weights in mxfp4.

Needs TRITON_INTERPRET unset. Prints a JSON object for each form of tiles: the launch settings of the target, and few
rows without descriptors.
"""

import dataclasses
import json
import re
import sys

import torch

from moelink.rows import grouped_mxfp4
from moelink.rows.grouped_fp8 import (
    BLACKWELL,
    HOPPER,
    SMALL_CACHE,
    WITHOUT_FP8,
    constants_of,
    grouped_fp8_kernel,
)
from moelink_testing import lowered

WEIGHT = torch.Size([32, 4096, 7168])
"""Of DeepSeek-V3's gate and up, and of Qwen3-30B-A3B's."""


def compiled(target, tiles, mxfp4, biased):
    """The compiled kernel."""
    fp8 = target.startswith("sm")
    constants = constants_of(tiles, WEIGHT, operands="fp8" if fp8 else "fp16", native=fp8, biased=biased)
    kind = "fp8e4nv" if fp8 else "u8"

    def source(rows):
        return f"tensordesc<{kind}[{rows},128]>" if tiles.descriptors else f"*{kind}"

    arguments = {
        "codes": source(tiles.rows), "scales": "*fp32", "row_offsets": "*i32", "weight": source(tiles.columns),
        "weight_scales": "*fp32", "out": "*bf16", "rows": "i32", "least": "i32", "most": "i32",
    }  # fmt: skip
    if mxfp4:
        arguments |= {"weight": "*u8", "weight_scales": "*i32"}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": True}
    if tiles.registers:
        options["maxnreg"] = tiles.registers
    kernel = grouped_mxfp4.grouped_mxfp4_kernel if mxfp4 else grouped_fp8_kernel
    return lowered(kernel, arguments, {"S": constants}, target=target, **options)


def describe(name, form):
    text = form.assembly
    return {
        "form": name, "wgmma": len(re.findall(r"wgmma\.mma_async\S*\.e4m3\.e4m3", text)),
        "tcgen05": len(re.findall(r"tcgen05\.mma", text)), "tma": len(re.findall(r"cp\.async\.bulk\.tensor", text)),
        "local": form.stack, "shared": form.shared,
    }  # fmt: skip


if __name__ == "__main__":
    target, mxfp4 = sys.argv[1], sys.argv[2:] == ["mxfp4"]
    settings = {"sm_90": HOPPER, "sm_100": BLACKWELL, "sm_89": SMALL_CACHE}.get(target, WITHOUT_FP8)
    if mxfp4:
        settings = grouped_mxfp4.HOPPER if target == "sm_90" else grouped_mxfp4.OTHERS
    forms = {"few": settings.few, "many": settings.many}
    if target.startswith("sm") and not mxfp4:
        forms["few, pointers"] = dataclasses.replace(settings.few, descriptors=False)
    if mxfp4:
        forms |= {f"{name}, bias": tiles for name, tiles in forms.items()}
    for name, tiles in forms.items():
        made = compiled(target, tiles, mxfp4, biased="bias" in name)
        print(json.dumps(describe(name, made)), flush=True)
