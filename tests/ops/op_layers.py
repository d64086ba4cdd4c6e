"""What the tests of operators share: sizes, one rank, and a note of every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import moelink

T, K, E, H = 4, 2, 4, 16
IDS = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]])  # every expert twice: no row of the worst case is left over
HIDDEN = {"bf16": 16, "fp32": 16, "fp64": 16, "fp8_block128": 128, "mxfp8": 32, "nvfp4": 16, "mxfp4": 32}


def one_rank(**changes: Any) -> moelink.Communicator:
    sizes = {"num_experts": E, "topk": K, "hidden_size": H, "max_tokens_per_rank": T, "transport": "collective"}
    return moelink.init(**{**sizes, **changes})


def noting(made: list[str], what: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        made.append(what)
        return call(*args, **options)

    return noted
