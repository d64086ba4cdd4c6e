"""What casts and moves of a whole model do to its layers: buffers that stay as they are, experts that outgrow their
rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class KeepsBuffers(torch.nn.Module):
    """A module whose buffers ``kept`` are changed by their owner alone.

    ``Module.to``, ``half``, ``bfloat16`` and ``to_empty`` apply a function to each buffer of a model. A correction bias
    that is rounded to bf16 chooses other experts, and a table of ids without values names experts that do not exist.
    Kept buffers take only their device from such a function. A buffer that comes from the meta device has no values, so
    :meth:`reset_buffers` gives all of them their first ones.

    Attributes:
        kept: names of buffers.
    """

    kept: tuple[str, ...] = ()

    def reset_buffers(self) -> None:
        """Give the kept buffers the values that they have in a new module."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: buffer for name in self.kept if (buffer := self._buffers.get(name)) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        empty = False
        for name, buffer in before.items():
            device = getattr(self, name).device
            if buffer.is_meta and device.type != "meta":
                self._buffers[name], empty = torch.empty_like(buffer, device=device), True
            else:
                self._buffers[name] = buffer.to(device)
        if empty:
            self.reset_buffers()
        return self


class KnowsRows(torch.nn.Module):
    """Experts whose rows travel in a dtype that was chosen before; a cast of their weights to a wider one says so.

    Attributes:
        row_dtype: what a row loses no more than, on its way: the communicator's ``combine_dtype``.
    """

    row_dtype: torch.dtype = torch.float64

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = next((p.dtype for p in self.parameters()), None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = next((p.dtype for p in self.parameters()), None)
        if before is not None and after is not None and before != after and after.itemsize > self.row_dtype.itemsize:
            warnings.warn(
                f"{type(self).__name__}: expected weights of {self.row_dtype} or less, as rows travel, got a cast to "
                f"{after}: rows go on to travel as before; cast the model first, or make the communicator with "
                f"combine_dtype={after} and a dispatch_format that carries it",
                stacklevel=2,
            )
        return self
