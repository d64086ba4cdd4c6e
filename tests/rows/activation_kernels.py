"""Compiles the kernel of the gated activation for a GPU that is not there, and asserts on the code.

``python activation_kernels.py sm_90`` needs TRITON_INTERPRET unset.
"""

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moelink.formats import get_format
from moelink.rows.activation_kernel import silu_and_quantize_kernel, warps_of
from moelink.rows.common_kernel import RowConstants, format_constants, group_elements

FORMATS = ("bf16", "fp32", "fp8_block128", "mxfp8", "nvfp4", "mxfp4", "fp8_block128_e8m0", "fp8_token")
MEMORY = re.compile(r"^\s*(?:@!?%\w+ )?((?:ld|st)\.global\S*)", re.MULTILINE)


def compile_for(target, name, native, *, clamp=False, hidden=2048, block=2048, groups=33, rows="bf16"):
    """The compiled kernel of one format for a target without such a GPU."""
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    fmt = get_format(name)
    codec, group = fmt.codec(), group_elements(fmt, hidden)
    per_step = triton.next_power_of_2(max(1, block // group))
    constants = RowConstants(
        **format_constants(fmt, hidden, groups, group, per_step), CODE_FN=codec.encode,
        SCALE_LAYOUT="" if fmt.scale_layout is None else fmt.scale_layout.name, HAS_INPUT_SCALE=name == "nvfp4",
        KIND="clamped" if clamp else "silu", ALPHA=1.702 if clamp else 1.0, LIMIT=7.0, NATIVE_CASTS=native,
        TAIL_TILES=16,
    )  # fmt: skip
    signature = {
        "x": f"*{rows}", "row_offsets": "*i32", "input_scales": "*fp32", "scales_offsets": "*i32",
        "tokens": f"*u{8 * codec.ELEMENT_BYTES}", "scales": "*fp32" if codec.SCALE_BYTES == 4 else "*u8", "rows": "i32",
        "S": "constexpr",
    }  # fmt: skip
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(silu_and_quantize_kernel, signature, {"S": constants}, aligned)
    options = {"enable_fp_fusion": False, "num_warps": warps_of(per_step * group)}
    return triton.compile(source, target=gpu, options=options)


def check(target, name, native, **options):
    """No spills, no approximate or fused arithmetic; rows are read 16 bytes a thread and written 8 or 16."""
    asm = compile_for(target, name, native, **options).asm
    what = f"{target} {name} NATIVE={native} {options}"
    if "amdgcn" in asm:
        assert ".amdhsa_float_denorm_mode_32 3" in asm["amdgcn"], what
        assert "v_exp_f32" not in asm["amdgcn"], what
        assert ".private_segment_fixed_size: 0" in asm["amdgcn"], what
        assert re.search(r"(global|buffer)_load_dwordx4", asm["amdgcn"]), what
        return
    ptx = asm["ptx"]
    for unwanted in (".ftz", "div.full", "div.approx", "rcp.", "ex2.", ".local"):
        assert unwanted not in ptx, f"{what}: {unwanted}"
    # Those that the source asks for (``divide_rows``, ``divide_by_448``), and none that the compiler made.
    calls = re.findall(r"= .*call .*@llvm\.(?:nvvm\.)?fma\.(?:v(\d+)|\w)", asm["llir"])
    wanted = sum(int(width or 1) for width in calls)
    made = sum(2 if packed else 1 for packed in re.findall(r"\bfma\.rn\.f32(x2)?", ptx))
    assert made == wanted, f"{what}: {made} fma in place of {wanted}"
    divides = native and name in ("fp8_block128", "fp8_block128_e8m0", "fp8_token", "nvfp4")
    assert (wanted > 0) == divides, f"{what}: {wanted} fma"
    memory = MEMORY.findall(ptx)
    wide = {"ld.global.v4.b32", "ld.global.v2.b64"}
    loads = [op for op in memory if op.startswith("ld")]
    assert sum(op in wide for op in loads) >= 4, f"{what}: {memory}"
    assert not any(op in ("ld.global.b16", "ld.global.b8") for op in loads), f"{what}: {memory}"
    stores = [op for op in memory if op.startswith("st")]
    rows = wide | ({"v2.b32", "b64"} if name.endswith("fp4") else set())
    assert any(op.removeprefix("st.global.") in {o.removeprefix("ld.global.") for o in rows} for op in stores), (
        f"{what}: {memory}"
    )


if __name__ == "__main__":
    target = sys.argv[1]
    for name in FORMATS:
        check(target, name, False)
        if target.startswith("sm"):
            check(target, name, True, clamp=True)
            check(target, name, True, hidden=2944 if "block128" in name else 2880, rows="fp32")
