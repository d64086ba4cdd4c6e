"""Bring every form of the GPU matrix into Triton's intermediate form, for a GPU that is not there.

Compile-time branches that no interpreted test takes fail here: names bound to other types in two branches, shapes that
do not broadcast, functions the compiler does not know. Run without TRITON_INTERPRET:
``python -m tests.kernels.aot_forms`` prints one line per form, the number of all forms, and exits with 1 when one
fails. The arguments ``8 0 5`` take every eighth form from the first and from the sixth.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

import moelink
from moelink.contract import EPParams
from moelink.contract.launch import relative_to
from moelink.kernels.combine import kernel as combine
from moelink.kernels.combine import phases
from moelink.kernels.dispatch import kernel as dispatch
from moelink.kernels.launch.constants import CombineSpec, DispatchSpec, combine_spec, dispatch_spec
from moelink.kernels.launch.own_rows import with_own_rows
from moelink.memory.protocol import ROW_TABLE_TOKENS
from moelink.memory.workspace import Workspace
from tests.kernels.aot import source_of
from tests.kernels.matrix_configs import CONFIGS, Config
from tests.kernels.matrix_configs import Form as MatrixForm
from tests.support.cases import FORMATS

Form = tuple[str, Any, Any, dict[str, str]]
"""Name, kernel, spec and pointer types."""

WORLD = 2
PLANNED, GROUPED = "one plans for all: ", ("expert", "alltoall")
NODES, LEVELS = f"nodes of {WORLD}: ", f"two levels, nodes of {WORLD}: "
TARGET = GPUTarget("cuda", 90, 32)
NAMES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Lowered:
    """A kernel in Triton's intermediate form; ``context`` keeps it alive."""

    module: Any
    backend: Any
    options: Any
    context: Any


def lower(kernel: Any, spec: Any, pointers: dict[str, str]) -> Lowered:
    """Trace ``kernel`` with ``spec``; raises what the compiler says."""
    source = source_of(kernel, spec, pointers)
    backend = make_backend(TARGET)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"num_warps": 8, "enable_fp_fusion": False})
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return Lowered(source.make_ir(TARGET, options, codegen, modules, context), backend, options, context)


LOOKS_USED = ("lamport_slots.sum_rows", "row_offsets._look_at_counts")
"""Functions that use what a look saw."""


def narrow_looks(text: str, threads: int) -> list[str]:
    """Volatile loads of fewer elements than a program has threads, in a kernel's ``text`` and in the functions that use
    what they load: of these warps hold copies of their own (``kernels.sync.signals``)."""
    found, function = [], ""
    for line in text.splitlines():
        named = re.search(r'tt\.func .*?@"?([\w.]+)', line)
        function = named.group(1) if named else function
        used = any(name in function for name in LOOKS_USED)
        if used and "tt.load" in line and "isVolatile = true" in line:
            shape = re.findall(r"tensor<([\dx]+)x!tt\.ptr", line)
            if not shape or math.prod(map(int, shape[0].split("x"))) < threads:
                found.append(line.strip())
    return found


