"""Define a token format: how a row of activations becomes bytes on the wire, and rows plus scales at the receiver.

Legend: ``n`` rows, ``hidden`` elements a row, ``group`` elements that share a scale, ``g`` scales a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelink.arguments import describe
from moelink.errors import ArgumentError, ConfigError, UnsupportedError


@dataclass(frozen=True)
class Quantized:
    """Rows in a format.

    Attributes:
        payload: [n, payload_width] of ``payload_dtype`` (uint8 with two codes a byte for 4-bit formats,
            the even element in the low nibble).
        scales: [n, scale_width] of ``scale_dtype``, row-major, or None for formats that carry rows unchanged.
    """

    payload: Tensor
    scales: Tensor | None

    def __repr__(self) -> str:
        """Dtypes and shapes."""
        return describe(self, ("payload", "scales"))


class ScaleLayout(ABC):
    """The places of scales in the output: writes scales there and reads them back. Pure torch; no communication.

    ``row_offsets`` is [num_groups + 1] int32, exclusive starts of the groups in the output rows. ``rows`` [n] int64 are
    output row numbers and ``groups`` [n] int64 the group of each.

    Attributes:
        block_rows: rows of a group that are laid out together. Layout "masked" has whole blocks.
    """

    name: str
    block_rows: int = 1

    @abstractmethod
    def shape(self, num_rows: int, scale_width: int, num_groups: int) -> tuple[int, ...]:
        """Return the shape of the scale tensor for ``num_rows`` output rows in ``num_groups`` groups."""

    def group_shape(self, num_rows: int, scale_width: int) -> tuple[int, ...]:
        """Return the shape of the scales of one group in layout "masked": ``num_rows`` rows, whole blocks."""
        return self.shape(num_rows, scale_width, 1)

    @abstractmethod
    def scatter(self, out: Tensor, scales: Tensor, *, rows: Tensor, groups: Tensor, row_offsets: Tensor) -> None:
        """Write ``scales`` [n, scale_width] of output rows ``rows`` into ``out`` (a tensor of :meth:`shape`)."""

    @abstractmethod
    def gather(self, scales: Tensor, *, rows: Tensor, groups: Tensor, row_offsets: Tensor, scale_width: int) -> Tensor:
        """Return the inverse: [n, scale_width] row-major scales of output rows ``rows``."""

    @abstractmethod
    def clear_padding(self, out: Tensor, *, row_offsets: Tensor, group_sizes: Tensor) -> None:
        """Zero the scales of padding rows, past the ``group_sizes`` [num_groups] real rows of a group: up to the next
        group's start, in 128x4 tiles up to the end of the last block with a row of the group."""

    def scales_offsets(self, row_offsets: Tensor) -> Tensor | None:
        """Return the extra [num_groups] int32 output of layouts that place groups in blocks, else None."""
        return None


