"""Check the tensors that a caller passes, and describe those that it gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moelink.errors import ArgumentError


def check_tensor(
    name: str, value: object, *, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], device: torch.device
) -> Tensor:
    """Return ``value`` as a contiguous tensor of ``shape`` (None: any size), one of ``dtypes``, on ``device``."""
    if not isinstance(value, Tensor):
        raise ArgumentError(name, "a tensor", type(value).__name__)
    if value.shape != shape and (
        value.dim() != len(shape)
        or any(want is not None and want != have for want, have in zip(shape, value.shape, strict=True))
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ArgumentError(name, f"shape [{wanted}]", f"{list(value.shape)}")
    if value.dtype not in dtypes:
        raise ArgumentError(name, f"dtype {' or '.join(map(str, dtypes))}", value.dtype)
    if value.device != device:
        raise ArgumentError(name, f"device {device}", value.device)
    if not value.is_contiguous():
        raise ArgumentError(name, "a contiguous tensor", f"strides {value.stride()} for shape {list(value.shape)}")
    return value


def describe(record: object, names: Iterable[str]) -> str:
    """Return the ``repr`` of a record: a tensor as dtype and shape, ``tokens=bfloat16[6, 64]``, a list as its length.

    No value is read, so that a device is not waited for.
    """
    return f"{type(record).__name__}({', '.join(f'{name}={_brief(getattr(record, name))}' for name in names)})"


def _brief(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"list[{len(value)}]" if isinstance(value, list) else repr(value)
