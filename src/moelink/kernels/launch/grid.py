"""Choose the grid of a launch: how many CTAs it has and how they share the tokens, from token counts and SMs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moelink.arith import ceil_div
from moelink.config import EPConfig
from moelink.kernels.records import CombineNumbers, DispatchNumbers
from moelink.memory.protocol import MAX_SENDERS, STATUS_OK
from moelink.memory.workspace import Workspace
from moelink.routing import shared_slice
from moelink.tuning import FEW_MESSAGES_IN_PLACE, FEW_SMS, FEW_TOKENS, MANY_TOKENS


@dataclass(frozen=True)
class Launch:
    """How a phase is launched.

    Attributes:
        send: CTAs that move rows (dispatch has one more, which counts).
        receive: CTAs that unpack rows (dispatch) or sum them (combine).
        num_warps: warps of a CTA.
        maxnreg: most registers of a thread, so that all CTAs fit the device together. None on a CPU.
        spread: CTAs that share a message of combine, a divisor of its parts.
        resident: CTAs that an SM holds.
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
    """Return how many CTAs to launch so that ``programs`` of them work within an SM limit of ``budget``.

    At most ``budget`` x ``resident`` CTAs work, on ``budget`` of the ``available`` SMs, each of which holds
    ``resident``; with ``budget`` 0 on any SM. The device gives every SM one CTA before it gives any SM a second.

    Example: 71 CTAs on 24 of 132 SMs are three on each of these, so 396 are launched; 20 are 20.
    """
    rounds = 0 if budget == 0 else min(resident, ceil_div(programs, budget))
    return programs if rounds <= 1 else rounds * available


