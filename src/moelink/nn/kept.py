"""Modules with buffers that keep their dtype and values whatever is applied to the model around them."""

from __future__ import annotations

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
