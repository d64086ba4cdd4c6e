"""Choose what multiplies rows that travelled in fp8, and call it.

Legend: ``R`` rows of the buffer, ``K`` columns of a row, ``G`` groups, ``N`` columns of the output.

==============  ====================================================  ==================================================
backend         multiplies by                                         needs
==============  ====================================================  ==================================================
``triton``      :mod:`moelink.kernels.grouped_fp8`                    CUDA, or Triton's interpreter
``torch``       its twin: dequantised numbers in fp32, by group       nothing; on CUDA it waits for the host
``flashinfer``  ``flashinfer.gemm.group_gemm_fp8_nt_groupwise``       compute capability 10.x
``deep_gemm``   ``deep_gemm.m_grouped_fp8_gemm_nt_contiguous``        compute capability 9.0, ``expert_alignment=128``
``dequantize``  ``torch._grouped_mm``, after rows became numbers      nothing; weights stay in ``dtype``
``auto``        the first of ``AUTO`` that can, else ``dequantize``   nothing
==============  ====================================================  ==================================================

All but ``dequantize`` take rows of format fp8_block128 alone. torch's own grouped products of fp8 take one scale a row,
or the scales of MX formats, not one for each 128 elements; so ``torch`` is the twin. Products of rows in mxfp8 and
nvfp4 need instructions of compute capability 10.0, and no backend uses them yet.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moelink.activation import Clamp
from moelink.config import EPConfig
from moelink.errors import ConfigError, UnsupportedError
from moelink.nn.block_quantized import BLOCK, OUTPUT_DTYPES, BlockQuantized, launch_kernel, multiply_by_group
from moelink.nn.experts import Activation
from moelink.nn.gated import known_activation

ExpertsBackend = Literal["auto", "triton", "torch", "flashinfer", "deep_gemm", "dequantize"]

AUTO = {9: ("deep_gemm", "triton"), 10: ("flashinfer", "triton")}
"""Order of "auto" by the major compute capability: a library that is installed, then the kernel."""
PIP = {
    "flashinfer": "pip install flashinfer-python",
    "deep_gemm": "pip install git+https://github.com/deepseek-ai/DeepGEMM.git",
}


@dataclass(frozen=True)
class Choice:
    """What multiplies.

    Attributes:
        backend: any of :data:`ExpertsBackend` but "auto".
        reason: why "auto" chose "dequantize", else "".
    """

    backend: str
    reason: str = ""


@dataclass(frozen=True)
class Lack:
    """What a backend needs, and what it finds instead."""

    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.expected}, got {self.got}"


def choose_backend(
    wanted: str,
    config: EPConfig,
    *,
    intermediate_size: int,
    activation: Activation | Clamp,
    device: torch.device,
    dtype: torch.dtype,
) -> Choice:
    """Choose the backend for a layer.

    Raises:
        ConfigError: there is no such backend.
        UnsupportedError: a backend was asked for by name where it cannot run; "auto" takes another one.
    """
    if wanted not in get_args(ExpertsBackend):
        raise ConfigError("experts_backend", f"one of {', '.join(get_args(ExpertsBackend))}", wanted)
    if wanted == "dequantize":
        return Choice("dequantize")
    layer = _what_layer_lacks(config, intermediate_size, activation, dtype)
    if wanted != "auto":
        lacks = layer or what_is_missing(wanted, config, device)
        if lacks:
            raise UnsupportedError(
                f"experts_backend {wanted!r}: expected {lacks.expected}, got {lacks.got}; change that, or pass "
                "'auto' or 'dequantize'"
            )
        return Choice(wanted)
    if layer:
        return Choice("dequantize", f"quantised experts need {layer}")
    reasons = []
    for name in _order(device):
        lacks = what_is_missing(name, config, device)
        if not lacks:
            return Choice(name)
        reasons.append(f"{name} needs {lacks}")
    return Choice("dequantize", "; ".join(reasons) or f"no product in fp8 is known for {device}")


def _order(device: torch.device) -> tuple[str, ...]:
    """Candidates of "auto"."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ("torch",) if device.type == "cpu" else ()
    capability = torch.cuda.get_device_capability(device)
    return AUTO.get(capability[0], ("triton",) if capability >= (8, 9) else ())


def _what_layer_lacks(
    config: EPConfig, intermediate_size: int, activation: Activation | Clamp, dtype: torch.dtype
) -> Lack | None:
    """What the layer would have to be for any backend in fp8, or None."""
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


def what_is_missing(backend: str, config: EPConfig, device: torch.device) -> Lack | None:
    """What ``backend`` needs and does not find, or None."""
    if backend == "triton":
        from moelink.kernels.launch.device import is_interpreted

        found = device.type == "cuda" or is_interpreted()
        return None if found else Lack("a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)", str(device))
    lacks = what_library_lacks(backend, device) if backend in PIP else None
    if backend == "deep_gemm" and not lacks and config.row_alignment % BLOCK:
        return Lack(f"expert_alignment={BLOCK}", str(config.expert_alignment))
    return lacks


def what_library_lacks(library: str, device: torch.device) -> Lack | None:
    """What "flashinfer" or "deep_gemm" needs and does not find, whatever the layer, or None."""
    if importlib.util.find_spec(library) is None:
        return Lack(f"package {library}, by '{PIP[library]}'", "no such package")
    wanted = 10 if library == "flashinfer" else 9
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" and not torch.version.hip else 0
    return None if major == wanted else Lack(f"a CUDA device of compute capability {wanted}.x", f"{device}, {major}.x")


def multiply(
    backend: str, codes: Tensor, scales: Tensor, row_offsets: Tensor, weight: BlockQuantized, out: Tensor
) -> None:
    """Fill ``out`` [R, N] with rows times the weights of their groups; arguments as ``grouped_fp8`` has them."""
    by: dict[str, Any] = {
        "triton": launch_kernel, "torch": multiply_by_group, "flashinfer": _by_flashinfer, "deep_gemm": _by_deep_gemm,
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


def group_of_rows(row_offsets: Tensor, rows: int) -> Tensor:
    """[rows] int32: the group of each row, -1 for rows that do not exist.

    >>> group_of_rows(torch.tensor([0, 2, 2, 3]), 4).tolist()
    [0, 0, 2, -1]
    """
    row = torch.arange(rows, dtype=row_offsets.dtype, device=row_offsets.device)
    group = torch.searchsorted(row_offsets[1:].contiguous(), row, right=True, out_int32=True)
    return group.where(row < row_offsets[-1], -1)


def _by_deep_gemm(codes: Tensor, scales: Tensor, row_offsets: Tensor, weight: BlockQuantized, out: Tensor) -> None:
    deep_gemm = importlib.import_module("deep_gemm")
    groups = group_of_rows(row_offsets, codes.shape[0])
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((codes, scales.t()), (weight.codes, weight.scales), out, groups)
