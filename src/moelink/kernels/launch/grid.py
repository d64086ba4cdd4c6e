"""How a launch is cut into programs: a function of token counts and multiprocessors alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelink.arith import ceil_div
from moelink.config import EPConfig
from moelink.memory.protocol import COMBINE_BLOCK, FEW_TOKENS, MAX_SENDERS
from moelink.memory.workspace import Workspace
from moelink.routing import shared_slice


@dataclass(frozen=True)
class Launch:
    """How a phase is launched.

    Attributes:
        send: programs that move rows (dispatch has one more, which counts).
        receive: programs that place rows (dispatch) or sum them (combine).
        num_warps: warps of a program.
        maxnreg: most registers of a thread, so that all programs are on the device together. None on a CPU.
        spread: programs that share a message of combine, a divisor of its parts.
        resident: programs that a multiprocessor holds.
    """

    send: int
    receive: int
    num_warps: int = 8
    maxnreg: int | None = None
    spread: int = 1
    resident: int = 1

    @property
    def options(self) -> dict[str, int]:
        """Options of the launch."""
        return {"num_warps": self.num_warps, **({} if self.maxnreg is None else {"maxnreg": self.maxnreg})}


def grid(programs: int, budget: int, *, resident: int, available: int) -> int:
    """Programs to launch so that ``programs`` of them, at most ``budget`` x ``resident``, work on ``budget`` of the
    ``available`` multiprocessors, each of which holds ``resident`` (0: on any). The device gives every multiprocessor
    one before it gives any a second.

    Example: 71 programs on 24 of 132 multiprocessors are three on each of these, so 396 are launched; 20 are 20.
    """
    rounds = 0 if budget == 0 else min(resident, ceil_div(programs, budget))
    return programs if rounds <= 1 else rounds * available


def dispatch_launch(config: EPConfig, device: torch.device, num_tokens: int, *, encodes: bool) -> Launch:
    """Programs of a dispatch of ``num_tokens`` own tokens, whose rows are quantised on the way if ``encodes``.

    With a budget of multiprocessors (``kernels.launch.sm_limit``) as on a device that has no others, but as these are
    far from filling the links, a third more send.

    Measured, see docs/performance.md. Three programs of 8 warps and 80 registers share a multiprocessor. Few tokens:
    a sending program per multiprocessor, and a receiving one per expected message, or also per multiprocessor when
    there is padding. Many: a sender stores to the links, and what else runs on its multiprocessor queues behind it, so
    there are as few as fill the links: 0.6 per multiprocessor, 1 if they quantise; the rest receive.
    """
    if device.type == "cpu":
        return Launch(2, 2)
    ranks = 1 if config.mode == "allreduce" else config.world_size
    sms = config.num_sms or multiprocessors(device)
    few = config.max_tokens_per_rank <= FEW_TOKENS
    send = sms if few or encodes else 3 * sms // 5
    if config.num_sms is not None:
        send = 4 * send // 3
    send = max(1, send)
    receive = 3 * sms - send - 1
    if few:
        least = sms if config.row_alignment > 1 else 2 * ranks
        receive = min(receive, 1 + max(least, ranks * num_tokens))
    return Launch(send, receive, maxnreg=80, resident=3)


def combine_launch(workspace: Workspace, device: torch.device, num_tokens: int, *, sums: bool) -> Launch:
    """Programs of a combine of ``num_tokens`` own tokens, in which ``sums`` travel, or else every row.

    Five programs of 4 warps and 96 registers share a multiprocessor. Few tokens: one for each part of a message, or a
    few, and of a token, and one more of either role, which says or checks that all ranks are in this call. More: four
    of five send, one sums; but where sums need no flags, up to MANY_TOKENS, three send and two sum, as who sends waits
    for nothing and who sums clears what it read.
    """
    if device.type == "cpu":
        return Launch(3, 3)
    config = workspace.config
    ranks = 1 if config.mode == "allreduce" else config.world_size
    sms = config.num_sms or multiprocessors(device)
    send, receive, spread = (3 * sms, 2 * sms, 1) if sums and workspace.lamport_tokens else (4 * sms, sms, 1)
    if config.max_tokens_per_rank <= FEW_TOKENS:
        parts, messages = workspace.combine_parts, ranks * max(1, num_tokens)
        shares = [share for share in range(1, parts + 1) if parts % share == 0 and messages * share <= 4 * sms]
        spread = max(shares, default=1)
        send = min(4 * sms, messages * spread, 5 * sms - 2) + 1
        # On a whole device what finds no room waits for it, which a budget does not allow
        # (``kernels.launch.sm_limit``).
        room = 4 * sms if config.num_sms is None else 5 * sms - send
        receive = min(room, ceil_div(config.hidden_size, COMBINE_BLOCK) * max(1, num_tokens) + 1)
    return Launch(send, receive, num_warps=4, maxnreg=96, spread=spread, resident=5)


def layout_launch(config: EPConfig, device: torch.device) -> Launch:
    """Programs that bring the scales of a dispatch into their layout."""
    if device.type == "cpu":
        return Launch(0, 2)
    return Launch(0, 5 * (config.num_sms or multiprocessors(device)), num_warps=4, resident=5)


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
    """Multiprocessors of a CUDA device; a CPU is one."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
