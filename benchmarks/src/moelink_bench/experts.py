"""Time the grouped products of experts: bf16 by torch against fp8 by the kernel and by installed libraries.

Two products, those of a layer of DeepSeek-V3's shape with 32 experts on the rank (gate and up, 4096 x 7168; down,
7168 x 2048), and the experts as a whole: product, activation, product. The *loads* are rows an expert, the same for all
experts, or skewed.

Dispatch pads groups to multiples of 4 rows, so 4 also stands for one. Skewed loads are

* ``few``: every eighth expert has 64 rows, the others none. ``one``: one expert has 4096 rows, the others none.
* ``mixed``: expert i has about 2048 / (i + 1) rows. ``room``: 4 rows an expert, in a buffer of 32768 rows.

DeepGEMM's grouped product is measured where the package ``deep_gemm`` is installed (``sgl-deep-gemm`` has it). It needs
groups of multiples of 128 rows, and the group of each row. ``deep_gemm`` computes these from the offsets in each call,
as a layer would; ``deep_gemm_alone`` is given them.

A figure is the median time of replays of a CUDA graph, divided by its calls, on one device. Weights are larger than any
cache. Every product is first found within the accuracy that :mod:`moelink.nn.block_quantized` states, in fp64, on rows
of three experts.

    python -m moelink_bench.experts --out experts.json
    python -m moelink_bench.experts --gluon --loads 4 128 1024 --out gluon.json    # the kernels in Gluon as well
    python -m moelink_bench.experts --sweep --out sweep.json      # launch settings of the kernel, by load
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moelink.activation import silu_and_quantize
from moelink.formats import get_format
from moelink.nn.block_quantized import (
    BLOCK,
    BlockQuantized,
    dequantize_weight,
    multiply_by_group,
    quantize_weight,
)
from moelink.nn.expert_backends import PIP, multiply, what_library_lacks
from moelink.nn.experts import group_of_rows, grouped_matmul
from moelink.rows.gated import gated_activation
from moelink.tools.results import sizes_of
from moelink_bench.document import device_names
from moelink_bench.script import Save, Script, add_numbers, positive
from moelink_bench.timing import Action, capture, make_clock

Product = Callable[["Rows", "Weights"], Tensor]

BF16, FP8, GLUON = "bf16", "fp8", "gluon"
PRODUCTS = ("gate_up", "down")
LOADS = ("4", "32", "128", "1024", "few", "one", "mixed", "room")
LOADS_OF_SWEEP = ("4", "32", "64", "128", "1024")
"""The defaults of ``--loads``, without and with ``--sweep``."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the experts of a rank."""

    experts: int = 32
    hidden: int = 7168
    intermediate: int = 2048

    def product(self, name: str) -> tuple[int, int]:
        """(columns of the output, columns of a row) of "gate_up" or "down"."""
        if name == "gate_up":
            return 2 * self.intermediate, self.hidden
        return self.hidden, self.intermediate


@dataclass(frozen=True)
class Weights:
    """The weights of one product, in bf16 and quantised."""

    numbers: Tensor
    quantized: BlockQuantized


def make_weights(experts: int, columns: int, inner: int, device: torch.device) -> Weights:
    """Draw weights of a normal distribution of variance 1 / ``inner``."""
    generator = torch.Generator(device).manual_seed(columns)
    numbers = torch.empty(experts, columns, inner, dtype=torch.bfloat16, device=device)
    for matrix in numbers:
        matrix.copy_(torch.randn(columns, inner, generator=generator, device=device) / inner**0.5)
    return Weights(numbers, quantize_weight(numbers))


@dataclass(frozen=True)
class Rows:
    """Rows of experts as numbers and quantised, with their offsets."""

    sizes: tuple[int, ...]
    offsets: Tensor
    numbers: Tensor
    codes: Tensor
    scales: Tensor


