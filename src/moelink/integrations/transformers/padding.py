"""The padding of the batch in a forward, as ``attention_mask`` has it: these tokens are sent to no expert.

A layer with experts does not see the mask, so hooks of transformers' models around it keep it while they run. A model
in another one that is called without a mask of its own, or with one that transformers has expanded for attention, has
the outer one's.

Activation checkpointing computes a layer again in backward, outside of a forward of the model, and must send the same
tokens. So a model with transformers' activation checkpointing sends its padding. Other recomputations are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moelink.errors import UnsupportedError

_INPUTS = ("input_ids", "inputs_embeds")


class Padding:
    """Knows the padding of the forward that runs; one for all layers of a model."""

    def __init__(self) -> None:
        self._present: list[Tensor | None] = []
        self._learns = False

    def watch(self, model: nn.Module, layer: type[nn.Module]) -> None:
        """Look at each forward of the models in ``model`` that have a module of class ``layer``."""
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and any(isinstance(inner, layer) for inner in module.modules()):
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(self._leave, always_call=True)

    def masked(self, topk_ids: Tensor) -> Tensor:
        """Return ``topk_ids`` [T, K] with -1 for padding; as they are if the forward has no mask of T tokens.

        Raises:
            UnsupportedError: backward computes the layer alone again, after a forward with a mask.
        """
        in_backward = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if self._learns and not self._present and in_backward:
            raise UnsupportedError(
                "attention_mask: expected transformers' own activation checkpointing, got another recomputation of a "
                "layer, which does not know the padding; call model.activation_checkpointing_enable(), or pass no mask"
            )
        present = self._present[-1] if self._present else None
        if present is None or present.shape[0] != topk_ids.shape[0]:
            return topk_ids
        return topk_ids.where(present.to(topk_ids.device)[:, None], -1)

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        inputs = [*args[:1], *(kwargs.get(name) for name in _INPUTS)]
        tokens = next((each for each in inputs if isinstance(each, Tensor)), None)
        found = self._present[-1] if self._present else None
        if isinstance(mask, Tensor) and mask.dim() == 2 and tokens is not None and tokens.dim() > 1:
            batch, length = tokens.shape[:2]
            found = None
            learns = torch.is_grad_enabled()
            inner = module.modules() if learns and module.training else ()
            again = any(getattr(each, "gradient_checkpointing", False) for each in inner)
            if mask.shape[0] == batch and mask.shape[1] >= length and not again:
                found = mask[:, mask.shape[1] - length :].reshape(-1) != 0  # the columns before are of a cache
                self._learns = self._learns or learns
        self._present.append(found)

    def _leave(self, *_: Any) -> None:
        if self._present:  # a hook before ours may have raised
            self._present.pop()
