"""Compiles the kernels of a layer's rows (gated activation, dequantisation, gradients) for a GPU that is not there.

``python row_kernels.py sm_90`` needs TRITON_INTERPRET unset. No spills; rows are read and written in wide words.
"""

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moelink.formats import get_format
from moelink.rows.common_kernel import RowConstants, even_groups, format_constants, group_elements
from moelink.rows.dequantize_kernel import dequantize_rows_kernel
from moelink.rows.gated_kernel import gated_activation_kernel, gated_gradient_kernel
from moelink.rows.scale_rows_kernel import scale_rows_kernel

WIDE = re.compile(r"(?:ld|st)\.global\S*\.(?:v4\.b32|v2\.b64|v2\.b32|b64|v4\.f32)")


def compiled(target, kernel, signature, constants):
    """The assembly of ``kernel`` for a target without such a GPU; pointers are multiples of 16 bytes."""
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    signature = {**signature, "rows": "i32", "S": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    options = {"enable_fp_fusion": kernel in (gated_activation_kernel, gated_gradient_kernel)}
    return triton.compile(ASTSource(kernel, signature, {"S": constants}, aligned), target=gpu, options=options).asm


def check(asm, what):

    if "amdgcn" in asm:
        assert ".private_segment_fixed_size: 0" in asm["amdgcn"], what
        return
    assert ".local" not in asm["ptx"], what
    words = WIDE.findall(asm["ptx"])
    assert any(word.startswith("ld") for word in words), f"{what}: narrow loads"
    assert any(word.startswith("st") for word in words), f"{what}: narrow stores"


def check_gated(target, kind, dtype, inner):
    group = min(128, inner & -inner)
    constants = RowConstants(
        HIDDEN_SIZE=inner, GROUP_SIZE=group, GROUPS_PER_STEP=2048 // group, NUM_GROUPS=32, KIND=kind, ALPHA=1.702,
        LIMIT=7.0, DOUBLE=dtype == "fp64", NATIVE_CASTS=target.startswith("sm"),
    )  # fmt: skip
    stored = "*u16" if dtype == "bf16" else f"*{dtype}"
    forward = {"gate_up": f"*{dtype}", "row_offsets": "*i32", "out": stored}
    backward = {"grad": f"*{dtype}", "gate_up": f"*{dtype}", "row_offsets": "*i32", "dgate_up": stored}
    check(compiled(target, gated_activation_kernel, forward, constants), f"{target} {kind} {dtype}")
    check(compiled(target, gated_gradient_kernel, backward, constants), f"{target} gradient of {kind} {dtype}")


def check_dequantize(target, name, dtype, hidden=7168, by_row=False):
    fmt = get_format(name)
    codec, one_scale = fmt.codec(), name == "fp8_token"
    group = even_groups(hidden) if one_scale else group_elements(fmt, hidden)
    constants = RowConstants(
        **format_constants(fmt, hidden, 32, group, 2048 // group), CODE_FN=codec.decode,
        SCALE_LAYOUT="row_major" if by_row else fmt.scale_layout.name, ONE_SCALE=one_scale,
        HAS_INPUT_SCALE=name == "nvfp4", NATIVE_CASTS=target.startswith("sm"),
    )  # fmt: skip
    signature = {
        "tokens": f"*u{8 * codec.ELEMENT_BYTES}", "scales": "*fp32" if codec.SCALE_BYTES == 4 else "*u8",
        "row_offsets": "*i32", "scales_offsets": "*i32", "input_scale": "*fp32",
        "out": "*u16" if dtype == "bf16" else f"*{dtype}",
    }  # fmt: skip
    check(compiled(target, dequantize_rows_kernel, signature, constants), f"{target} {name} to {dtype}")


def check_scale_rows(target, dtype, to, hidden=7168, parts=("weights", "out", "dots")):
    """``parts``: of the kernel, as its HAS_ constants name them; "slot": of one slot."""
    constants = RowConstants(
        HIDDEN_SIZE=hidden, STRIDE=hidden, COLUMNS=1024, ROWS=2, NUM_GROUPS=32,
        HAS_WEIGHTS="weights" in parts, HAS_OUT="out" in parts, HAS_DOTS="dots" in parts, BY_SLOT="slot" in parts,
        DOUBLE="fp64" in (dtype, to), NATIVE_CASTS=target.startswith("sm"),
    )  # fmt: skip
    number = "*fp64" if "fp64" in (dtype, to) else "*fp32"
    signature = {
        "d": f"*{dtype}", "other": f"*{dtype}", "weights": number, "src_info": "*i32", "row_offsets": "*i32",
        "out": "*u16" if to == "bf16" else f"*{to}", "dots": number, "rows": "i32", "slot": "i32",
    }  # fmt: skip
    check(compiled(target, scale_rows_kernel, signature, constants), f"{target} {'+'.join(parts)} {dtype} to {to}")


if __name__ == "__main__":
    target = sys.argv[1]
    for kind in ("silu", "gelu", "gelu_tanh", "clamped"):
        check_gated(target, kind, "bf16", 768)
    check_gated(target, "silu", "fp32", 2880)
    check_gated(target, "silu", "fp64", 256)
    for name in ("fp8_block128", "mxfp8", "nvfp4", "mxfp4", "fp8_block128_e8m0", "fp8_token"):
        check_dequantize(target, name, "bf16")
    check_dequantize(target, "fp8_block128", "fp32")
    check_dequantize(target, "fp8_block128_e8m0", "bf16", by_row=True)
    check_scale_rows(target, "bf16", "bf16")
    check_scale_rows(target, "bf16", "bf16", hidden=2880)
    check_scale_rows(target, "fp64", "fp64")
    check_scale_rows(target, "fp32", "bf16", parts=("out",))
    check_scale_rows(target, "bf16", "fp32", parts=("out", "slot"))