def make_rows(sizes: Sequence[int], room: int, inner: int, device: torch.device) -> Rows:
    """Draw rows of a normal distribution, in a buffer of at least ``room`` rows."""
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32)
    generator = torch.Generator(device).manual_seed(inner)
    total = max(sum(sizes), room)
    numbers = torch.randn(total, inner, generator=generator, device=device).to(torch.bfloat16)
    quantized = get_format("fp8_block128").quantize(numbers)
    assert quantized.scales is not None
    return Rows(tuple(sizes), offsets, numbers, quantized.payload.contiguous(), quantized.scales.t().contiguous())


# --- contenders -------------------------------------------------------------------------------------------------------


def by_torch(rows: Rows, weights: Weights) -> Tensor:
    """The product in bf16, as torch makes it."""
    return grouped_matmul(rows.numbers, rows.offsets, weights.numbers)


def by_kernel(rows: Rows, weights: Weights, settings: Any = None) -> Tensor:
    """The product in fp8, by the kernel; interpreted or by the twin where there is no device."""
    from moelink.kernels.launch.device import is_interpreted
    from moelink.rows.grouped_fp8 import launch

    out = rows.numbers.new_empty(rows.numbers.shape[0], weights.numbers.shape[1])
    quantized = weights.quantized
    if rows.codes.is_cuda or is_interpreted():
        launch(rows.codes, rows.scales, rows.offsets, quantized.codes, quantized.scales, out, settings)
    else:
        multiply_by_group(rows.codes, rows.scales, rows.offsets, quantized, out)
    return out


def by_gluon(rows: Rows, weights: Weights) -> Tensor:
    """The product in fp8, by the kernel in Gluon that a layer takes on compute capability 9.0 for such a buffer."""
    out = rows.numbers.new_empty(rows.numbers.shape[0], weights.numbers.shape[1])
    weights.quantized.launch(rows.codes, rows.scales, rows.offsets, out)
    return out


def by_library(rows: Rows, weights: Weights, library: str) -> Tensor:
    """The product in fp8, by an installed library."""
    out = rows.numbers.new_empty(rows.numbers.shape[0], weights.numbers.shape[1])
    multiply(library, rows.codes, rows.scales, rows.offsets, weights.quantized, out)
    return out


def by_deep_gemm(rows: Rows, weights: Weights, groups: Tensor | None = None) -> Tensor:
    """The product in fp8, by DeepGEMM. ``groups`` is the group of each row, made here from the offsets if None."""
    deep_gemm = importlib.import_module("deep_gemm")
    out = rows.numbers.new_empty(rows.numbers.shape[0], weights.numbers.shape[1])
    groups = group_of_rows(rows.offsets, len(out)) if groups is None else groups
    weight = weights.quantized.codes, weights.quantized.scales
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((rows.codes, rows.scales.t()), weight, out, groups)
    return out


def contenders(device: torch.device, gluon: bool) -> dict[str, Product]:
    """The ways to make a product of rows as dispatch packs them that run here."""
    ways: dict[str, Product] = {BF16: by_torch, FP8: by_kernel}
    if gluon:
        ways[GLUON] = by_gluon
    for library in PIP:
        if not what_library_lacks(library, device):
            ways[library] = functools.partial(by_library, library=library)
    return ways


def experts_in_bf16(rows: Rows, gate_up: Weights, down: Weights) -> Tensor:
    """All of the experts in bf16, as ``moelink.nn.grouped_experts`` computes them from rows without scales."""
    inner = gated_activation(by_torch(rows, gate_up), rows.offsets, functional.silu)
    return grouped_matmul(inner, rows.offsets, down.numbers)


def experts_in_fp8(rows: Rows, gate_up: Weights, down: Weights, multiplied: Product = by_kernel) -> Tensor:
    """All of the experts in fp8, with the activation quantised on its way."""
    inner = silu_and_quantize(multiplied(rows, gate_up), rows.offsets, format="fp8_block128")
    assert inner.scales is not None
    between = dataclasses.replace(rows, numbers=rows.numbers[:, :1], codes=inner.tokens, scales=inner.scales)
    return multiplied(between, down)


# --- correctness ------------------------------------------------------------------------------------------------------


