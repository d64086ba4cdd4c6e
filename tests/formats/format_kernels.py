"""Small kernels around the device functions of the formats. Run as a script, compiles them for a GPU that is not there.

``python format_kernels.py sm_90`` needs TRITON_INTERPRET unset.
"""

import sys

import triton
import triton.language as tl

from moelink.formats import get_format

CODECS = ("bf16", "fp32", "fp8_block128", "mxfp8", "nvfp4", "mxfp4", "fp8_block128_e8m0", "fp8_token")
BLOCK = 4096


@triton.jit
def encode_kernel(
    x, payload, scale, input_scale, ENCODE: tl.constexpr, NG: tl.constexpr, GS: tl.constexpr, PE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    groups = tl.program_id(0).to(tl.int64) * NG + tl.arange(0, NG)
    values = tl.load(x + groups[:, None] * GS + tl.arange(0, GS)[None, :])
    codes, scales = ENCODE(values, tl.load(input_scale), NATIVE)
    tl.store(payload + groups[:, None] * PE + tl.arange(0, PE)[None, :], codes)
    tl.store(scale + groups, scales)


@triton.jit
def decode_kernel(
    x, payload, scale, input_scale, DECODE: tl.constexpr, NG: tl.constexpr, GS: tl.constexpr, PE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    groups = tl.program_id(0).to(tl.int64) * NG + tl.arange(0, NG)
    codes = tl.load(payload + groups[:, None] * PE + tl.arange(0, PE)[None, :])
    values = DECODE(codes, tl.load(scale + groups), tl.load(input_scale), NATIVE)
    tl.store(x + groups[:, None] * GS + tl.arange(0, GS)[None, :], values)


def shape(name, block=BLOCK):
    """(NG, GS, PE) of a block; plain formats are given rows of 64, fp8_token rows of 256."""
    codec = get_format(name).codec()
    group = 64 if codec.GROUP == 1 else 256 if name == "fp8_token" else codec.GROUP
    return block // group, group, codec.PAYLOAD_BYTES_PER_GROUP * (group // codec.GROUP) // codec.ELEMENT_BYTES


def compile_for(target, name, native, kernel):
    """The compiled kernel of one format for a target without such a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    codec = get_format(name).codec()
    element = f"*u{8 * codec.ELEMENT_BYTES}"
    function, argument = ((encode_kernel, "ENCODE"), (decode_kernel, "DECODE"))[kernel == "decode"]
    signature = {"x": "*fp32", "payload": element, "scale": "*fp32" if codec.SCALE_BYTES == 4 else "*u8",
                 "input_scale": "*fp32"}  # fmt: skip
    ng, gs, pe = shape(name, 2048)
    constants = {argument: getattr(codec, kernel), "NG": ng, "GS": gs, "PE": pe, "NATIVE": native}
    signature = signature | dict.fromkeys(constants, "constexpr")
    names = list(function.arg_names)
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    constants = {(names.index(key),): value for key, value in constants.items()}
    source = ASTSource(function, {key: signature[key] for key in names}, constants, aligned)
    return triton.compile(source, target=gpu, options={"enable_fp_fusion": False})


def check(target, name, native, kernel):
    """Compile and assert on the code: IEEE division, no flushing of subnormals, no spills, conversions as asked.

    Returns how many fused multiply-adds are in it."""
    asm = compile_for(target, name, native, kernel).asm
    what = f"{target} {name} {kernel} NATIVE={native}"
    if "amdgcn" in asm:
        assert ".amdhsa_float_denorm_mode_32 3" in asm["amdgcn"], what
        return 0
    ptx = asm["ptx"]
    for unwanted in (".ftz", "div.full", "div.approx", "rcp.", ".local"):
        assert unwanted not in ptx, f"{what}: {unwanted}"
    if kernel == "encode":
        fp8 = "fp8" in name or name == "nvfp4"
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (native and fp8), what
        assert ("cvt.rn.bf16" in ptx) == (native and name == "bf16"), what
        # Divided by 448 alone, whose reciprocal is known, and by a power of two.
        by_constants = native and name == "fp8_block128_e8m0"
        assert ("div.rn.f32" in ptx) == (fp8 and not by_constants), what
    return ptx.count("fma.rn.f32")


if __name__ == "__main__":
    for name in CODECS:
        for native in (False, True):
            for kernel in ("encode", "decode"):
                check(sys.argv[1], name, native, kernel)
    if sys.argv[1].startswith("sm"):
        of_bf16, of_any = (check(sys.argv[1], "fp8_block128", native, "encode") for native in (2, True))
        assert 0 < of_bf16 < of_any, "elements of bf16 are corrected as often as others"
