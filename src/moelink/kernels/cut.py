"""How a launch is cut into programs: a function of token counts and multiprocessors alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelink.arith import ceil_div
from moelink.config import EPConfig
from moelink.protocol import MAX_SENDERS
from moelink.routing import shared_slice


@dataclass(frozen=True)
class Programs:
    """Programs of a launch. ``send`` move rows (dispatch has one more, which counts), ``receive`` place or sum them."""

    send: int
    receive: int

    @classmethod
    def of(cls, num_sms: int | None, device: torch.device) -> Programs:
        """For ``num_sms`` multiprocessors (None: all of the device). Two of each on a CPU."""
        if device.type == "cpu":
            return cls(2, 2)
        if num_sms is None:
            sms = multiprocessors(device)
            return cls(sms, 2 * sms)
        return cls(max(1, num_sms // 3), max(1, num_sms - num_sms // 3 - 1))


@dataclass(frozen=True)
class Cut:
    """How dispatch's senders share the tokens. Few: one token a program, served by ``split`` programs, each for every
    ``split``-th rank. Many: ``tokens_per_program`` consecutive ones each.

    Attributes:
        tokens_per_program: tokens of a program, but for the last.
        split: programs of a token.
        programs: programs that move rows.

    Example: with 8 programs and 4 ranks, 3 tokens are cut into (1, 2, 6), and 20 into (3, 1, 7).
    """

    tokens_per_program: int
    split: int
    programs: int

    @classmethod
    def of(cls, num_tokens: int, *, programs: int, world_size: int) -> Cut:
        """Cut ``num_tokens`` for at most ``programs`` programs."""
        programs = min(programs, MAX_SENDERS)
        if num_tokens <= programs:
            split = min(world_size, programs // max(1, num_tokens))
            return cls(1, split, num_tokens * split)
        each = ceil_div(num_tokens, programs)
        return cls(each, 1, ceil_div(num_tokens, each))


def shared_bounds(config: EPConfig, num_tokens: int) -> tuple[int, int]:
    """First and last + 1 own token of the fused shared expert's group."""
    if not config.fused_shared_expert:
        return 0, 0
    replicated = config.mode == "allreduce"
    part = shared_slice(num_tokens, rank=config.rank if replicated else 0, parts=config.world_size if replicated else 1)
    return part.start, part.stop


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
