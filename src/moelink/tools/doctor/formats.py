"""Send tokens through every format and back, and compare the results with the format's twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moelink.errors import MoelinkError
from moelink.formats import get_format
from moelink.initialize import init
from moelink.names import TransportName
from moelink.tools.common import Progress, dequantize_rows

FORMATS = ("bf16", "fp8_block128", "fp8_token", "mxfp8", "mxfp4", "nvfp4")
HIDDEN, TOKENS = 256, 16


def round_trip(
    name: str, *, rank: int, world_size: int, device: torch.device, transport: TransportName, timeout: float
) -> int:
    """Dispatch, give the rows back, combine, and count the tokens that came home changed. Collective.

    Each token goes to two experts, which return the row unchanged, so the result is twice the token's value after the
    format, in fp32 without rounding.
    """
    with init(
        num_experts=2 * world_size, topk=2, hidden_size=HIDDEN, max_tokens_per_rank=TOKENS, dispatch_format=name,
        combine_dtype=torch.float32, transport=transport, device=device, timeout=timeout,
    ) as ep:  # fmt: skip
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().to(device)
        first = torch.arange(TOKENS, device=device) + rank
        ids = torch.stack((first, first + 1), 1).remainder(2 * world_size).int()
        recv = ep.dispatch(x, ids)
        y = torch.zeros(recv.tokens.shape[0], HIDDEN, device=device)
        rows = dequantize_rows(recv, format_name=name, hidden_size=HIDDEN)
        y[: rows.shape[0]] = rows
        got = ep.combine(y, recv)
        ep.check()
    made = get_format(name).quantize(x)
    expected = 2 * get_format(name).dequantize(made.payload, made.scales).float()
    return int((got != expected).any(1).sum())


def round_trips(names: Sequence[str], *, step: Progress, **where: Any) -> dict[str, str]:
    """Try :func:`round_trip` of each format, with the arguments ``where``: "ok", or the error. ``step`` gets the name
    of each.

    After an error the rest is not tried, because ranks may be out of step.
    """
    said: dict[str, str] = {}
    for name in names:
        try:
            wrong = round_trip(name, **where)
            said[name] = f"{wrong} of {TOKENS} tokens came home changed" if wrong else "ok"
            step(f"format {name}")
        except (MoelinkError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            break
    return said
