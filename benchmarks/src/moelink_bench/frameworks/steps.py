"""Steps of a layer that trains: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moelink_bench.frameworks.dispatchers import Contender, Parts

PASSES = ("forward", "forward and backward")


def trained(
    name: str, layer: Callable[..., Tensor], given: Mapping[str, Tensor], heard: Tensor, module: torch.nn.Module,
    dispatcher: Any,
) -> Contender:  # fmt: skip
    """Return the contender of a layer that makes an output of the tensors ``given``.

    Args:
        name: whose dispatcher it is.
        layer: called with the tensors of ``given``, in their order.
        given: by name, those that gradients are asked of.
        heard: gradient of the output.
        module: has the parameters that gradients are asked of.
        dispatcher: has moelink's communicator as ``ep``, if it is moelink's.
    """

    def forward(_: int) -> Tensor:
        with torch.no_grad():
            return layer(*given.values())

    def both(_: int) -> Parts:
        leaves = {each: tensor.detach().requires_grad_() for each, tensor in given.items()}
        module.zero_grad(set_to_none=True)
        out = layer(*leaves.values())
        out.backward(heard)
        grads = {f"{each}.grad": leaf.grad for each, leaf in (*leaves.items(), *module.named_parameters())}
        return {"out": out.detach(), **{each: grad for each, grad in grads.items() if grad is not None}}

    checked: Callable[[], None] = getattr(getattr(dispatcher, "ep", None), "check", lambda: None)
    return Contender(name, dict(zip(PASSES, (forward, both), strict=True)), both, checked)
