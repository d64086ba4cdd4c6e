"""What one rank does with the tiny models of :mod:`transformers_families`; the tests judge what comes back."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from moelink.integrations.transformers import from_pretrained, register
from tests.integrations.transformers.transformers_families import (
    BATCH,
    LENGTH,
    backward,
    generate,
    gradients,
    model_class,
    output,
    tokens,
)

WAYS = ("TP", "FSDP")
"""How transformers shards what is replicated, tensor-parallel or by FSDP: moelink in mode "allreduce" or "alltoall"."""


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
        "max_tokens_per_rank": BATCH * LENGTH, "auto_class": model_class(family), "device": "cpu", "timeout": 60.0,
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


def registered(rank: int, family: str, folder: str, way: str, *, implementation: str | None) -> Tensor:
    """Output of this rank's sequence (way "FSDP") or of the whole batch ("TP") of a model that transformers shards.

    ``implementation`` is the name that moelink is registered under; None for transformers' own.
    """
    from transformers.distributed import DistributedConfig

    ids = tokens()[rank : rank + 1] if way == "FSDP" else tokens()
    sizes = {"fsdp_size": BATCH} if way == "FSDP" else {"tp_size": BATCH}
    named = {} if implementation is None else {"ep_implementation": implementation}
    config = DistributedConfig(**sizes, ep_size=BATCH, **named)
    with register(max_tokens_per_rank=BATCH * LENGTH, timeout=60.0) as registration, torch.no_grad():
        out = output(model_class(family).from_pretrained(folder, distributed_config=config), ids)
        assert (implementation is None) != bool(registration.communicators), "moelink was used if it was named"
    return out


def _or_error(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or the error it ends in, as text: the test says which families failed, and why."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"


@dataclass(frozen=True)
class Said:
    """Of one family: answers, and by way the output of the model that transformers shards. Errors as text."""

    answers: Answers | str
    registered: dict[str, Tensor | str]


def everything(
    rank: int, world_size: int, folders: dict[str, str], saved: str, ways: tuple[str, ...]
) -> dict[str, Said]:
    """By family."""
    assert world_size == BATCH
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    found = {}
    for family, folder in folders.items():
        found[family] = Said(
            _or_error(partial(answers, rank, family, folder, f"{saved}/{family}")),
            {way: _or_error(partial(registered, rank, family, folder, way, implementation="moelink")) for way in ways},
        )
    return found


def without_moelink(
    rank: int, world_size: int, folders: dict[str, str], wanted: list[tuple[str, str]]
) -> dict[tuple[str, str], Tensor | str]:
    """By (family, way), the output with transformers' own implementation; errors as text."""
    torch.set_num_threads(1)
    return {
        (family, way): _or_error(partial(registered, rank, family, folders[family], way, implementation=None))
        for family, way in wanted
    }
