"""What one rank does with the tiny models of :mod:`transformers_families`; the tests judge what comes back."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fast_interpreter  # noqa: F401 - ranks are processes of their own
from moelink.integrations.transformers import from_pretrained
from transformers_families import BATCH, LENGTH, backward, generate, gradients, model_class, output, tokens


@dataclass(frozen=True)
class Answers:
    """One rank's, of one family.

    Attributes:
        replicated, sharded: output of the whole batch in mode "allreduce", and of this rank's sequence in "alltoall".
        continuation: of the whole batch; None of a model that cannot.
        gradients: by mode. Experts' are those of this rank's experts.
        first: this rank's first expert. count: how many it has.
    """

    replicated: Tensor
    sharded: Tensor
    continuation: Tensor | None
    gradients: dict[str, dict[str, Tensor]]
    first: int
    count: int


def answers(rank: int, family: str, folder: str, saved: str) -> Answers:
    ids, own = tokens(), slice(rank, rank + 1)
    common: dict[str, Any] = {
        "max_tokens_per_rank": BATCH * LENGTH, "auto_class": model_class(family), "device": "cpu", "timeout": 20.0,
    }  # fmt: skip
    grads = {}
    with from_pretrained(folder, mode="allreduce", **common) as parallel:
        model = parallel.model
        with torch.no_grad():
            replicated = output(model, ids)
            continuation = generate(model, ids) if model.can_generate() else None
        backward(model, ids, slice(None))
        parallel.sum_gradients()
        grads["allreduce"] = gradients(model)
        parallel.save_pretrained(saved)
    with from_pretrained(folder, mode="alltoall", **common) as parallel:
        with torch.no_grad():
            sharded = output(parallel.model, ids[own])
        backward(parallel.model, ids, own)
        parallel.sum_gradients()
        grads["alltoall"] = gradients(parallel.model)
        count = parallel.ep.config.num_local_experts
    return Answers(replicated, sharded, continuation, grads, rank * count, count)


def all_answers(rank: int, world_size: int, folders: dict[str, str], saved: str) -> dict[str, Answers | str]:
    """By family; in place of answers the error that a family ended in."""
    assert world_size == BATCH
    torch.set_num_threads(1)
    found: dict[str, Answers | str] = {}
    for family, folder in folders.items():
        try:
            found[family] = answers(rank, family, folder, f"{saved}/{family}")
        except Exception as error:  # noqa: BLE001 - the test says which families failed, and why
            found[family] = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
    return found
