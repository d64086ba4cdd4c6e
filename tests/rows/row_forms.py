"""Take the forms of kernels on rows (activations, scaling, dequantising, fp8 products, routers) from their launches.

The functions that launch them run on tensors without memory, on a GPU that is not there, and the launch is caught. So
the constants are those that a call has. Switches meet in pairs, as in ``aot_forms``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import JITFunction
from triton.runtime.jit import mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from moelink.formats import get_format
from moelink.rows import (
    activation_kernel as activation,
)
from moelink.rows import (
    choose_kernel,
    grouped_fp8,
    grouped_mxfp4,
)
from moelink.rows import (
    dequantize_kernel as dequantize,
)
from moelink.rows import (
    gated_kernel as gated,
)
from moelink.rows import (
    scale_rows_kernel as scale_rows,
)
from moelink.rows import (
    wide_product_kernel as wide_product,
)
from moelink.rows.choice import Choice
from tests.kernels.absent_gpu import on
from tests.kernels.covering import Row, covering_rows
from tests.kernels.lowering import Spec
from tests.support.cases import FORMATS

RowForm = tuple[str, Any, Spec, Row]
"""What is launched, the kernel, what it is compiled for, and the switches."""

BOOLEAN = (False, True)
FLOATS = (torch.bfloat16, torch.float32, torch.float64)
GROUPS, ROWS = 5, 80


def row_forms() -> Iterator[RowForm]:
    """Yield the forms of all kernels on rows."""
    for name, switches, rules, meets, launch in (
        ("activation", ACTIVATION, (of_hidden, of_input_scale), {}, run_activation),
        ("gated", GATED, (), {}, run_gated),
        ("dequantize", DEQUANTIZE, (of_input_scale, of_layout), {}, run_dequantize),
        ("scale rows", SCALE_ROWS, (of_work, of_slot, of_one_row), {}, run_scale_rows),
        ("grouped fp8", GROUPED, (of_room,), GROUPED_MEETS, run_grouped),
        ("grouped mxfp4", GROUPED | {"bias": BOOLEAN}, (of_room,), GROUPED_MEETS, run_grouped_mxfp4),
        ("choose", CHOOSE, (of_groups,), {}, run_choose),
        ("choose's gradient", CHOOSE_GRADIENT, (), {}, run_choose_gradient),
        ("logits", WIDE_PRODUCT, (), {}, run_wide_product),
    ):
        for row in covering_rows(switches, rules, meets=meets):
            for number, (kernel, spec) in enumerate(launches_of(launch, row)):
                yield f"{name} {number}" if number else name, kernel, spec, row


def launches_of(launch: Callable[[Row], None], row: Row) -> list[tuple[Any, Spec]]:
    """Return what ``launch`` launches with the switches ``row``."""
    caught: list[tuple[Any, Spec]] = []

    def catch(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, S: Any, **options: Any) -> None:
        names = [name for name in self.arg_names if name != "S"]
        types = {name: type_of(value) for name, value in zip(names, args, strict=True)}
        caught.append((self, Spec(types, {"S": S}, row["gpu"], options)))

    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(mock.patch.object(JITFunction, "run", catch))
        # A descriptor asks for an address, which such a tensor has none of.
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        launch(row)
    return caught


def type_of(value: Any) -> Any:
    """Return the type of an argument of a launch. No kernel is for the value of a number, which changes by call."""
    if isinstance(value, TensorDescriptor):
        kind = mangle_type(value.base).removeprefix("*")
        return f"tensordesc<{kind}{list(value.block_shape)}>".replace(" ", "")
    return mangle_type(value) if isinstance(value, torch.Tensor) else "i32"


def of_hidden(format: str, hidden: int) -> bool:
    return hidden % get_format(format).group == 0


def of_input_scale(format: str, input_scale: bool) -> bool:
    return not input_scale or get_format(format).uses_input_scale


ACTIVATION = {
    "format": tuple(name for name in FORMATS if name != "fp64"),
    "dtype": (torch.bfloat16, torch.float32),
    "gpu": ("sm_90", "gfx942"),
    "hidden": (2048, 2944, 2880),
    "clamp": BOOLEAN,
    "input_scale": BOOLEAN,
}


def run_activation(row: Row) -> None:
    fmt, hidden = get_format(row["format"]), row["hidden"]
    x, row_offsets = empty(ROWS, 2 * hidden, dtype=row["dtype"]), empty(GROUPS + 1)
    tokens = empty(ROWS, fmt.payload_width(hidden), dtype=fmt.payload_dtype)
    layout, scales = fmt.scale_layout, None
    if layout is not None and fmt.scale_dtype is not None:
        scales = empty(*layout.shape(ROWS, fmt.scale_width(hidden), GROUPS), dtype=fmt.scale_dtype)
    factors = empty(GROUPS, dtype=torch.float32) if row["input_scale"] else None
    with on(row["gpu"]):
        activation.launch(
            x, row_offsets, tokens, scales, empty(GROUPS), factors, fmt, (1.702, 7.0) if row["clamp"] else None
        )


GATED = {
    "kernel": ("forward", "backward"),
    "kind": ("silu", "gelu", "gelu_tanh", "clamped"),
    "dtype": FLOATS,
    "gpu": ("sm_90", "gfx942"),
    "inner": (768, 2880),
}


def run_gated(row: Row) -> None:
    inner, dtype = row["inner"], row["dtype"]
    gate_up, offsets, out = empty(ROWS, 2 * inner, dtype=dtype), empty(GROUPS + 1), empty(ROWS, inner, dtype=dtype)
    with on(row["gpu"]):
        if row["kernel"] == "forward":
            gated.launch(gate_up, offsets, out, row["kind"], 1.702, 7.0)
        else:
            gated.launch(gate_up, offsets, gate_up, row["kind"], 1.702, 7.0, grad=out)


DEQUANTIZE = {
    "format": tuple(name for name in FORMATS if dequantize.can_dequantize(get_format(name))),
    "dtype": (torch.bfloat16, torch.float32),
    "gpu": ("sm_90", "gfx942"),
    "hidden": (7168, 2944),
    "by_row": BOOLEAN,
    "input_scale": BOOLEAN,
}


def of_layout(format: str, by_row: bool) -> bool:
    return not by_row or get_format(format).scale_layout is not None


def run_dequantize(row: Row) -> None:
    fmt, hidden = get_format(row["format"]), row["hidden"]
    tokens = empty(ROWS, fmt.payload_width(hidden), dtype=fmt.payload_dtype)
    scales = None if fmt.scale_dtype is None else empty(ROWS, fmt.scale_width(hidden), dtype=fmt.scale_dtype)
    factor = empty(1, dtype=torch.float32) if row["input_scale"] else None
    out = empty(ROWS, hidden, dtype=row["dtype"])
    with on(row["gpu"]):
        dequantize.launch(tokens, scales, empty(GROUPS + 1), empty(GROUPS), factor, out, fmt, by_row=row["by_row"])


SCALE_ROWS = {
    "dtype": FLOATS,
    "out": (None, *FLOATS),
    "gpu": ("sm_90", "gfx942"),
    "hidden": (7168, 2880, 512),
    "weights": BOOLEAN,
    "dots": BOOLEAN,
    "slot": BOOLEAN,
    "one_row": BOOLEAN,
}


def of_work(out: torch.dtype | None, dots: bool) -> bool:
    return out is not None or dots


def of_slot(slot: bool, out: torch.dtype | None, dots: bool, weights: bool) -> bool:
    return not slot or (out is not None and not dots and not weights)


def of_one_row(one_row: bool, slot: bool) -> bool:
    return not (one_row and slot)


def run_scale_rows(row: Row) -> None:
    shape, dtype = (ROWS, row["hidden"]), row["dtype"]
    wide = torch.float64 if torch.float64 in (dtype, row["out"]) else torch.float32
    given: dict[str, Any] = {}
    if row["weights"]:
        given["weights"] = empty(ROWS, dtype=wide)
    if row["dots"]:
        given |= {"dots": empty(ROWS, dtype=wide), "other": empty(*shape, dtype=dtype)}
    if row["out"] is not None:
        given["out"] = empty(*shape, dtype=row["out"])
    if row["slot"]:
        given |= {"src_info": empty(ROWS, 3), "slot": 1}
    rows = empty(1, row["hidden"], dtype=dtype).expand(shape) if row["one_row"] else empty(*shape, dtype=dtype)
    with on(row["gpu"]):
        scale_rows.launch(rows, empty(GROUPS + 1), **given)


GROUPED = {
    "gpu": ("sm_90", "sm_100", "sm_89", "gfx942"),
    "dtype": (torch.bfloat16, torch.float32),
    "rows": (1000, 600, 80),
}
GROUPED_MEETS: dict[str, tuple[str, ...]] = {"dtype": (), "rows": ("gpu",)}
"""The dtype of the output is that of its store alone, so each comes once."""


def of_room(gpu: str, rows: int) -> bool:
    """One GPU has other tiles for other buffers."""
    return gpu == "sm_90" or rows == 1000


def run_grouped(row: Row) -> None:
    """Few rows and many in a launch each, and the launches for all groups."""
    rows = row["rows"]
    codes, weight = empty(rows, 384, dtype=torch.float8_e4m3fn), empty(GROUPS, 320, 384, dtype=torch.float8_e4m3fn)
    scales, by = empty(3, rows, dtype=torch.float32), empty(GROUPS, 3, 3, dtype=torch.float32)
    with on(row["gpu"]):
        grouped_fp8.launch(codes, scales, empty(GROUPS + 1), weight, by, empty(rows, 320, dtype=row["dtype"]))


def run_grouped_mxfp4(row: Row) -> None:
    """The same with weights in mxfp4, with biases or without."""
    rows = row["rows"]
    codes, weight = empty(rows, 384, dtype=torch.float8_e4m3fn), empty(GROUPS, 6, 320, 32, dtype=torch.uint8)
    scales, by = empty(3, rows, dtype=torch.float32), empty(GROUPS, 3 + row["bias"], 320)
    with on(row["gpu"]):
        grouped_mxfp4.launch(codes, scales, empty(GROUPS + 1), weight, by, empty(rows, 320, dtype=row["dtype"]))


CHOOSE = {
    "experts": (256, 60, 8),
    "topk": (2, 4),
    "scoring": ("sigmoid", "softmax"),
    "renormalize": BOOLEAN,
    "groups": (1, 4),
    "score": ("max", "top2"),
    "bias": BOOLEAN,
    "gpu": ("sm_90", "gfx942"),
}


CHOOSE_GRADIENT = {name: CHOOSE[name] for name in ("experts", "topk", "scoring", "renormalize", "gpu")}


def of_groups(groups: int, score: str) -> bool:
    return groups > 1 or score == "max"


def run_choose(row: Row) -> None:
    experts, topk, groups = row["experts"], row["topk"], row["groups"]
    choice = Choice(topk, row["scoring"], row["renormalize"], groups, max(1, groups // 2), row["score"], 2.5)
    logits, weights = empty(ROWS, experts, dtype=torch.float32), empty(ROWS, topk, dtype=torch.float32)
    bias = empty(experts, dtype=torch.float32) if row["bias"] else None
    with on(row["gpu"]):
        choose_kernel.launch(logits, bias, empty(ROWS, topk), weights, choice)


def run_choose_gradient(row: Row) -> None:
    choice = Choice(row["topk"], row["scoring"], row["renormalize"], 1, 1, "max", 2.5)
    logits, grad = (empty(ROWS, n, dtype=torch.float32) for n in (row["experts"], row["topk"]))
    with on(row["gpu"]):
        choose_kernel.launch_gradient(grad, logits, empty(ROWS, row["topk"]), torch.empty_like(logits), choice)


WIDE_PRODUCT = {"rows": (1, 16, 200), "sizes": ((128, 2048), (256, 7168), (60, 2880)), "gpu": ("sm_90", "gfx942")}


def run_wide_product(row: Row) -> None:
    experts, hidden = row["sizes"]
    x, weight = (empty(n, hidden, dtype=torch.bfloat16) for n in (row["rows"], experts))
    with on(row["gpu"]):
        wide_product.launch(x, weight, empty(row["rows"], experts, dtype=torch.float32))


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return a tensor on a GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda")
