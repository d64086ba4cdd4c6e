"""Time the grouped products of experts with weights in mxfp4 beside those with weights in fp8, for rows in fp8.

Both products of a layer, and the experts as a whole (product, activation, product), of the shapes of DeepSeek-V3 and
Qwen3-30B-A3B, with so many rows an expert of the rank in the mean, as uniform routing draws them.

A figure is the median time of replays of a CUDA graph, divided by its calls. The calls take copies of the weights in
turn, of 512 MB together or more, so that none finds its weights in a cache. Every product is first found within the
accuracy that :mod:`moelink.nn.mxfp4` and :mod:`moelink.nn.block_quantized` state, in fp64, on three experts.

    python -m moelink_bench.mxfp4 --out mxfp4.json
    python -m moelink_bench.mxfp4 --sweep --experts 32 --out sweep.json      # launch settings of the kernel, by load
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelink.formats import get_format
from moelink.nn.block_quantized import BLOCK, BlockQuantized, Weight, quantize_weight
from moelink.nn.mxfp4 import GROUP, Mxfp4Weight, quantize_mxfp4
from moelink.rows.activation import quantize_activation
from moelink_bench.document import device_names
from moelink_bench.experts import PRODUCTS, Rows, Shape, figures, make_rows
from moelink_bench.script import Save, Script, positive
from moelink_bench.timing import capture, make_clock

SHAPES = {"deepseek-v3": (7168, 2048), "qwen3-30b-a3b": (2048, 768)}
"""Elements of a row, and of a row between the products."""
WAYS = ("fp8", "mxfp4")
BYTES = {"fp8": 1 + 4 / BLOCK**2, "mxfp4": 0.5 + 1 / GROUP}
"""Of a weight, its share of a scale included."""
COLD = 1 << 29
_PLAIN = {"parts": 1, "swapped": True, "descriptors": False, "band": 16, "registers": None}
"""Of tiles, values that need no mention."""


@dataclass(frozen=True)
class Case:
    """One layer's experts on a rank, and the device."""

    name: str
    experts: int
    device: torch.device

    @property
    def shape(self) -> Shape:
        """The sizes."""
        return Shape(self.experts, *SHAPES[self.name])


def weights_of(case: Case, product: str) -> dict[str, Weight]:
    """The same weights, of a normal distribution of variance 1 / K, in fp8 and in mxfp4."""
    columns, inner = case.shape.product(product)
    generator = torch.Generator(case.device).manual_seed(columns)
    fp8, mxfp4 = [], []
    for _ in range(case.experts):
        numbers = torch.randn(1, columns, inner, generator=generator, device=case.device) / inner**0.5
        fp8.append(quantize_weight(numbers))
        mxfp4.append(quantize_mxfp4(numbers))
    return {
        "fp8": BlockQuantized(torch.cat([w.codes for w in fp8]), torch.cat([w.scales for w in fp8])),
        "mxfp4": Mxfp4Weight(torch.cat([w.codes for w in mxfp4]), torch.cat([w.scales for w in mxfp4])),
    }


def drawn(experts: int, load: int) -> tuple[int, ...]:
    """Return the rows of each expert, ``load`` in the mean, as uniform routing draws them."""
    chosen = torch.randint(experts, (load * experts,), generator=torch.Generator().manual_seed(load))
    return tuple(torch.bincount(chosen, minlength=experts).tolist())


