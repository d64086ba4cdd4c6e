"""Compile the kernels for a GPU that is not there, and say what memory instructions came out.

Run without TRITON_INTERPRET: ``python -m tests.kernels.aot sm_90 kernels`` prints one JSON object per kernel.
The second word is one of PARTS. Further ones select kernels by how their names begin.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys

from moelink.kernels import records
from moelink.kernels.launch.direct import ParameterLayout
from moelink.tracing.device.clocks import ClockNumbers
from moelink_testing import lowered
from tests.kernels.lowering import Spec

TYPES = {
    "Peers": ("*i64", "*i64", "*i64"),
    "RoutingNotes": ("*i32",) * 5,
    "CachedRouting": ("*i32", "*i32"),
    "DispatchInputs": {
        "x": "*bf16", "scales": "*u8", "input_scale": "*fp32", "topk_ids": "*i64", "topk_weights": "*fp32",
    },
    "DispatchOutputs": {
        "tokens": "*u8", "scales": "*u8", "row_offsets": "*i32", "expert_ids": "*i32", "src_info": "*i32",
        "scales_offsets": "*i32", "weights": "*fp32", "topk_ids": "*i32", "num_recv_tokens": "*i32",
        "overflow": "*i32", "counts": "*i32",
    },
    "CombineInputs": {
        "y": "*bf16", "row_weights": "*fp32", "home_weights": "*fp32", "topk_ids": "*i64", "shared": "*bf16",
        "epilogue": "*bf16",
    },
    "CombineOutputs": ("*bf16", ("*i64",)),
}  # fmt: skip
"""Types of the fields of each record, in order or by name. Numbers are i32, ``limit`` is i64."""


def records_of(kernel):
    """Return the record, or the pointer's type, of each argument of ``kernel`` but its constants."""
    name = kernel.__name__
    phase = "Dispatch" if re.search("dispatch|scales", name) else "Combine"  # phases of combine are among the others
    known = {
        "peers": records.Peers, "notes": records.RoutingNotes, "cached": records.CachedRouting, "scales_out": "*u8",
        **{argument: getattr(records, phase + argument.title()) for argument in ("inputs", "outputs", "numbers")},
    }  # fmt: skip
    if "overwrite" in name or "credits" in name:
        known["numbers"] = records.CreditNumbers
    elif "give_up" in name:
        known["numbers"] = records.GiveUpNumbers
    elif "clocks" in name:
        known |= {"numbers": ClockNumbers, "out": "*i64"}
    return {argument: known.get(argument, "*i32") for argument in kernel.arg_names if argument != "S"}


def spec_of(kernel, constants, pointers, target="sm_90", options=None):
    """Return what ``kernel`` is compiled for.

    ``pointers``: types of fields of inputs and outputs that are not those of TYPES.
    """
    types = {}
    for name, record in records_of(kernel).items():
        if isinstance(record, str):
            types[name] = record
            continue
        kinds = TYPES.get(record.__name__, dict.fromkeys(("limit", "call", "expected", "got"), "i64"))
        given = kinds if isinstance(kinds, dict) else dict(zip(record._fields, kinds, strict=True))
        known = given | (pointers if name in ("inputs", "outputs") else {})
        types[name] = record(*[known.get(field, "i32") for field in record._fields])
    return Spec(types, {"S": constants}, target, options or {})


def compile_kernel(kernel, spec, target, x, **more):
    """``x``: type of that pointer. ``more``: compile options."""
    amd = target.startswith("gfx")
    spec = dataclasses.replace(spec, CLOCK="gcn" if amd else "ptx", NATIVE_CASTS=not amd, DEPENDENT_LAUNCH=not amd)
    options = {"num_warps": 4 if amd else 8, "enable_fp_fusion": False, **more}
    known = spec_of(kernel, spec, {"x": x}, target)
    return lowered(kernel, known.types, known.constants, target=target, **options)


def barriers_between_rows(ops):
    """Barriers between 16-byte stores, but for the longest way between two: few tokens have code of their own."""
    rows = [i for i, op in enumerate(ops) if op == "st.global.v4.b32"]
    between = [sum(op.startswith("bar") for op in ops[i:j]) for i, j in zip(rows, rows[1:], strict=False)]
    return sum(between) - max(between, default=0)


def bare_loads(ttir):
    """Masked loads of rows (of 1024 elements and more) without a value for what they leave out."""
    loads = re.findall(r"= tt\.load ([^:]*?)(?: \{.*?\})? : tensor<([\dx]+)x", ttir)
    sizes = [math.prod(map(int, shape.split("x"))) for operands, shape in loads if operands.count("%") == 2]
    return sum(size >= 1024 for size in sizes)


def repeated_loads(form):
    """Loads of words that other ranks write which stand more than once in the last form before PTX: of a load that is
    needed in several layouts the compiler makes one for each."""
    before, after = (
        sum("tt.load" in line and "isVolatile = true" in line for line in str(form.asm[stage]).splitlines())
        for stage in ("ttir", "ttgir")
    )
    return after - before