def excess(out: Tensor, rows: Rows, weights: Weights) -> float:
    """The largest error of a product of quantised numbers over what is allowed, on rows of the first, a middle and the
    last expert that have any: at most 1 if it is right."""
    groups = [group for group, size in enumerate(rows.sizes) if size]
    allowed = 2.0**-10 if out.is_cuda else 2.0**-18
    worst = 0.0
    for group in {groups[0], groups[len(groups) // 2], groups[-1]} if groups else ():
        start, end = int(rows.offsets[group]), int(rows.offsets[group + 1])
        chosen = torch.tensor(sorted({*range(start, end)[:40], *range(start, end)[-40:]}), device=out.device)
        scales = rows.scales[:, chosen].t().double().repeat_interleave(BLOCK, 1)
        exact_rows = rows.codes[chosen].to(torch.float64) * scales
        of_group = BlockQuantized(weights.quantized.codes[group], weights.quantized.scales[group])
        weight = dequantize_weight(of_group, dtype=torch.float64)
        exact = exact_rows @ weight.t()
        bound = 2.0**-8 * exact.abs() + allowed * (exact_rows.abs() @ weight.abs().t()) + 1e-30
        worst = max(worst, float(((out[chosen].double() - exact).abs() / bound).max()))
    return worst


# --- time -------------------------------------------------------------------------------------------------------------


def microseconds(action: Action, device: torch.device, samples: int) -> float:
    """The median time of ``action``: of replays of a graph of several calls on CUDA."""
    clock = make_clock(device, flush_bytes=1 << 28)
    (once,) = clock.measure(action, samples=1, warmup=int(device.type == "cuda"))
    if device.type != "cuda":
        return statistics.median(clock.measure(action, samples=samples, warmup=0))
    calls = max(1, min(10, round(4e3 / once)))
    captured = capture([action] * calls, device)
    return statistics.median(clock.measure(captured.replay, samples=samples, warmup=2)) / calls


def figures(us: float, sizes: Sequence[int], columns: int, inner: int, weight_bytes: float) -> dict[str, float]:
    """The rates of a product of ``us`` microseconds: TB/s of the weights of experts with rows, and TFLOP/s.

    >>> figures(10.0, [2, 0], columns=1000, inner=1000, weight_bytes=1)
    {'us': 10.0, 'weights_tb_per_s': 0.1, 'tflop_per_s': 0.4}
    """
    read = sum(size > 0 for size in sizes) * columns * inner * weight_bytes
    work = 2 * sum(sizes) * columns * inner
    return {"us": round(us, 2), "weights_tb_per_s": round(read / us / 1e6, 3), "tflop_per_s": round(work / us / 1e6, 1)}


def measure_load(
    load: str, shape: Shape, weights: dict[str, Weights], device: torch.device, *, most: int, samples: int,
    gluon: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each product, and one for the experts as a whole."""
    sizes, room = sizes_of(load, shape.experts, most), 8 * most if load == "room" else 0
    by_product = {name: make_rows(sizes, room, shape.product(name)[1], device) for name in weights}
    base = {"load": load, "rows": sum(sizes), "experts_with_rows": sum(size > 0 for size in sizes)}
    for name, own in weights.items():
        columns, inner = shape.product(name)
        row: dict[str, Any] = {"product": name, **base}
        worst = 0.0
        ways = [(way, product, by_product[name]) for way, product in contenders(device, gluon).items()]
        if device.type == "cuda" and importlib.util.find_spec("deep_gemm") is not None:
            aligned = make_rows([-(-size // BLOCK) * BLOCK for size in sizes], room, inner, device)
            alone = functools.partial(by_deep_gemm, groups=group_of_rows(aligned.offsets, aligned.codes.shape[0]))
            ways += [("deep_gemm", by_deep_gemm, aligned), ("deep_gemm_alone", alone, aligned)]
        for way, product, rows in ways:
            if way != BF16:
                worst = max(worst, excess(product(rows, own), rows, own))
            us = microseconds(functools.partial(product, rows, own), device, samples)
            row[way] = figures(us, sizes, columns, inner, 2 if way == BF16 else 1)
        row |= {"ratio": round(row[BF16]["us"] / row[FP8]["us"], 3), "error_over_bound": round(worst, 3)}
        yield row
    rows = by_product["gate_up"]
    whole: dict[str, Any] = {"product": "experts", **base}
    in_gluon = functools.partial(experts_in_fp8, multiplied=by_gluon)
    wholes: list[tuple[str, Callable[..., Tensor]]] = [
        (BF16, experts_in_bf16),
        (FP8, experts_in_fp8),
        *([(GLUON, in_gluon)] if gluon else []),
    ]
    for way, experts in wholes:
        us = microseconds(functools.partial(experts, rows, weights["gate_up"], weights["down"]), device, samples)
        whole[way] = {"us": round(us, 2)}
    whole["ratio"] = round(whole[BF16]["us"] / whole[FP8]["us"], 3)
    yield whole


# --- launch settings --------------------------------------------------------------------------------------------------


def candidates() -> list[Any]:
    """Tiles to try."""
    from moelink.kernels.launch.device import is_interpreted
    from moelink.rows.grouped_fp8 import Tiles

    if is_interpreted():
        return [Tiles(16, 64, swapped=True, descriptors=False), Tiles(32, 64, parts=2, descriptors=False)]
    few = functools.partial(Tiles, swapped=True)
    return [
        few(16, num_stages=5, programs=2), few(16, num_stages=8, programs=1), few(16, num_stages=3, programs=3),
        few(16, parts=2, num_stages=5), few(16, parts=2, num_stages=3, programs=2),
        few(16, num_stages=5, programs=2, descriptors=False), few(16, 64, num_stages=6, programs=3),
        few(32, num_stages=5, programs=2), few(32, num_stages=3, programs=3), few(32, parts=2, num_stages=5),
        few(32, 64, num_stages=6, programs=3), few(32, num_stages=5, programs=2, descriptors=False),
        few(64, num_stages=4, programs=2), few(64, num_warps=8, num_stages=8),
        Tiles(64, num_stages=4, programs=2), Tiles(64, num_stages=3, programs=3), Tiles(64, parts=2, num_stages=5),
        Tiles(128, num_warps=8, num_stages=6), Tiles(128, 64, num_stages=4, programs=2),
        Tiles(128, 64, parts=2, num_stages=3, programs=2), Tiles(128, parts=2, num_warps=8),
        Tiles(128, parts=2, num_warps=8, band=8), Tiles(128, parts=2, num_warps=8, band=32),
        Tiles(128, parts=2, num_warps=8, num_stages=3), Tiles(128, num_warps=8, num_stages=6, descriptors=False),
    ]  # fmt: skip


def compile_tiles(job: tuple[Any, str], shape: Shape) -> str:
    """Compile for tiles and a product into Triton's cache on disk, in a process of its own; return the error, or ""."""
    tiles, groups, (columns, inner) = job[0], shape.experts, shape.product(job[1])
    device = torch.device("cuda")
    fp8 = functools.partial(torch.empty, dtype=torch.float8_e4m3fn, device=device)
    weight = BlockQuantized(
        fp8(groups, columns, inner),
        torch.empty(groups, -(-columns // BLOCK), inner // BLOCK, device=device),
    )
    rows = fp8(tiles.rows, inner), torch.empty(inner // BLOCK, tiles.rows, device=device)
    offsets = torch.zeros(groups + 1, dtype=torch.int32, device=device)
    out = torch.empty(tiles.rows, columns, dtype=torch.bfloat16, device=device)
    return _launch_alone(tiles, rows, offsets, weight, out)


def _launch_alone(tiles: Any, rows: tuple[Tensor, Tensor], offsets: Tensor, weight: BlockQuantized, out: Tensor) -> str:
    """Serve all groups with ``tiles``; return the error, or ""."""
    from triton.errors import TritonError

    from moelink.rows.grouped_fp8 import Settings, launch

    try:
        launch(*rows, offsets, weight.codes, weight.scales, out, Settings(tiles, tiles, most_few=len(out)))
    except (TritonError, RuntimeError) as error:  # no room for it on this device, or the compiler gave up
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return ""


def compile_all(tiles: Sequence[Any], shape: Shape, workers: int) -> None:
    """Compile for all tiles and both products, side by side."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(functools.partial(compile_tiles, shape=shape), itertools.product(tiles, PRODUCTS)))


def sweep_load(
    load: str, name: str, tiles: Sequence[Any], shape: Shape, own: Weights, device: torch.device, *, most: int,
    samples: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each of ``tiles``, the fastest first, each found right."""
    from moelink.rows.grouped_fp8 import Settings

    sizes, (columns, inner) = sizes_of(load, shape.experts, most), shape.product(name)
    rows, found = make_rows(sizes, 0, inner, device), []
    for each in tiles:
        settings = Settings(each, each, most_few=rows.codes.shape[0])
        row: dict[str, Any] = {"product": name, "load": load, "tiles": dataclasses.asdict(each)}
        out = rows.numbers.new_empty(rows.numbers.shape[0], columns)
        failure = _launch_alone(each, (rows.codes, rows.scales), rows.offsets, own.quantized, out)
        if failure:
            found.append({**row, "us": float("inf"), "failure": failure})
            continue
        row["error_over_bound"] = round(excess(out, rows, own), 3)
        action = functools.partial(by_kernel, rows, own, settings)
        found.append({**row, **figures(microseconds(action, device, samples), sizes, columns, inner, 1)})
    yield from sorted(found, key=lambda row: row["us"])


def rows_of(
    args: argparse.Namespace, load: str, tiles: Sequence[Any], weights: dict[str, Weights]
) -> Iterator[dict[str, Any]]:
    """Measure one load, with each of ``tiles`` if there are any."""
    shape, device = _shape(args), next(iter(weights.values())).numbers.device
    how = {"most": args.most, "samples": args.samples}
    if not tiles:
        yield from measure_load(load, shape, weights, device, gluon=args.gluon, **how)
    for name in PRODUCTS if tiles else ():
        yield from sweep_load(load, name, tiles, shape, weights[name], device, **how)


def _shape(args: argparse.Namespace) -> Shape:
    return Shape(args.experts, args.hidden, args.intermediate)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sweep", action="store_true", help="time launch settings of the kernel, each by itself")
    parser.add_argument("--gluon", action="store_true", help="time the kernels in Gluon beside the others")
    parser.add_argument("--loads", nargs="+", help="rows an expert, few, one, mixed, room; default: all of them")
    parser.add_argument("--most", type=positive, default=4096, help="rows of the largest expert of a skewed load")
    parser.add_argument("--samples", type=positive, default=11)
    parser.add_argument("--workers", type=positive, default=12, help="processes that compile")
    add_numbers(parser, dataclasses.asdict(Shape()))


def run(args: argparse.Namespace, save: Save) -> int:
    """Measure, print a line a row, and save the result. Returns 1 where a product was wrong."""
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    shape, begin = _shape(args), time.monotonic()
    tiles = candidates() if args.sweep else []
    if tiles and device.type == "cuda":
        compile_all(tiles, shape, args.workers)
    compiled = time.monotonic() - begin
    weights = {name: make_weights(shape.experts, *shape.product(name), device) for name in PRODUCTS}
    rows = []
    for load in args.loads or (LOADS_OF_SWEEP if args.sweep else LOADS):
        for row in rows_of(args, load, tiles, weights):
            print(json.dumps(row), flush=True)
            rows.append(row)
    right = all(row.get("error_over_bound", 0) <= 1 for row in rows)
    save("experts", {
        "device": device.type, "devices": device_names(device.type), "shape": dataclasses.asdict(shape),
        "most_rows": args.most,
        "unit": "microseconds a call, median of replays of a CUDA graph; weights of experts with rows in TB/s",
        "compile_seconds": round(compiled, 1), "seconds": round(time.monotonic() - begin, 1),
        "gate": "passed" if right else "failed",
        "rows": [{**row, "us": None} if row.get("us") == float("inf") else row for row in rows],
    })  # fmt: skip
    return int(not right)


main = Script("experts", __doc__, options, run, out="experts_{device}.json").main

if __name__ == "__main__":
    raise SystemExit(main())
