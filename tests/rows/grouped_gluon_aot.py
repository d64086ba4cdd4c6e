"""Compiles a grouped fp8 product in Gluon for sm_90, on a machine without a GPU: ``python grouped_gluon_aot.py many``,
or with ``few`` that of few rows, or with ``mxfp4`` that of few rows and weights in mxfp4. Prints a JSON object for each
form.

Needs TRITON_INTERPRET unset.
"""

import json
import re
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from moelink.kernels.launch.row_launch import Block, PreparedRows
from moelink.rows import grouped_gluon as many
from moelink.rows import grouped_gluon_few as few
from moelink.rows import grouped_gluon_mxfp4 as mxfp4
from moelink_testing.lowering import Lowered, source

FIRST, SECOND, ODD, ONE = map(torch.Size, ([32, 4096, 7168], [32, 7168, 2048], [130, 200, 384], [1, 136, 128]))
"""Of DeepSeek-V3, with odd columns, and of one block."""
SEVEN = torch.Size([130, 200, 896])
"""With odd columns, and blocks as many as the name says. With 2 to 5 blocks the loop of the product of many rows may be
unrolled; then registers are spilled in each tile."""
FORMS = {
    "many": {
        "DeepSeek-V3": (FIRST, "bf16"), "its second product": (SECOND, "bf16"), "odd columns": (SEVEN, "bf16"),
        "one block": (ONE, "fp32"), "three blocks": (ODD, "bf16"),
    },
    "few": {
        "DeepSeek-V3": (FIRST, "bf16", 16), "its second product": (SECOND, "bf16", 32),
        "odd columns": (ODD, "fp32", 64),
    },
    "mxfp4": {
        "DeepSeek-V3": (FIRST, "bf16", 16), "its second product": (SECOND, "bf16", 32),
        "odd columns, with biases": (ODD, "fp32", 64),
    },
}  # fmt: skip
"""Shape of the weights, dtype of the output, and rows of a tile."""

MET = r"bar\.sync[^;]*;(?:(?!bar\.sync|try_wait|wgmma).)*?mbarrier\.arrive\.shared"
"""All warps of a consumer, which has waited for its products or for a block that it does not read, meet, and then a
stage is given back."""


def block(dtype, shape, layout=many.IN_SHARED):
    """Triton's name of the type of a descriptor."""
    return f"tensordesc<{dtype}{list(shape)},{layout!r}>"


def launch_of(kind, weight, tile_rows=None):
    """The kernel, its constants, the types of rows and of the weight's tensors, its options, consumers, and registers
    of a thread."""
    early = weight == SECOND
    if kind == "many":
        blocks = block("fp8e4nv", (many.PART_ROWS, 128)), {"weight": block("fp8e4nv", (128, 128))}
        registers = [many.CONSUMER_REGISTERS, many.PRODUCER_REGISTERS]
        return many.grouped_gluon_kernel, many.constants_of(weight, early=early), *blocks, {}, 2, registers
    if kind == "few":
        blocks = block("fp8e4nv", (few.ROW_BOX, 128)), {"weight": block("fp8e4nv", (few.COLUMNS, 128))}
        constants, most = few.constants_of(weight, tile_rows, early=early), few.REGISTERS[tile_rows]
        registers = [most, few.PRODUCER_REGISTERS]
        return few.grouped_gluon_few_kernel, constants, *blocks, {"maxnreg": most}, 2, registers
    form, constants = mxfp4.FORMS[tile_rows], mxfp4.constants_of(weight, tile_rows, biased=weight == ODD, early=early)
    columns = few.COLUMNS * form.parts
    by = {
        "weight": block("u8", (columns // 4, 128)), "words": block("i32", (1, columns), mxfp4.WORDS_IN_SHARED),
        "weight_scales": "*i32",
    }  # fmt: skip
    registers, options = [form.of_consumer, few.PRODUCER_REGISTERS], {"maxnreg": form.registers}
    rows = block("fp8e4nv", (few.ROW_BOX, 128))
    return mxfp4.grouped_gluon_mxfp4_kernel, constants, rows, by, options, form.parts, registers


def is_prepared(binary):
    """Whether ``row_launch`` knows what this release of Triton says of the kernel, and the parameters that it makes."""
    entry = binary.asm["ptx"].partition(".entry")[2].partition(")")[0]
    found = re.findall(r"\.param[^,]*? \.[bus](\d+)[^,\[]*(?:\[(\d+)\])?", entry)
    sizes = [int(bytes_ or int(bits) // 8) for bits, bytes_ in found]
    played = SimpleNamespace(
        parameters=lambda _: [(0, size) for size in sizes], launch=None, has_dependent_launches=lambda: True
    )
    loaded = SimpleNamespace(
        metadata=binary.metadata, src=binary.src, packed_metadata=binary.packed_metadata, asm=binary.asm, function=7
    )
    codes = torch.empty(256, 512, dtype=torch.uint8, device="meta")
    kinds = [kind for kind in binary.src.signature.values() if kind != "constexpr"]
    given = [Block(codes, (16, 128)) if kind.startswith("tensordesc") else 0 for kind in kinds]
    return PreparedRows.of(loaded, given, played) is not None


def compiled(kind, weight, out, *rows):
    """The compiled kernel for weights of shape ``weight``, whether it is prepared, its consumers, and the registers
    that it asks for."""
    kernel, constants, codes, by, options, consumers, registers = launch_of(kind, weight, *rows)
    arguments = {
        "codes": codes, "scales": "*fp32", "row_offsets": "*i32", "weight_scales": "*fp32", **by, "out": f"*{out}",
        "rows": "i32", "counter": "*i32",
    }  # fmt: skip
    made = source(kernel, arguments, {"S": constants})
    made = GluonASTSource(made.fn, made.signature, made.constants, made.attrs)
    options = {"num_warps": 4, "enable_fp_fusion": False, **options}
    binary = triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)
    stages = {name: code for name, code in binary.asm.items() if isinstance(code, str | bytes)}
    ready = is_prepared(binary)
    return Lowered("sm_90", stages, binary.metadata.shared), ready, consumers, registers


def describe(name, form, ready, consumers, registers):
    """Counts of what the kernel rests on."""
    text = form.assembly
    met = len(re.findall(MET, text, re.S))
    of_producer = len(re.findall(MET.replace("sync", r"warp\.sync"), text, re.S))
    return {
        "form": name, "consumers": consumers, "prepared": ready,
        "wgmma": len(re.findall(r"wgmma\.mma_async\S*m64n\d+k32\S*\.e4m3\.e4m3", text)),
        "waits": len(re.findall(r"wgmma\.wait_group", text)),
        "from_registers": len(re.findall(r"wgmma\.mma_async\S* \{[^}]*\}, \{", text)),
        "ldmatrix": len(re.findall(r"ldmatrix\S*\.x4", text)),
        "tma": len(re.findall(r"cp\.async\.bulk\.tensor\S*global", text)),
        "registers": list(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", text))),
        "wanted_registers": registers,
        "given_back": met, "alone": len(re.findall(r"mbarrier\.arrive\.shared", text)) - met - of_producer,
        "local": form.stack, "shared": form.shared,
        "stays_in_cache": "createpolicy.fractional.L2::evict_last" in text,
        "narrow_stores": len(re.findall(r"st\.global\.(?!\S*v4\.b32)", text)),
    }  # fmt: skip


if __name__ == "__main__":
    kind = sys.argv[1]
    for name, form in FORMS[kind].items():
        print(json.dumps(describe(name, *compiled(kind, *form))), flush=True)