def forms() -> Iterator[Form]:
    """Every form of ranks in one node; each format once with an SM limit, and once where one receiver plans for all;
    each layout of ranks in two nodes with two levels; each format once, and each layout and reduction, of ranks in two
    nodes."""
    for entry in CONFIGS:
        yield from forms_of(entry, "", world_size=WORLD)
    yield short_rows()
    yield from own_rows()
    yield from contract_forms()
    for fmt in FORMATS:
        entry = next(config for config in CONFIGS if config.form.dispatch_format == fmt)
        of_entry = list(forms_of(entry, "budget: ", world_size=WORLD, num_sms=24))
        yield from (of_entry[0], of_entry[-1])
    for fmt in FORMATS:
        entry = next(c for c in CONFIGS if (c.form.dispatch_format, c.form.layout, c.form.mode) == (fmt, *GROUPED))
        few = dataclasses.replace(entry, max_tokens_per_rank=ROW_TABLE_TOKENS)
        planned, cached, *_ = forms_of(few, PLANNED, world_size=2 * WORLD)
        assert planned[2].ROW_TABLE.value, planned[0]
        yield from (planned, cached)
    places = [config.form for config in CONFIGS if config.form.mode == "alltoall"]
    kinds = list(dict.fromkeys((form.layout, form.pre_reduce, form.fused_shared_expert) for form in places))
    for fmt, (layout, pre_reduce, shared) in zip(FORMATS, [kind for kind in kinds if kind[1]], strict=False):
        form = MatrixForm(fmt, layout, "alltoall", pre_reduce, shared)
        entry = next(config for config in CONFIGS if config.form == form)
        levels = {"ranks_per_node": WORLD, "transport": "symmetric", "two_level": True, "num_sms": 24}
        of_entry = list(forms_of(entry, LEVELS, world_size=2 * WORLD, **levels))
        yield from (of_entry[0], of_entry[1], of_entry[-1])
    for i, fmt in enumerate(FORMATS):
        layout, pre_reduce, shared = kinds[i % len(kinds)]
        form = MatrixForm(fmt, layout, "alltoall", pre_reduce, shared)
        entry = next(config for config in CONFIGS if config.form == form)
        of_entry = list(forms_of(entry, NODES, world_size=2 * WORLD, ranks_per_node=WORLD))
        yield from (of_entry[0], of_entry[1], of_entry[-1])


def short_rows() -> Form:
    """Combine of rows of fewer words than a program has threads."""
    config = moelink.EPConfig(num_experts=8, topk=2, hidden_size=64, max_tokens_per_rank=4, world_size=WORLD, rank=0)
    spec = combine_spec(Workspace(config), torch.device("cuda"), row_weights=False, home_weights=False)
    return "short rows combine", combine.ep_fused_combine_kernel, spec, {}


def own_rows() -> Iterator[Form]:
    """Combines whose own rows stay where they are, by rank and by expert."""
    shape: dict[str, Any] = dict(num_experts=30, topk=6, hidden_size=6144, world_size=WORLD, rank=0)
    device = torch.device("cuda")
    for layout, most, shared, dtype in (
        ("rank", 2048, False, torch.bfloat16), ("rank", 256, False, torch.float16), ("rank", 512, False, torch.float32),
        ("expert", 4096, True, torch.float16), ("expert", 2048, True, torch.float32),
        ("expert", 2048, False, torch.float64),
    ):  # fmt: skip
        config = moelink.EPConfig(
            **shape, layout=layout, max_tokens_per_rank=most, fused_shared_expert=shared, combine_dtype=dtype
        )
        spec = combine_spec(Workspace(config), device, row_weights=True, home_weights=False, epilogue="bias")
        spec = with_own_rows(spec, Workspace(config), device)
        assert spec.OWN_ROWS_STAY.value == 1
        pointers = dict.fromkeys(("y", "out", "shared", "epilogue"), NAMES[dtype])
        name = f"own rows stay: {layout} {most} {dtype} combine"
        yield name, combine.ep_fused_combine_kernel, spec, pointers
        yield f"{name}_async", combine.ep_combine_async_kernel, spec, pointers
        yield f"{name}_wait", combine.ep_combine_wait_kernel, spec, pointers


def contract_forms() -> Iterator[Form]:
    """The launchers of the contract, whose constants count from their pointers: each format once, each kind of sums in
    phases."""
    device = torch.device("cuda")
    shape: dict[str, Any] = dict(top_k=8, n_experts=30, max_token_per_rank=300, n_gpus_per_node=4, hidden_size=6144)
    for i, fmt in enumerate(FORMATS):
        fused, sums = i % 2 == 0, i % 3 == 0
        params = EPParams(
            dispatch_fmt_str=fmt, fused_shared_expert=fused, pre_reduce=sums, skip_a2a=i % 3 == 1,
            allreduce_world_size=4 if i % 3 == 1 else 1, **shape,
        )  # fmt: skip
        workspace, config = params.workspace, params.config(0)
        dtype, local = config.format.input_dtypes[0], i % 3 == 1
        x = "*u8" if dtype == config.format.payload_dtype else NAMES[dtype]
        spec = relative_to(dispatch_spec(workspace, device, input_dtype=dtype, quantized=False, weights=sums), 128)
        name = f"contract: {fmt} fused={fused} sums={sums} local={local} "
        yield f"{name}dispatch", dispatch.ep_fused_dispatch_kernel, spec, {"x": x}
        combined = relative_to(combine_spec(workspace, device, row_weights=sums, home_weights=not sums), 128)
        pointers = {"topk_ids": "*i32"}
        yield f"{name}combine", combine.ep_fused_combine_kernel, combined, pointers
        yield f"{name}wait", phases.ep_wait_for_all_arrivals_kernel, combined, pointers
        last = dataclasses.replace(combined, FUSED_SHARED_EXPERT=0, HAS_SHARED=fused)
        yield f"{name}reduce", phases.ep_reduce_and_copy_to_output_kernel, last, pointers
        if fused:
            yield f"{name}copy", phases.ep_copy_shared_expert_outputs_kernel, combined, pointers


