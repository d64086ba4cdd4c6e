"""A small kernel that calls an epilogue as combine does, and compiles it for GPUs that are not there.

``python epilogue_kernels.py sm_90`` needs TRITON_INTERPRET unset.
"""

import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moelink.kernels import epilogues

FUNCTIONS = {name: getattr(epilogues, name) for name in ("cast", "bias", "residual")} | {
    f"quantize_{name}": function for name, function in epilogues.QUANTIZE.items()
}


@triton.jit
def finish_kernel(sums, tensors, H: tl.constexpr, BLOCK: tl.constexpr, HOOK: tl.constexpr):
    """Program t ends token t, block by block, as ``reduce.finish`` does."""
    token = tl.program_id(0)
    for c0 in tl.static_range(0, H, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        total = tl.load(sums + token.to(tl.int64) * H + c, mask=c < H, other=0.0)
        rows = tl.full([1, 1], 0, tl.int64) + token
        HOOK(tensors, rows, c.to(tl.int64)[None, :], total[None, :], (c < H)[None, :])


def run(sums, hook, block=None):
    """Call the hook's Triton function for every row of ``sums``."""
    hidden = sums.shape[1]
    block = block or min(triton.next_power_of_2(hidden), 2048)
    finish_kernel[(sums.shape[0],)](
        sums, hook.tensors, H=hidden, BLOCK=block, HOOK=hook.triton_fn, enable_fp_fusion=False
    )


def compile_for(target, name, hidden, out="*bf16"):
    """The compiled kernel around one epilogue."""
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    aligned = hidden % 16 == 0
    width = "*i32" if aligned else "*i64"
    if name.startswith("quantize"):
        tensors = ["*u8", "*fp32" if name.endswith("fp8_block128") else "*u8", width]
        tensors += ["*fp32"] if name.endswith("nvfp4") else []
    else:
        tensors = [out, width] + ["*bf16"] * (name != "cast")
    constants = {"H": hidden, "BLOCK": min(triton.next_power_of_2(hidden), 2048), "HOOK": FUNCTIONS[name]}
    signature = {"sums": "*fp32", "tensors": tuple(tensors)} | dict.fromkeys(constants, "constexpr")
    names = list(finish_kernel.arg_names)
    attrs = {(0,): [["tt.divisibility", 16]]} | {(1, i): [["tt.divisibility", 16]] for i in range(len(tensors))}
    constants = {(names.index(key),): value for key, value in constants.items()}
    source = ASTSource(finish_kernel, {key: signature[key] for key in names}, constants, attrs)
    return triton.compile(source, target=gpu, options={"enable_fp_fusion": False})


def check(target, name, hidden):
    """No spills, no fused arithmetic; long rows are stored at 8 bytes a thread or more, and never by the element."""
    asm = compile_for(target, name, hidden).asm
    what = f"{target} {name} {hidden}"
    if "amdgcn" in asm:
        assert ".private_segment_fixed_size: 0" in asm["amdgcn"], what
        return
    ptx = asm["ptx"]
    for unwanted in (".ftz", "div.full", "div.approx", ".local"):
        assert unwanted not in ptx, f"{what}: {unwanted}"
    assert not re.search(r"\bfma\.", ptx), f"{what}: fma"
    stores = re.findall(r"st\.global\S*", ptx)
    if hidden == 7168:
        assert any(re.fullmatch(r"st\.global\.(v[24]\.b32|v2\.b64|b64)", op) for op in stores), f"{what}: {stores}"
        assert "st.global.b16" not in stores, f"{what}: {stores}"


if __name__ == "__main__":
    for name in FUNCTIONS:
        check(sys.argv[1], name, 7168)
        check(sys.argv[1], name, 384)
    for name in ("cast", "bias", "residual"):
        check(sys.argv[1], name, 1001)
