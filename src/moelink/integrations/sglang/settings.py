"""Settings of a layer of SGLang: refusals, the format of rows, arguments of ``init``. SGLang is not imported here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelink.env import SGLANG
from moelink.errors import UnsupportedError
from moelink.integrations.settings import Settings, SharedCommunicators

COMMUNICATORS = SharedCommunicators()
close = COMMUNICATORS.close
"""Close the communicators of all layers in this process. Collective."""

BACKEND = "deepep_v2"
"""The ``--moe-a2a-backend`` in whose place moelink works: its expanded format is one row for each token and expert."""

ALIGNMENT = 128
"""Rows of an expert are padded to a multiple of it, which SGLang's grouped products demand."""


def refuse_elastic(backend: str | None, backup: bool) -> None:
    """Refuse elastic expert parallelism, whose other options SGLang takes with ``--elastic-ep-backend`` alone.

    Args:
        backend: ``--elastic-ep-backend``.
        backup: ``--enable-elastic-expert-backup``.

    Raises:
        UnsupportedError: one of them is on; it names the option and the alternative.
    """
    off = f"or unset {SGLANG.name}"
    if backend not in (None, "none"):
        raise UnsupportedError(
            "--elastic-ep-backend: expected none, as SGLang masks and admits ranks in its dispatchers for mooncake and "
            f"nixl alone, got {backend}; leave out all --elastic-ep- options and --max-ep-size (restart with another "
            f"--tp-size, or replicate experts by --enable-eplb and --ep-num-redundant-experts, which are served), {off}"
        )
    if backup:
        raise UnsupportedError(
            "--enable-elastic-expert-backup: expected it off, as SGLang restores experts from it with "
            f"--elastic-ep-backend alone, got it on; leave it out, {off}"
        )


def format_of(activations: torch.dtype, *, backend: str, fp8: bool, e8m0: bool, block: int) -> str:
    """Return the format in which rows travel to the experts of a layer.

    Args:
        activations: dtype of the model's activations.
        backend: ``--moe-a2a-backend``.
        fp8: whether the experts take rows in fp8.
        e8m0: whether they take scales that are powers of two, packed (DeepGEMM on Blackwell).
        block: elements of a row that share a scale.

    Raises:
        UnsupportedError: another backend, dtype or block size.
    """
    off = f"or unset {SGLANG.name}"
    if backend != BACKEND:
        raise UnsupportedError(
            f"--moe-a2a-backend: expected {BACKEND}, in whose place moelink works, got {backend}; pass {BACKEND}, {off}"
        )
    if activations != torch.bfloat16:
        raise UnsupportedError(f"--dtype: expected bfloat16, got {activations}; pass --dtype bfloat16, {off}")
    if not fp8:
        return "bf16"
    if block != 128:
        raise UnsupportedError(
            f"--quantization: expected fp8 with a scale for each 128 elements, got one for each {block}; use one "
            f"in fp8 or bf16, {off}"
        )
    return "fp8_block128_e8m0" if e8m0 else "fp8_block128"


def init_arguments(
    *,
    settings: Settings,
    num_experts: int,
    topk: int,
    hidden_size: int,
    max_tokens: int,
    dispatch_format: str,
    device: torch.device,
    alignment: int = ALIGNMENT,
) -> dict[str, Any]:
    """Return arguments of :func:`moelink.init`, without the group. ``num_experts`` includes replicas."""
    return {
        "num_experts": num_experts,
        "topk": topk,
        "hidden_size": hidden_size,
        "max_tokens_per_rank": max_tokens,
        "dispatch_format": dispatch_format,
        "expert_alignment": alignment,
        "device": device,
        **settings.arguments(),
    }


def ends_of(row_offsets: Tensor, counts: Tensor) -> Tensor:
    """Return the ends [experts] int32 of the rows of each expert, without padding.

    Args:
        row_offsets: [experts + 1] int32, starts of groups, padding included.
        counts: [experts] int32, rows of each expert.

    With groups of 128 rows, experts with 3, 0 and 130 rows begin at 0, 128 and 128 and end at 3, 128 and 258.

    >>> ends_of(torch.tensor([0, 128, 128, 384]), torch.tensor([3, 0, 130])).tolist()
    [3, 128, 258]
    """
    return (row_offsets[:-1] + counts).int()


def scales_of(scales: Tensor | None) -> Tensor | None:
    """Return scales as SGLang's products read them, from [scales per row, rows].

    fp32 scales lie row by row, [rows, scales per row]. Packed ones are a view of that shape, by columns.
    """
    if scales is None:
        return None
    return scales.t() if scales.dtype == torch.int32 else scales.t().contiguous()


def expected_rows(tokens: int, *, world_size: int, topk: int, num_experts: int) -> int:
    """Return the rows of an expert, if routing is even and every rank has as many tokens: a hint, at least 1.

    >>> expected_rows(6, world_size=8, topk=8, num_experts=256)
    2
    """
    return max(1, (tokens * world_size * topk + num_experts) // num_experts)
