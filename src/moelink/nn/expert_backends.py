"""Choose the product for rows that travelled in fp8, and call it.

Legend: ``R`` rows of the buffer, ``K`` columns of a row, ``G`` groups, ``N`` columns of the output.

==============  ====================================================  ==================================================
backend         multiplies by                                         needs
==============  ====================================================  ==================================================
``triton``      :mod:`moelink.rows.grouped_fp8`                       CUDA, or Triton's interpreter
``torch``       its twin: dequantised numbers in fp32, by group       nothing; on CUDA it waits for the host
``mxfp4``       :mod:`moelink.rows.grouped_mxfp4`: weights in 4 bits  nothing; elsewhere than on CUDA its twin
``flashinfer``  ``flashinfer.gemm.group_gemm_fp8_nt_groupwise``       compute capability 10.x
``dequantize``  ``torch._grouped_mm``, after rows became numbers      nothing; weights stay in ``dtype``
``auto``        the one that was measured to be fastest, see below    nothing
==============  ====================================================  ==================================================

All but ``dequantize`` take rows of format fp8_block128 alone. torch's own grouped products of fp8 take one scale a row,
or the scales of MX formats, not one for each 128 elements; so ``torch`` is the twin. Products of rows in mxfp8 and
nvfp4 need instructions of compute capability 10.0, and no backend uses them yet. On compute capability 9.0 ``triton``
takes :mod:`moelink.rows.grouped_gluon` or, for few rows, :mod:`moelink.rows.grouped_gluon_few`, and ``mxfp4``
:mod:`moelink.rows.grouped_gluon_mxfp4`.

"auto" is never slower than "dequantize", which is the default. On compute capability 9.0 it takes ``triton``: both
products and the activation take 0.35-0.79 of the time of bf16 for 4 to 4096 rows a group (``experts_h200.json``). Other
devices were not measured, so it takes "dequantize" there, unless weights are stored in fp8 alone. It takes ``mxfp4``
for weights that are stored so, and no others, whose numbers would change: that is for users to choose.

DeepGEMM's contiguous product was a backend. It computes whole tiles of 128 rows, and reads the group of each row from
an index that every call has to compute. Its times over those of ``triton`` on one H200
(``experts_deep_gemm_h200.json``) are 0.97-1.38 for 4 to 128 rows of experts with rows, 5.2 in a buffer of 32768 rows
with 128 filled ones, and 0.65-0.82 with 1024 or more rows an expert.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.errors import ConfigError, UnsupportedError
from moelink.nn.block_quantized import (
    BLOCK,
    OUTPUT_DTYPES,
    BlockQuantized,
    Weight,
    launch_kernel,
    multiply_by_group,
    quantize_weight,
)
from moelink.nn.experts import Activation
from moelink.nn.mxfp4 import quantize_mxfp4
from moelink.rows import eager
from moelink.rows.activation import Clamp
from moelink.rows.gated import known_activation

Stored = Literal["fp8", "mxfp4"]
ExpertsBackend = Literal["auto", "triton", "torch", "mxfp4", "flashinfer", "dequantize"]

MEASURED = (9,)
"""Major compute capabilities on which products in fp8 were measured to be faster than those in bf16."""
PIP = {"flashinfer": "pip install flashinfer-python"}


@dataclass(frozen=True)
class Choice:
    """The chosen product.

    Attributes:
        backend: any of :data:`ExpertsBackend` but "auto".
        reason: why "auto" chose "dequantize", else "".
    """

    backend: str
    reason: str = ""


@dataclass(frozen=True)
class Lack:
    """A requirement of a backend that is not met: the expected value and the found one."""

    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.expected}, got {self.got}"


def require_known(wanted: str) -> None:
    """Raise ConfigError if there is no backend of this name."""
    if wanted not in get_args(ExpertsBackend):
        raise ConfigError("experts_backend", f"one of {', '.join(get_args(ExpertsBackend))}", wanted)


def choose_backend(
    wanted: str,
    config: EPConfig,
    *,
    intermediate_size: int,
    activation: Activation | Clamp,
    device: torch.device,
    dtype: torch.dtype,
    stored: Stored | None = None,
) -> Choice:
    """Choose the backend for a layer.

    Args:
        stored: how the weights are quantised already, and stay: "auto" takes a product of such weights if there is any.

    Raises:
        ConfigError: there is no such backend.
        UnsupportedError: ``wanted`` names a backend that cannot run here; "auto" takes another one.
    """
    require_known(wanted)
    if wanted == "dequantize":
        return Choice("dequantize")
    layer = _what_layer_lacks(config, intermediate_size, activation, dtype)
    if wanted != "auto":
        lacks = layer or what_is_missing(wanted, device)
        if stored is not None and (wanted == "mxfp4") != (stored == "mxfp4"):
            lacks = Lack(f"weights that are not stored in {stored}", "some that are")
        if lacks:
            raise UnsupportedError(
                f"experts_backend {wanted!r}: expected {lacks.expected}, got {lacks.got}; change that, or pass "
                f"{'auto'!r}{'' if stored else ' or ' + repr('dequantize')}"
            )
        return Choice(wanted)
    if layer:
        return Choice("dequantize", f"quantised experts need {layer}")
    if stored == "mxfp4":
        return Choice("mxfp4")
    product, is_measured = _product_for(device)
    if not product:
        return Choice("dequantize", f"no product in fp8 is known for {device}")
    if not (is_measured or stored):
        return Choice("dequantize", f"no measurement shows that products in fp8 are faster on {device}")
    return Choice(product)


def _product_for(device: torch.device) -> tuple[str, bool]:
    """The product in fp8 that ``device`` has ("" for none), and whether it was measured to be faster than bf16."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ("torch" if device.type == "cpu" else "", False)
    capability = torch.cuda.get_device_capability(device)
    return ("triton" if capability >= (8, 9) else "", capability[0] in MEASURED)