def dispatch_launch(
    config: EPConfig,
    device: torch.device,
    num_tokens: int,
    *,
    encodes: bool,
    max_tokens: int | None = None,
    forwarders: int = 0,
) -> Launch:
    """Choose the CTAs of a dispatch of ``num_tokens`` own tokens, whose rows are quantised on the way if ``encodes``.
    No rank is expected to send more than ``max_tokens`` (None: ``max_tokens_per_rank``). Ranks need not choose alike: a
    sender tells how many CTAs it has, and receivers share its messages. ``forwarders``: CTAs that also run.

    These numbers are measured; see docs/performance.md. Three CTAs of 8 warps and 80 registers share an SM. Few tokens:
    one sending CTA per SM, and one receiving CTA per expected message. Where receivers write padding there is at least
    one of them per SM, or per two SMs if only tiles of scales have padding. Many tokens: a sender stores to the links,
    and other CTAs on its SM queue behind it, so there are only as many senders as fill the links: 0.6 per SM,
    1 if they quantise. The other CTAs receive. Few tokens that are more than SMs have two senders per SM, so that none
    has two tokens.

    With an SM limit (``kernels.launch.sm_limit``) the numbers are those of a device that has no other SMs, but a third
    more CTAs send, because so few SMs are far from filling the links. That holds for up to MANY_TOKENS tokens, and for
    two ranks. Many tokens of more ranks have 0.6 senders per SM, 0.9 if they quantise: receivers take longer there.

    Where rows stay in the messages (``zero_copy``) a receiver reads only headers, of several messages at a time, and
    leaves the SMs to the senders: one sender per SM, two beyond MANY_TOKENS, and one receiver, or with few tokens one
    for every FEW_MESSAGES_IN_PLACE messages.

    Where CTAs take numbers in turn (:func:`takes_numbers_in_turn`), either role has all CTAs that the SMs hold, six of
    4 warps each, because an SM is then bound by the latencies of its CTAs. There are twice as many shares of messages,
    so that CTAs end at about the same time.
    """
    if device.type == "cpu":
        return Launch(2, 2)
    ranks = 1 if config.mode == "allreduce" else config.world_size
    sms = config.num_sms or sm_count(device)
    most = config.max_tokens_per_rank if max_tokens is None else max_tokens
    few, many = most <= FEW_TOKENS, most > MANY_TOKENS
    send = sms if few or encodes else 3 * sms // 5
    if takes_numbers_in_turn(config) and most > FEW_TOKENS and not config.zero_copy:
        return Launch(6 * sms, 12 * sms, num_warps=4, maxnreg=80, resident=6)
    if config.zero_copy and (many or config.num_sms is None):
        send = 2 * sms if many else sms
    elif config.num_sms is not None:
        send = min(send, 9 * sms // 10) if many and ranks > 2 else 4 * send // 3
    elif few and num_tokens > sms:
        send = 2 * sms
    send = max(1, send)
    receive, messages = max(1, 3 * sms - send - 1 - forwarders), ranks * num_tokens
    if config.zero_copy:
        receive, messages = min(receive, sms), ceil_div(messages, FEW_MESSAGES_IN_PLACE)
    if few:
        least = max(2 * ranks, _padding_ctas(config, sms))
        receive = min(receive, 1 + max(least, messages))
    return Launch(send, receive, maxnreg=80, resident=3)


def tokens_of_kernels(config: EPConfig, device: torch.device, max_tokens: int | None) -> int:
    """Return the tokens per rank that the kernels of a dispatch are built for: those of the communicator, or one of the
    limits FEW_TOKENS and MANY_TOKENS (on CPUs, where all numbers are small, 4) if that is less and no rank is expected
    to send more than it. So dispatch of few tokens takes the kernels that a communicator for few has. Ranks need not
    choose alike.

    Example: in a communicator for 4096 tokens a call of at most 8 takes kernels for 256, and one of 2000 those for
    4096.
    """
    most = config.max_tokens_per_rank
    fitting = (limit for limit in _limits(device) if max_tokens is not None and max_tokens <= limit < most)
    return min(fitting, default=most)


def bounds_of_kernels(config: EPConfig, device: torch.device, bounds: Sequence[int | None] = ()) -> list[int | None]:
    """Return a value of ``max_tokens`` for each kernel that dispatches with ``bounds`` take, or with any: None for the
    kernel of the communicator's tokens, as the last."""
    most = config.max_tokens_per_rank
    found = {tokens_of_kernels(config, device, bound) for bound in bounds or (*_limits(device), None)}
    return [None if tokens == most else tokens for tokens in sorted(found)]


def _limits(device: torch.device) -> tuple[int, ...]:
    return (4,) if device.type == "cpu" else (FEW_TOKENS, MANY_TOKENS)


def _padding_ctas(config: EPConfig, sms: int) -> int:
    """Return how many receivers the padding needs: rows of a group beyond its real ones, or the rest of a tile of
    scales."""
    scales = config.format.scale_layout
    in_tiles = scales is not None and scales.block_rows > 1
    if config.row_alignment > 1:
        return sms
    return sms // 2 if in_tiles and config.layout == "expert" else 0


def combine_launch(
    workspace: Workspace, device: torch.device, num_tokens: int, *, sums: bool, own_rows_stay: bool = False
) -> Launch:
    """Choose the CTAs of a combine of ``num_tokens`` own tokens, in which ``sums`` travel, or else every row.

    Five CTAs of 4 warps and 96 registers share an SM. Few tokens: one CTA for each part of a message, or for a few
    parts, and one for each part of a token; and one more in either role, which tells or checks that all ranks are in
    this call. More tokens: four of five CTAs send, one sums. Where sums need no flags, up to MANY_TOKENS, three send
    and two sum, because a sender waits for nothing and a reducer also clears what it read. In layout "rank", whose
    senders only copy, two send and three sum. If ``own_rows_stay`` (``kernels.combine.own_rows``), two send and three
    sum, and where sums need no flags 1.25 send; of few tokens, as many as the messages that travel, or as their parts
    up to three for each SM.

    Where only present rows are summed (:func:`sums_present_rows`), either role has all CTAs that the SMs hold, four of
    4 warps and 128 registers each, because a thread holds 64 columns.
    """
    if device.type == "cpu":
        return Launch(3, 3)
    config = workspace.config
    ranks = 1 if config.mode == "allreduce" else config.world_size
    sms = config.num_sms or sm_count(device)
    if sums_present_rows(workspace, device, sums=sums):
        return Launch(4 * sms, 4 * sms, num_warps=4, maxnreg=128, resident=4)
    collectors = relaying_ctas(workspace, device)
    # Of five CTAs of an SM.
    senders = 4 if not sums or not workspace.lamport_tokens else 2 if config.layout == "rank" else 3
    send, receive, spread = senders * sms, (5 - senders) * sms, 1
    if config.max_tokens_per_rank <= FEW_TOKENS:
        parts, messages = workspace.combine_parts, (ranks - own_rows_stay) * max(1, num_tokens)
        most = (3 if own_rows_stay else 4) * sms
        shares = [share for share in range(1, parts + 1) if parts % share == 0 and messages * share <= most]
        spread = max(shares, default=1)
        send = min(4 * sms - collectors, messages * spread, 5 * sms - 2) + 1
        # On a whole device a CTA that finds no room waits for it. An SM limit does not allow that
        # (``kernels.launch.sm_limit``).
        room = 4 * sms if config.num_sms is None else 5 * sms - send - collectors
        receive = min(room, ceil_div(config.hidden_size, workspace.combine_block) * max(1, num_tokens) + 1)
    elif own_rows_stay:
        send = 5 * sms // 4 if workspace.lamport_tokens else 2 * sms
        receive = 5 * sms - send
    else:
        send -= collectors
    return Launch(send, max(1, receive), num_warps=4, maxnreg=96, spread=spread, resident=5)


def takes_numbers_in_turn(config: EPConfig) -> bool:
    """Return whether the CTAs of a launch within an SM limit each take one number after the other
    (``kernels.launch.sm_limit``): up to FEW_SMS SMs, in a communicator of more than FEW_TOKENS tokens per rank, whose
    calls are long enough for a CTA that has sent to receive as well."""
    return config.num_sms is not None and config.num_sms <= FEW_SMS and config.max_tokens_per_rank > FEW_TOKENS


def sums_present_rows(workspace: Workspace, device: torch.device, *, sums: bool) -> bool:
    """Return whether combine takes only the rows that are there (``kernels.combine.present_rows``): within an SM limit,
    of more than FEW_TOKENS tokens (on CPUs, where all numbers are small, 5 or more), where ``sums`` of several rows
    travel as they are, with flags, on one node."""
    config = workspace.config
    many = config.max_tokens_per_rank > (4 if device.type == "cpu" else FEW_TOKENS)
    alone = workspace.inter_node_ranks == 0 and config.mode == "alltoall" and config.combine_format is None
    whole = workspace.combine_parts == 1 and workspace.lamport_tokens == 0
    few = config.num_sms is not None and config.num_sms <= FEW_SMS
    return few and many and sums and alone and whole and config.layout != "rank"


def relaying_ctas(workspace: Workspace, device: torch.device) -> int:
    """Return how many CTAs of a launch forward, or collect: with two levels one for two SMs, else none.

    That number is a guess: nothing was measured, because no network was available.
    """
    if not workspace.two_level:
        return 0
    if device.type == "cpu":
        return 2
    return max(1, (workspace.config.num_sms or sm_count(device)) // 2)


def most_ctas(device: torch.device) -> int:
    """Return a number of CTAs that no role of a launch exceeds."""
    return 8 if device.type == "cpu" else max(5 * sm_count(device), 12 * FEW_SMS)


def layout_launch(config: EPConfig, device: torch.device) -> Launch:
    """Choose the CTAs of the scale kernel, which writes the scales of a dispatch in their layout."""
    if device.type == "cpu":
        return Launch(0, 2)
    return Launch(0, 5 * (config.num_sms or sm_count(device)), num_warps=4, resident=5)


@dataclass(frozen=True)
class TokenSplit:
    """How dispatch's senders share the tokens.

    Few tokens: one token per CTA; ``split`` CTAs share a token, and each serves every ``split``-th rank. Many tokens:
    ``tokens_per_program`` consecutive ones per CTA.

    Attributes:
        tokens_per_program: tokens of a CTA; the last CTA may have fewer.
        split: CTAs of a token.
        programs: CTAs that move rows.

    Example: with 8 CTAs and 4 ranks, 3 tokens are shared as (1, 2, 6), and 20 as (3, 1, 7).
    """

    tokens_per_program: int
    split: int
    programs: int

    @classmethod
    def of(cls, num_tokens: int, *, programs: int, world_size: int) -> TokenSplit:
        """Share ``num_tokens`` among at most ``programs`` CTAs."""
        programs = min(programs, MAX_SENDERS)
        if num_tokens <= programs:
            split = min(world_size, programs // max(1, num_tokens))
            return cls(1, split, num_tokens * split)
        each = ceil_div(num_tokens, programs)
        return cls(each, 1, ceil_div(num_tokens, each))


def shared_bounds(config: EPConfig, num_tokens: int) -> tuple[int, int]:
    """Return the first own token of the fused shared expert's group, and the last one + 1."""
    if not config.fused_shared_expert:
        return 0, 0
    replicated = config.mode == "allreduce"
    part = shared_slice(num_tokens, rank=config.rank if replicated else 0, parts=config.world_size if replicated else 1)
    return part.start, part.stop


class Place(Protocol):
    """A rank, as the numbers of its calls name it."""

    @property
    def config(self) -> EPConfig:
        """Its configuration."""

    @property
    def me(self) -> int:
        """Its place in the table of peers."""

    @property
    def first_expert(self) -> int:
        """Global id of its first expert."""

    @property
    def limit(self) -> int:
        """Ticks of the clock until a wait has expired."""


def dispatch_numbers(
    place: Place, num_tokens: int, *, cut: TokenSplit | None = None, senders: int = 0, rows: int = 0,
    scale_rows: int = 0, status: int = STATUS_OK,
) -> DispatchNumbers:  # fmt: skip
    """Return the numbers of a dispatch of so many own tokens, which senders share as ``cut`` says, without the number
    of CTAs. ``rows``, ``scale_rows``: of the output."""
    config, cut = place.config, TokenSplit(1, 1, 0) if cut is None else cut
    begin, end = shared_bounds(config, num_tokens)
    return DispatchNumbers(
        me=place.me, rank=config.rank, first_expert=place.first_expert, num_local_experts=config.num_local_experts,
        num_groups=config.num_groups, num_tokens=num_tokens, tokens_per_program=cut.tokens_per_program,
        split=cut.split, shared_begin=begin, shared_end=end, capacity=rows, scale_rows=scale_rows,
        counts_stride=config.world_size, status=status, senders=senders, limit=place.limit, programs=0,
    )  # fmt: skip


def combine_numbers(
    place: Place, num_tokens: int, *, y_rows: int = 0, spread: int = 1, senders: int = 0, status: int = STATUS_OK
) -> CombineNumbers:
    """Return the numbers of a combine's first pass, for so many own tokens, without the number of CTAs."""
    config = place.config
    begin, end = shared_bounds(config, num_tokens)
    return CombineNumbers(
        me=place.me, first_expert=place.first_expert, num_local_experts=config.num_local_experts,
        num_tokens=num_tokens, y_rows=y_rows, shared_begin=begin, shared_end=end, slot_begin=0, spread=spread,
        status=status, senders=senders, limit=place.limit, programs=0,
    )  # fmt: skip


def sm_count(device: torch.device) -> int:
    """Return the number of SMs of a CUDA device; 1 for a CPU."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