def forms_of(entry: Config, prefix: str, **more: Any) -> Iterator[Form]:
    """Dispatch (of rows as they come, the same over an earlier routing, then of quantised ones) and combine of one
    configuration."""
    device = torch.device("cuda")
    config = moelink.EPConfig(**entry.fields, **more, rank=0)
    workspace = Workspace(config)
    fmt = config.format
    weight, y = NAMES[config.weight_dtype], NAMES[config.combine_dtype]
    for quantized in (False, True) if fmt.scale_dtype is not None else (False,):
        spec = dispatch_spec(
            workspace, device, input_dtype=entry.input_dtype, quantized=quantized,
            weights=entry.weights == "dispatch", input_scale=fmt.name == "nvfp4" and not quantized,
        )  # fmt: skip
        copied = quantized or entry.input_dtype == fmt.payload_dtype
        pointers = {"x": "*u8" if copied else NAMES[entry.input_dtype], "topk_weights": weight, "weights": weight}
        name = f"{prefix}{entry.name} dispatch, quantized={quantized}"
        yield name, dispatch.ep_fused_dispatch_kernel, spec, pointers
        if not quantized:
            cached = dataclasses.replace(spec, CACHED_ROUTING=True, OPTIONS=spec.OPTIONS.value + 2)
            yield f"{prefix}{entry.name} dispatch, cached", dispatch.ep_fused_dispatch_kernel, cached, pointers
    row, home = entry.weights == "dispatch", entry.weights == "combine"
    spec = combine_spec(
        workspace, device, row_weights=row, home_weights=home, shared=row,
        epilogue="bias" if row else "residual" if home else "",
    )  # fmt: skip
    spec = with_own_rows(spec, workspace, device)
    pointers = dict.fromkeys(("y", "out", "shared", "epilogue"), y)
    pointers |= dict.fromkeys(("row_weights", "home_weights"), weight)
    yield f"{prefix}{entry.name} combine", combine.ep_fused_combine_kernel, spec, pointers


def main(divisor: int = 1, *parts: int) -> int:
    """Lower those whose number modulo ``divisor`` is in ``parts``; all of them without parts."""
    failed = total = 0
    for total, (name, kernel, spec, pointers) in enumerate(forms(), 1):
        if parts and (total - 1) % divisor not in parts:
            continue
        try:
            module = lower(kernel, spec, pointers).module
            wrong = []
            awaits = kernel is not combine.ep_combine_async_kernel
            small = isinstance(spec, CombineSpec) and spec.LAMPORT_TOKENS.value and awaits
            # The text takes longer than the rest; dispatches with a budget are one for each format.
            if small or (isinstance(spec, DispatchSpec) and spec.NUM_SMS.value and not spec.CACHED_ROUTING.value):
                text = str(module)
                wrong = narrow_looks(text, spec.MAX_THREADS.value)
                if not narrow_looks(text, 1 << 62):
                    wrong = ["nothing is looked at"]
        except Exception as error:  # noqa: BLE001 - the compiler raises many kinds
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        else:
            failed += bool(wrong)
            print(f"{name}: {wrong[0] if wrong else 'fine'}", flush=True)
    print(total)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