def has_known_parameters(types, ptx):
    """Whether the parameters of a kernel with arguments of ``types`` lie where ``kernels.launch.direct`` puts them."""
    entry = ptx.partition(".entry")[2].partition(")")[0]
    sizes = [int(bits) // 8 for bits in re.findall(r"\.param \.[bus](\d+)", entry)]
    places, end = [], 0
    for size in sizes:
        begin = -(-end // size) * size
        places.append((begin, size))
        end = begin + size
    return ParameterLayout.of(types).places == places


SENT_OTHERWISE = ("fp8_block128_e8m0", "fp8_token")
"""Formats that are received as another one is: only what sends them is compiled."""

PARTS = ("kernels", "small", "variants", "scales", "home", "in_place", "own_rows")
"""Each kernel of a call once; small kernels: phases of the contract, launches that belong to no call, and
scales; other formats, cached
routings and reductions; those that lay scales out; combine in formats; layout "rank", copied and with ``zero_copy``;
combine of two ranks whose own rows stay, or travel."""


def kernels(part):
    import torch

    import moelink
    from moelink.config import COMBINE_FORMATS
    from moelink.kernels.combine import kernel as combine
    from moelink.kernels.combine import phases
    from moelink.kernels.dispatch import kernel as dispatch
    from moelink.kernels.dispatch.expired_rows import ep_overwrite_expired_rows_kernel
    from moelink.kernels.dispatch.scales import ep_lay_out_scales_kernel
    from moelink.kernels.launch.constants import combine_spec, dispatch_spec
    from moelink.kernels.launch.own_rows import with_own_rows
    from moelink.kernels.sync.credit import ep_grant_credits_kernel
    from moelink.kernels.sync.signals import ep_give_up_kernel
    from moelink.memory.workspace import Workspace
    from moelink.tracing.device.clocks import ep_compare_clocks_kernel

    device = torch.device("cuda")
    shape = dict(num_experts=256, topk=8, hidden_size=7168, max_tokens_per_rank=4096, world_size=8)
    if part == "home":
        for fmt in COMBINE_FORMATS:
            for pre_reduce in (True, False):
                workspace = Workspace(moelink.EPConfig(**shape, pre_reduce=pre_reduce, combine_format=fmt))
                spec = combine_spec(workspace, device, row_weights=True, home_weights=True)
                yield f"combine_async-{fmt}-{pre_reduce}", combine.ep_combine_async_kernel, spec, "*bf16"
                yield f"combine_wait-{fmt}-{pre_reduce}", combine.ep_combine_wait_kernel, spec, "*bf16"
        return
    if part == "small":
        workspace = Workspace(moelink.EPConfig(**shape, fused_shared_expert=True), lamport=False)
        spec = combine_spec(workspace, device, row_weights=False, home_weights=False)
        yield "wait_phase", phases.ep_wait_for_all_arrivals_kernel, spec, "*bf16"
        yield "copy_phase", phases.ep_copy_shared_expert_outputs_kernel, spec, "*bf16"
        added = dataclasses.replace(spec, FUSED_SHARED_EXPERT=0, HAS_SHARED=True)
        yield "reduce_phase", phases.ep_reduce_and_copy_to_output_kernel, added, "*bf16"
        yield "credits", ep_grant_credits_kernel, spec, "*bf16"
        yield "give_up", ep_give_up_kernel, spec, "*bf16"
        yield "clocks", ep_compare_clocks_kernel, spec, "*bf16"
        yield from kernels("scales")
        return
    if part == "own_rows":
        for layout, most in (("rank", 4096), ("expert", 4096)):
            fields = {**shape, "max_tokens_per_rank": most, "world_size": 2, "layout": layout}
            workspace = Workspace(moelink.EPConfig(**fields))
            spec = combine_spec(workspace, device, row_weights=True, home_weights=False)
            stay = with_own_rows(spec, workspace, device)
            if not workspace.two_copies:
                yield f"{layout}-{most}-travel", combine.ep_fused_combine_kernel, spec, "*bf16"
            yield f"{layout}-{most}-stay", combine.ep_fused_combine_kernel, stay, "*bf16"
            yield f"{layout}-{most}-async", combine.ep_combine_async_kernel, stay, "*bf16"
            yield f"{layout}-{most}-wait", combine.ep_combine_wait_kernel, stay, "*bf16"
        return
    if part == "in_place":
        for name, more in (("copied", {}), ("in_place", {"zero_copy": True})):
            fields = {**shape, "dispatch_format": "fp8_block128", "layout": "rank", **more}
            workspace = Workspace(moelink.EPConfig(**fields))
            spec = dispatch_spec(workspace, device, input_dtype=torch.bfloat16, quantized=False, weights=True)
            yield f"dispatch_wait-{name}", dispatch.ep_dispatch_wait_kernel, spec, "*bf16"
            cached = dataclasses.replace(spec, CACHED_ROUTING=True, OPTIONS=spec.OPTIONS.value + 2)
            yield f"dispatch_wait_cached-{name}", dispatch.ep_dispatch_wait_kernel, cached, "*bf16"
        yield "overwrite_expired_rows", ep_overwrite_expired_rows_kernel, spec, "*bf16"
        return
    for fmt in ("fp8_block128",) if part == "kernels" else ("bf16", "fp8_block128", "nvfp4", *SENT_OTHERWISE):
        workspace = Workspace(moelink.EPConfig(**shape, dispatch_format=fmt))
        spec = dispatch_spec(
            workspace, device, input_dtype=torch.bfloat16, quantized=False, weights=True, input_scale=fmt == "nvfp4"
        )
        x = "*u8" if fmt == "bf16" else "*bf16"
        if part == "scales":
            if spec.SCALES_LATER and fmt not in SENT_OTHERWISE:
                yield f"scale_layout-{fmt}", ep_lay_out_scales_kernel, spec, x
            continue
        if part == "variants" and fmt in SENT_OTHERWISE:
            yield f"dispatch_async-{fmt}", dispatch.ep_dispatch_async_kernel, spec, x
        elif (part == "kernels") == (fmt == "fp8_block128"):
            yield f"dispatch_async-{fmt}", dispatch.ep_dispatch_async_kernel, spec, x
            yield f"dispatch_wait-{fmt}", dispatch.ep_dispatch_wait_kernel, spec, x
        if part == "kernels":
            yield f"fused_dispatch-{fmt}", dispatch.ep_fused_dispatch_kernel, spec, x
        elif fmt not in ("bf16", *SENT_OTHERWISE):
            cached = dataclasses.replace(spec, CACHED_ROUTING=True, OPTIONS=spec.OPTIONS.value + 2)
            yield f"dispatch_async_cached-{fmt}", dispatch.ep_dispatch_async_kernel, cached, x
            yield f"dispatch_wait_cached-{fmt}", dispatch.ep_dispatch_wait_kernel, cached, x
    if part == "scales":
        return
    pre_reduce = part == "kernels"
    workspace = Workspace(moelink.EPConfig(**shape, pre_reduce=pre_reduce))
    spec = combine_spec(workspace, device, row_weights=True, home_weights=True)
    yield f"combine_async-{pre_reduce}", combine.ep_combine_async_kernel, spec, "*bf16"
    yield f"combine_wait-{pre_reduce}", combine.ep_combine_wait_kernel, spec, "*bf16"
    yield f"fused_combine-{pre_reduce}", combine.ep_fused_combine_kernel, spec, "*bf16"
    if part == "variants":
        workspace = Workspace(moelink.EPConfig(**shape, dispatch_format="fp8_block128", layout="masked"))
        spec = dispatch_spec(workspace, device, input_dtype=torch.bfloat16, quantized=False, weights=True)
        yield "dispatch_wait_masked-fp8_block128", dispatch.ep_dispatch_wait_kernel, spec, "*bf16"
        few = {**shape, "world_size": 4, "max_tokens_per_rank": 128, "dispatch_format": "fp8_block128"}
        workspace = Workspace(moelink.EPConfig(**few))
        assert workspace.row_table
        spec = dispatch_spec(workspace, device, input_dtype=torch.bfloat16, quantized=False, weights=True)
        yield "dispatch_wait_planned-fp8_block128", dispatch.ep_dispatch_wait_kernel, spec, "*bf16"
        workspace = Workspace(moelink.EPConfig(**{**shape, "world_size": 2, "max_tokens_per_rank": 1024}))
        assert workspace.lamport_tokens == 1024
        spec = combine_spec(workspace, device, row_weights=True, home_weights=True)
        yield "without_flags_combine_async", combine.ep_combine_async_kernel, spec, "*bf16"
        yield "without_flags_combine_wait", combine.ep_combine_wait_kernel, spec, "*bf16"


def main(target, part, *prefixes):
    amd = target.startswith("gfx")
    for name, kernel, spec, x in kernels(part):
        if not name.startswith(prefixes or ""):
            continue
        as_launched = {"num_warps": 4, "maxnreg": 96} if part == "own_rows" else {}  # of ``combine_launch``
        form = compile_kernel(kernel, spec, target, x, **as_launched)
        print(json.dumps({
            "name": name, "ops": form.counts, "unguarded": form.unguarded, "once": form.cache_hints,
            "barriers_between_rows": barriers_between_rows(form.memory), "local": form.local,
            "masked_histograms": sum(
                line.count("tensor<") > 2 for line in form.ttir.splitlines() if "= tt.histogram" in line
            ),
            "bare_loads": bare_loads(form.ttir), "repeated_loads": repeated_loads(form),
            "instructions": form.instructions, "stack": form.stack if as_launched else 0,
            "fma": len(re.findall(r"\bfma\.rn\.f32", form.assembly)),
            "before_the_wait": -1 if amd else form.before_the_wait,
            "known_parameters": not amd and has_known_parameters(spec_of(kernel, spec, {"x": x}).types, form.assembly),
            "allows": form.assembly.count("griddepcontrol.launch_dependents"),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