def _what_layer_lacks(
    config: EPConfig, intermediate_size: int, activation: Activation | Clamp, dtype: torch.dtype
) -> Lack | None:
    """Return a requirement of all backends in fp8 that the layer does not meet, or None."""
    if config.batch_invariant:  # tiles, or a library's kernel, by the number of rows
        return Lack("batch_invariant=False, as their products depend on the number of rows", "True")
    if config.format.name != "fp8_block128":
        return Lack("dispatch_format='fp8_block128'", repr(config.format.name))
    if intermediate_size % BLOCK:
        return Lack(f"an intermediate_size that is a multiple of {BLOCK}", str(intermediate_size))
    if dtype not in OUTPUT_DTYPES:
        return Lack(f"one of the dtypes {', '.join(map(str, OUTPUT_DTYPES))}", str(dtype))
    known = known_activation(activation)
    if known is None or known.kind not in ("silu", "clamped"):
        return Lack("the activation silu or a moelink.activation.Clamp", repr(activation))
    return None


def what_is_missing(backend: str, device: torch.device) -> Lack | None:
    """Return a requirement of ``backend`` that is not met on ``device``, or None."""
    if backend == "triton":
        from moelink.kernels.launch.device import is_interpreted

        found = device.type == "cuda" or is_interpreted()
        return None if found else Lack("a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)", str(device))
    return what_library_lacks(backend, device) if backend in PIP else None


def what_library_lacks(library: str, device: torch.device) -> Lack | None:
    """Return a requirement of a ``library`` of :data:`PIP` that is not met here, for any layer, or None."""
    if importlib.util.find_spec(library) is None:
        return Lack(f"package {library}, by '{PIP[library]}'", "no such package")
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" and not torch.version.hip else 0
    return None if major == 10 else Lack("a CUDA device of compute capability 10.x", f"{device}, {major}.x")


def quantize_for(backend: str, weight: Tensor) -> Weight:
    """Quantise weights [G, N, K] to the format that ``backend`` multiplies."""
    return quantize_mxfp4(weight) if backend == "mxfp4" else quantize_weight(weight)


def multiply(
    backend: str, codes: Tensor, scales: Tensor, row_offsets: Tensor, weight: Weight, out: Tensor,
    *, follows_product: bool = False, likely_rows: int | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` [R, N] with rows times the weights of their groups; arguments as ``grouped_fp8`` has them, and
    ``follows_product`` and ``likely_rows`` as ``launch_kernel``."""
    by_kernel = partial(launch_kernel, follows_product=follows_product, likely_rows=likely_rows)
    by: dict[str, Any] = {
        "triton": by_kernel, "torch": multiply_by_group, "flashinfer": _by_flashinfer,
        "mxfp4": by_kernel if eager.takes_kernels(codes) else multiply_by_group,
    }  # fmt: skip
    by[backend](codes, scales, row_offsets, weight, out)


def _by_flashinfer(codes: Tensor, scales: Tensor, row_offsets: Tensor, weight: BlockQuantized, out: Tensor) -> None:
    gemm = importlib.import_module("flashinfer.gemm")
    # Rows' scales lie as they are wanted, [K / 128, R]; then weights' must be [G, K / 128, N / 128].
    weight_scales = weight.scales.transpose(1, 2).contiguous()
    gemm.group_gemm_fp8_nt_groupwise(
        codes, weight.codes, scales, weight_scales, row_offsets, scale_granularity_mnk=(1, BLOCK, BLOCK),
        scale_major_mode="MN", out=out, out_dtype=out.dtype,
    )  # fmt: skip