def copies_of(weights: Sequence[Weight]) -> list[list[Weight]]:
    """Return copies of ``weights`` that no cache holds, the given ones the first."""
    size = sum(weight.codes.nbytes for weight in weights)
    more = [[type(w)(w.codes.clone(), w.scales.clone()) for w in weights] for _ in range(min(31, COLD // size))]
    return [list(weights), *more]


def multiply(rows: Rows, weight: Weight, settings: Any = None, *, follows_product: bool = False) -> Tensor:
    """The product by the kernel for such weights, or by the twin where there is no device."""
    out = torch.empty(len(rows.codes), weight.shape[1], dtype=torch.bfloat16, device=rows.codes.device)
    if not rows.codes.is_cuda:
        for group, (start, end) in enumerate(itertools.pairwise(rows.offsets.tolist())):
            out[start:end] = weight.times(group, rows.codes[start:end], rows.scales[:, start:end])
    elif settings is None:
        weight.launch(rows.codes, rows.scales, rows.offsets, out, follows_product=follows_product)
    else:
        from moelink.rows.grouped_mxfp4 import launch

        launch(rows.codes, rows.scales, rows.offsets, weight.codes, weight.scales, out, settings)
    return out


def experts(rows: Rows, gate_up: Weight, down: Weight) -> Tensor:
    """Both products, the activation between them, as a layer launches them."""
    between = multiply(rows, gate_up)
    codes, scales = quantize_activation(between, rows.offsets, get_format("fp8_block128"), None)
    return multiply(dataclasses.replace(rows, codes=codes, scales=scales), down, follows_product=True)


def excess(out: Tensor, rows: Rows, weight: Weight) -> float:
    """The largest error over what is allowed, on the first, a middle and the last expert that has rows: at most 1 if it
    is right."""
    allowed = 2.0**-10 if out.is_cuda else 2.0**-18
    worst, present = 0.0, [group for group, size in enumerate(rows.sizes) if size]
    for group in {present[0], present[len(present) // 2], present[-1]}:
        start, end = int(rows.offsets[group]), int(rows.offsets[group + 1])
        scales = rows.scales[:, start:end].t().double().repeat_interleave(BLOCK, 1)
        exact_rows = rows.codes[start:end].to(torch.float64) * scales
        numbers = type(weight)(weight.codes[group], weight.scales[group]).dequantize(torch.float64)
        exact = exact_rows @ numbers.t()
        bound = 2.0**-8 * exact.abs() + allowed * (exact_rows.abs() @ numbers.abs().t()) + 1e-30
        worst = max(worst, float(((out[start:end].double() - exact).abs() / bound).max()))
    return round(worst, 3)


def microseconds(calls: Sequence[Callable[[], object]], device: torch.device, samples: int) -> float:
    """The median time of one of ``calls``: of replays of a graph of all of them on CUDA."""
    clock = make_clock(device, flush_bytes=1 << 28)
    if device.type != "cuda":
        return statistics.median(clock.measure(calls[0], samples=samples, warmup=0))
    clock.measure(calls[0], samples=1, warmup=0)
    calls = [*calls] * max(1, 4 // len(calls))
    captured = capture(calls, device)
    return statistics.median(clock.measure(captured.replay, samples=samples, warmup=2)) / len(calls)


# --- the rows of the result -------------------------------------------------------------------------------------------


def compare(case: Case, loads: Sequence[int], samples: int) -> Iterator[dict[str, Any]]:
    """A row for each product and load, and one for the experts as a whole."""
    weights = {product: weights_of(case, product) for product in PRODUCTS}
    for load in loads:
        base = {"shape": case.name, "experts": case.experts, "rows_an_expert": load}
        sizes = drawn(case.experts, load)
        for product in PRODUCTS:
            columns, inner = case.shape.product(product)
            rows = make_rows(sizes, 0, inner, case.device)
            row: dict[str, Any] = {**base, "product": product}
            for way in WAYS:
                weight = weights[product][way]
                worst = excess(multiply(rows, weight), rows, weight)
                calls = [functools.partial(multiply, rows, each[0]) for each in copies_of([weight])]
                us = microseconds(calls, case.device, samples)
                row[way] = {**figures(us, sizes, columns, inner, BYTES[way]), "error_over_bound": worst}
            yield {**row, "ratio": round(row["fp8"]["us"] / row["mxfp4"]["us"], 3)}
        rows, row = make_rows(sizes, 0, case.shape.hidden, case.device), {**base, "product": "experts"}
        for way in WAYS:
            each = copies_of([weights[product][way] for product in PRODUCTS])
            us = microseconds([functools.partial(experts, rows, *pair) for pair in each], case.device, samples)
            row[way] = {"us": round(us, 2)}
        yield {**row, "ratio": round(row["fp8"]["us"] / row["mxfp4"]["us"], 3)}


def candidates(load: int) -> list[Any]:
    """Tiles to try for groups of ``load`` rows."""
    from moelink.rows.grouped_fp8 import Tiles

    form = functools.partial(Tiles, swapped=True, descriptors=False)
    tight = functools.partial(form, registers=128)
    if load <= 16:
        return [
            tight(16, num_stages=4, programs=4), tight(16, num_stages=3, programs=4),
            tight(16, num_stages=6, programs=4),
            form(16, num_stages=4, programs=3), form(16, num_stages=6, programs=3),
            form(16, 64, num_stages=5, programs=5), form(16, 64, num_stages=5, programs=6, registers=80),
            form(16, 256, num_stages=4, programs=2), form(16, num_stages=4, programs=3, num_warps=8, registers=80),
        ]  # fmt: skip
    return [
        form(32, num_stages=4, programs=2), tight(32, 64, num_stages=4, programs=4),
        form(64, 64, num_stages=4, programs=2), form(64, num_stages=4, programs=1, num_warps=8),
    ]  # fmt: skip


def sweep(case: Case, loads: Sequence[int], samples: int) -> Iterator[dict[str, Any]]:
    """A row for each product, load and tiles, the fastest first, each found right."""
    from moelink.rows.grouped_fp8 import Settings

    for product in PRODUCTS:
        weight, (columns, inner) = weights_of(case, product)["mxfp4"], case.shape.product(product)
        for load in loads:
            sizes = drawn(case.experts, load)
            found: list[dict[str, Any]] = []
            rows = make_rows(sizes, 0, inner, case.device)
            for tiles in candidates(load):
                settings = Settings(tiles, tiles, most_few=len(rows.codes))
                form = {name: value for name, value in dataclasses.asdict(tiles).items() if value != _PLAIN.get(name)}
                row: dict[str, Any] = {
                    "sweep": case.name, "experts": case.experts, "rows_an_expert": load, "product": product,
                    "tiles": form,
                }  # fmt: skip
                try:
                    worst = excess(multiply(rows, weight, settings), rows, weight)
                except Exception as error:  # noqa: BLE001 - no room for it on this device, or the compiler gave up
                    found.append({**row, "us": None, "failure": f"{type(error).__name__}: {error}"[:160]})
                    continue
                calls = [functools.partial(multiply, rows, each[0], settings) for each in copies_of([weight])]
                us = microseconds(calls, case.device, samples)
                found.append({**row, **figures(us, sizes, columns, inner, BYTES["mxfp4"]), "error_over_bound": worst})
            yield from sorted(found, key=lambda each: each["us"] or float("inf"))


def compile_one(job: tuple[str, int, str, int, Any]) -> None:
    """Compile one product into Triton's cache on disk, in a process of its own: with ``job``'s tiles, or all kernels
    that are launched by default for its rows an expert."""
    from moelink.rows.grouped_fp8 import Settings

    name, groups, product, load, tiles = job
    device = torch.device("cuda")
    columns, inner = Case(name, groups, device).shape.product(product)
    sizes, count = (0,) * groups, load * groups
    rows = Rows(
        sizes, torch.zeros(groups + 1, dtype=torch.int32, device=device), torch.empty(0),
        torch.empty(count, inner, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(inner // BLOCK, count, device=device),
    )  # fmt: skip
    packed = Mxfp4Weight(
        torch.empty(groups, inner // 64, columns, GROUP, dtype=torch.uint8, device=device),
        torch.empty(groups, inner // BLOCK, columns, dtype=torch.int32, device=device),
    )
    try:
        if tiles is not None:
            multiply(rows, packed, Settings(tiles, tiles, most_few=count))
            return
        codes = torch.empty(groups, columns, inner, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(groups, -(-columns // BLOCK), inner // BLOCK, device=device)
        for weight in (packed, BlockQuantized(codes, scales)):
            for follows in {False, product == "down"}:
                multiply(rows, weight, follows_product=follows)
    except Exception as error:  # noqa: BLE001 - the measurement meets it again and names it
        print(f"{job}: {error}"[:200])


def compile_all(cases: Sequence[Case], loads: Sequence[int], workers: int, swept: bool) -> None:
    """Compile all that will be measured, side by side."""
    forms = [(load, tiles) for load in loads for tiles in (candidates(load) if swept else (None,))]
    jobs = [(case.name, case.experts, product, *form) for case in cases for product in PRODUCTS for form in forms]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, dict.fromkeys(jobs)))


# --- the script -------------------------------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sweep", action="store_true", help="time launch settings of the kernel, each by itself")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--experts", nargs="+", type=positive, default=[32, 64], help="experts of the rank")
    parser.add_argument("--loads", nargs="+", type=positive, default=[4, 16, 64], help="rows an expert, in the mean")
    parser.add_argument("--samples", type=positive, default=11)
    parser.add_argument("--workers", type=positive, default=14, help="processes that compile")


def _line(row: dict[str, Any]) -> str:
    what = f"{row.get('shape') or row['sweep']} {row['experts']} x {row['rows_an_expert']} {row['product']}"
    if "sweep" in row:
        return f"{what}: {row['us']} us, {row.get('weights_tb_per_s')} TB/s, {row['tiles']} {row.get('failure', '')}"
    rates = "".join(f" {row[way].get('weights_tb_per_s', '')}" for way in WAYS)
    return f"{what}: fp8 {row['fp8']['us']}, mxfp4 {row['mxfp4']['us']} us, ratio {row['ratio']};{rates}"


def run(args: argparse.Namespace, save: Save) -> int:
    """Measure, print a line a row, and save the result. Returns 1 where a product was wrong."""
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    cases, begin = [Case(name, count, device) for name in args.shapes for count in args.experts], time.monotonic()
    if device.type == "cuda":
        compile_all(cases, args.loads, args.workers, args.sweep)
    compiled, rows, worst = time.monotonic() - begin, [], 0.0
    for case in cases:
        for row in (sweep if args.sweep else compare)(case, args.loads, args.samples):
            print(_line(row), flush=True)
            rows.append(row)
            worst = max([worst, *(part.get("error_over_bound", 0) for part in (row, *map(row.get, WAYS)) if part)])
    save("mxfp4", {
        "device": device.type, "devices": device_names(device.type), "shapes": SHAPES,
        "unit": "microseconds a call, median of replays of a CUDA graph; weights of experts with rows in TB/s",
        "compile_seconds": round(compiled, 1), "seconds": round(time.monotonic() - begin, 1),
        "gate": "passed" if worst <= 1 else "failed", "rows": rows,
    })  # fmt: skip
    return int(worst > 1)


main = Script("mxfp4", __doc__, options, run, out="mxfp4_{device}.json").main

if __name__ == "__main__":
    raise SystemExit(main())