class Format(ABC):
    """One token format. Stateless; one instance serves every communicator.

    Attributes:
        name: the registered name, e.g. ``"fp8_block128"``.
        group: elements that are encoded together; ``hidden`` must be a multiple of it (and even for 4-bit formats).
            They share a scale, unless :meth:`elements_per_scale` says that more do.
        payload_dtype: dtype of the payload tensor.
        scale_dtype: dtype of one element of the scales, or None. It may hold several scales (int32 for four of E8M0).
        row_multiple: group sizes of the "expert" layout are rounded up to this many rows.
        tolerance: largest relative error of one round trip, |dequantize(quantize(x)) - x| <= tolerance * amax(group);
            0 for formats that carry rows unchanged.
        scale_layout: layout of the scales in the "expert" layout, or None without scales.
        input_dtypes: activation dtypes that :meth:`quantize` takes.
        uses_input_scale: whether a global input scale takes part in the arithmetic (nvfp4).
    """

    name: str
    group: int
    payload_dtype: torch.dtype
    scale_dtype: torch.dtype | None
    row_multiple: int = 1
    tolerance: float
    scale_layout: ScaleLayout | None
    input_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    uses_input_scale: bool = False

    @abstractmethod
    def payload_width(self, hidden: int) -> int:
        """Return the elements of ``payload_dtype`` per row."""

    def elements_per_scale(self, hidden: int) -> int:
        """Return how many elements share a scale: the group, or ``hidden`` in a format with one scale per row."""
        return self.group

    def scale_width(self, hidden: int) -> int:
        """Return the elements of ``scale_dtype`` per row."""
        return 0 if self.scale_dtype is None else hidden // self.elements_per_scale(hidden)

    def payload_bytes(self, hidden: int) -> int:
        """Return the bytes of one row's payload."""
        return self.payload_width(hidden) * self.payload_dtype.itemsize

    def scale_bytes(self, hidden: int) -> int:
        """Return the bytes of one row's scales."""
        return self.scale_width(hidden) * (0 if self.scale_dtype is None else self.scale_dtype.itemsize)

    def bytes_per_token(self, hidden: int) -> int:
        """Return the bytes of payload and scales of one row, without padding or header."""
        return self.payload_bytes(hidden) + self.scale_bytes(hidden)

    def validate_hidden(self, hidden: int) -> None:
        """Raise ConfigError when the format's group does not divide ``hidden``."""
        if hidden % self.group:
            raise ConfigError("hidden_size", f"a multiple of {self.group} (the group of format {self.name!r})", hidden)

    @abstractmethod
    def quantize(self, x: Tensor, input_scale: Tensor | None = None) -> Quantized:
        """Encode rows [n, hidden] of one of ``input_dtypes``. ``input_scale``: fp32, one element, or None for 1."""

    @abstractmethod
    def dequantize(self, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
        """Return [n, hidden] fp32 (fp64 for format fp64) from payload and row-major scales.

        Raises:
            ArgumentError: one of them has not the dtype of the format. Dtypes of a byte may come as uint8.
        """

    def codec(self) -> Any:
        """Return the Triton codec: device functions of the same arithmetic, bit for bit. Imports triton."""
        raise UnsupportedError(
            f"format {self.name!r}: expected Triton device functions, got none; use transport='collective'"
        )


class BuiltIn(Format):
    """A format of moelink's own. Its codec has its name; a subclass with another name inherits the codec."""

    def payload_width(self, hidden: int) -> int:
        return hidden

    def codec(self) -> Any:
        from moelink.formats.device import CODECS

        names = (kind.__dict__.get("name") for kind in type(self).__mro__)
        return next(CODECS[name] for name in names if name in CODECS)


def check_rows(fmt: Format, x: Tensor, input_scale: Tensor | None) -> None:
    """Raise for arguments that ``fmt.quantize`` does not take: shape, dtype, hidden size, or an unused scale."""
    if x.dim() != 2:
        raise ArgumentError("x", "a tensor [n, hidden]", f"shape {list(x.shape)}")
    if x.dtype not in fmt.input_dtypes:
        raise ArgumentError("x", f"one of {', '.join(map(str, fmt.input_dtypes))} (format {fmt.name!r})", x.dtype)
    fmt.validate_hidden(x.shape[1])
    if input_scale is not None and not fmt.uses_input_scale:
        raise ArgumentError("input_scale", f"None (format {fmt.name!r} has no global scale)", "a tensor")


def encodes_rows_alone(fmt: Format, hidden: int) -> bool:
    """Return whether ``fmt`` gives a row the same bits beside a row of 100 times its size and without it."""
    row = torch.linspace(-1.0, 1.0, hidden, device="cpu").to(fmt.input_dtypes[0])
    beside, alone = (fmt.quantize(rows) for rows in (torch.stack([row, 100 * row]), row[None]))
    pairs = ((beside.payload, alone.payload), (beside.scales, alone.scales))
    bits = [
        [rows.contiguous().view(torch.uint8) for rows in (b[:1], a)] for b, a in pairs if not (b is None or a is None)
    ]
    return all(torch.equal(*each) for each in bits)


def split(fmt: Format, x: Tensor, input_scale: Tensor | None = None) -> Tensor:
    """Check [n, hidden] and split it into fp32 [n, g, elements], g parts that share a scale each."""
    check_rows(fmt, x, input_scale)
    return _parts(fmt, x.to(torch.float32))


def _parts(fmt: Format, x: Tensor) -> Tensor:
    elements = fmt.elements_per_scale(x.shape[1])
    return x.reshape(x.shape[0], x.shape[1] // elements, elements)


def join(fmt: Format, values: Tensor, scales: Tensor) -> Tensor:
    """Undo :func:`split`: fp32 [n, hidden] of codes as fp32 [n, hidden] times scales [n, g]."""
    return (_parts(fmt, values) * scales[..., None]).view(values.shape)


def require_codes(fmt: Format, payload: Tensor, scales: Tensor | None) -> Tensor:
    """Return ``scales``, which ``fmt.dequantize`` needs. Raises ArgumentError for None, and for other dtypes."""
    check_codes(fmt, "payload", payload, fmt.payload_dtype)
    if scales is None:
        raise ArgumentError("scales", f"the scales of format {fmt.name!r}", None)
    check_codes(fmt, "scales", scales, fmt.scale_dtype)
    return scales


def check_codes(fmt: Format, name: str, codes: Tensor, dtype: torch.dtype | None) -> None:
    """Raise ArgumentError for codes of ``fmt`` of another dtype than ``dtype``, whose bytes would be read as codes.
    Codes of a byte may be uint8."""
    if codes.dtype == dtype or dtype is None or (codes.dtype == torch.uint8 and dtype.itemsize == 1):
        return
    bits = ", or its bits as torch.uint8," if dtype.itemsize == 1 and dtype != torch.uint8 else ""
    raise ArgumentError(name, f"{dtype}{bits} (format {fmt.name!r})", codes.dtype)
