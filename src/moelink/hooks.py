"""Run a user's own arithmetic inside dispatch and combine: hooks, written twice, in Triton and in torch.

Three arguments take a hook or a plain tensor: the input scale, the router weights, and the epilogue of combine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelink.errors import ArgumentError


@dataclass(frozen=True)
class Hook:
    """A function in two languages, Triton and torch, and the tensors that it reads or writes.

    Attributes:
        triton_fn: ``@triton.jit`` function for kernels, or None when only the collective transport is used. Its first
            argument is the tuple of pointers to ``tensors``. None for an input scale and for router weights, which are
            evaluated in torch on every transport; anything else is refused there.
        torch_fn: the same arithmetic in torch. Its first argument is the tuple ``tensors``. Its form by use:

            * input scale: ``torch_fn(tensors) -> fp32 tensor of one element``
            * router weight: ``torch_fn(tensors, token, slot) -> fp32``, broadcast over ``token`` [T, 1] and ``slot``
              [1, K] int64; runs on the token's home rank
            * epilogue: ``torch_fn(tensors, token, columns, block, mask) -> None``: ``token`` [n, 1] and ``columns``
              [1, c] int64, ``block`` [n, c] the sums before rounding (fp32; fp64 when combine_dtype is), ``mask``
              [n, c] bool. It is called instead of the store and stores for itself.
        tensors: the tensors, passed to both functions unchanged. The first tensor of an epilogue is its output:
            combine returns it when no ``out`` is given.
        check: called with combine's ``(num_tokens, hidden_size, device)`` before any data moves; raises ArgumentError
            where ``tensors`` do not fit, because a kernel would read and store past their ends.
    """

    triton_fn: Any
    torch_fn: Callable[..., Any]
    tensors: tuple[Tensor, ...] = ()
    check: Callable[[int, int, torch.device], None] | None = None


def _require_torch_only(name: str, hook: Hook) -> None:
    """Raise ArgumentError if a hook that runs in torch on every transport also brings a Triton function."""
    if hook.triton_fn is not None:
        expected = "a hook with triton_fn=None, because its torch_fn is what runs, on every transport"
        raise ArgumentError(name, expected, f"triton_fn={getattr(hook.triton_fn, '__name__', hook.triton_fn)}")


def evaluate_input_scale(scale: Tensor | Hook | None, *, device: torch.device | None = None) -> Tensor | None:
    """Evaluate the global input scale: an fp32 tensor of one element, or None.

    ``device``: device of the result for a hook, which may return a number.

    Raises:
        ArgumentError: a hook returned other than one element, or has a ``triton_fn``, which would not run.
    """
    if isinstance(scale, Hook):
        _require_torch_only("input_scale", scale)
        scale = torch.as_tensor(scale.torch_fn(scale.tensors), dtype=torch.float32, device=device)
        if scale.numel() != 1:
            raise ArgumentError("input_scale", "a hook that returns one element", f"shape {list(scale.shape)}")
    return None if scale is None else scale.reshape(())


def evaluate_weights(
    weights: Tensor | Hook | None, *, num_tokens: int, topk: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Evaluate router weights: [num_tokens, topk] of ``dtype``, or None.

    Raises:
        ArgumentError: a hook returned a tensor on another device, or one that does not broadcast to that shape, or has
            a ``triton_fn``, which would not run.
    """
    if isinstance(weights, Hook):
        _require_torch_only("topk_weights", weights)
        token = torch.arange(num_tokens, device=device)[:, None]
        slot = torch.arange(topk, device=device)[None, :]
        given = torch.as_tensor(weights.torch_fn(weights.tensors, token, slot))
        if given.device != device:
            raise ArgumentError("topk_weights", f"a hook that returns a tensor on {device}", f"one on {given.device}")
        try:
            weights = given.expand(num_tokens, topk).contiguous()
        except RuntimeError:
            shape = f"[{num_tokens}, {topk}]"
            raise ArgumentError(
                "topk_weights", f"a hook that returns what can be broadcast to {shape}", f"shape {list(given.shape)}"
            ) from None
    return weights if weights is None or weights.dtype == dtype else weights.to(dtype)
