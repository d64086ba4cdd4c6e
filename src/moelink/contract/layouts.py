"""Where things are in the buffers of the two groups, and how a launch is cut: functions of the parameters alone.

Offsets are bytes from the address that ``dev_ptrs`` gives for the buffer. Coordinates are checked, so that an offset is
always inside the buffer. ``R`` ranks, ``T`` = max_tokens_per_rank.

Dispatch, at the destination:

==========  ==============================  ====================================================================
send        does not exist                  rows go from registers into the messages of every destination
recv        messages [R, T, message]        message ``slot`` of rank ``source``: tokens ascending, without holes
recv_count  counts [R, 8 + L] int64         one row per source: status and totals; rows per local expert: the low
                                            half of each word, beside the call
==========  ==============================  ====================================================================

Combine, at the home rank:

==========  ==============================  ====================================================================
send        the expert outputs themselves   row of the caller's ``input_tokens``
recv        rows [T, top_k, row], or with   the row of (token, slot); with ``pre_reduce`` the sum that rank ``copy``
            pre_reduce [R, T, row]          formed for the token
recv_count  combine_flag [R, T] int64       call whose row for message ``slot`` of rank ``sender`` is stored
==========  ==============================  ====================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moelink.arith import align_up, ceil_div, is_integer
from moelink.contract.params import EPParams
from moelink.errors import ArgumentError, ConfigError, UnsupportedError
from moelink.memory.layout import REGION_ALIGNMENT
from moelink.memory.protocol import COUNT_HEADER

NUM_WARPS, NUM_WARPS_COMBINE = 8, 4
"""Warps of a CTA of dispatch, and of combine, on a GPU (``kernels.launch.grid``)."""

MOST_THREADS_OF_A_DEVICE = 1024
"""Most threads that a program can have on any device."""


def inside(name: str, value: int, size: int) -> int:
    """``value``, a coordinate of a buffer; ArgumentError unless it is in [0, size)."""
    if not 0 <= value < size:
        raise ArgumentError(name, f"in [0, {size})", value)
    return value


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """Parameters of the kernel objects, and the facts that follow from them.

    Attributes:
        num_threads: threads of a program, a multiple of ``warp_size`` up to 1024.
        n_sms: SMs of the device, or those that launches keep to: CTAs of a phase of combine.
        top_k, n_ranks, max_tokens_per_rank: as in :class:`EPParams`.
        n_experts: experts of all ``n_ranks``.
        msg_bytes: bytes of a message (dispatch), of a row (combine).
        p2p_world_size: ranks that address each other's memory, a divisor of ``n_ranks``.
        use_shmem: puts to the ranks outside, which there must be for them. Where there are none outside it changes
            nothing, as in the contract.
        fused_shared_expert: whether a group of this rank's own tokens stands before the others and does not travel.
        skip_a2a: as in :class:`EPParams`; not together with ``use_shmem``.
        warp_size: threads of a warp, 32 or 64.

    Raises:
        ConfigError: no device could be launched with these facts.
        UnsupportedError: ranks that are out of reach without puts.
    """

    num_threads: int
    n_sms: int
    top_k: int
    n_experts: int
    n_ranks: int
    msg_bytes: int
    max_tokens_per_rank: int
    p2p_world_size: int
    use_shmem: bool = False
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    warp_size: int = 32

    def __post_init__(self) -> None:
        for name in ("num_threads", "n_sms", "top_k", "n_experts", "n_ranks", "msg_bytes", "max_tokens_per_rank",
                     "p2p_world_size", "warp_size"):  # fmt: skip
            self._integer(name, 0 if name == "max_tokens_per_rank" else 1)
        for name in ("use_shmem", "fused_shared_expert", "skip_a2a"):
            self._flag(name)
        if self.warp_size not in (32, 64):
            raise ConfigError("warp_size", "32 or 64", self.warp_size)
        if self.num_threads % self.warp_size or self.num_threads > MOST_THREADS_OF_A_DEVICE:
            expected = f"a multiple of warp_size {self.warp_size}, at most {MOST_THREADS_OF_A_DEVICE}"
            raise ConfigError("num_threads", expected, self.num_threads)
        if self.n_ranks % self.p2p_world_size:
            raise ConfigError("p2p_world_size", f"a divisor of n_ranks {self.n_ranks}", self.p2p_world_size)
        if self.skip_a2a and self.use_shmem:
            raise ConfigError("use_shmem", "False with skip_a2a, where nothing travels", self.use_shmem)
        if not self.use_shmem and self.inter_node_ranks:
            raise UnsupportedError(
                f"p2p_world_size={self.p2p_world_size}, use_shmem=False: expected all {self.n_ranks} ranks to address "
                f"each other's memory, got {self.p2p_world_size} that do; pass use_shmem=True, or "
                f"p2p_world_size={self.n_ranks}"
            )

    def _integer(self, name: str, least: int) -> None:
        if not is_integer(getattr(self, name), least):
            raise ConfigError(name, f"an integer >= {least}", getattr(self, name))

    def _flag(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise ConfigError(name, "True or False", getattr(self, name))

    @property
    def inter_node_ranks(self) -> int:
        """Ranks whose memory is reached by puts."""
        return 0 if self.skip_a2a else self.n_ranks - self.p2p_world_size

    @property
    def n_local_experts(self) -> int:
        """Experts of the rank that owns most."""
        return ceil_div(self.n_experts, self.n_ranks)

    @property
    def n_send_sms(self) -> int:
        """CTAs of ``send_tokens_back``."""
        return max(1, self.n_sms - 1)

    @property
    def n_groups(self) -> int:
        """Groups of the rank that owns most experts: they, and before them the shared one where it is fused."""
        return self.n_local_experts + self.fused_shared_expert

    @property
    def max_shared_rows(self) -> int:
        """Rows [0, max_shared_rows) may be those of the fused shared expert, which are not sent: one for each own
        token, with ``skip_a2a`` for each of this rank's part of the tokens."""
        if not self.fused_shared_expert:
            return 0
        return ceil_div(self.max_tokens_per_rank, self.n_ranks if self.skip_a2a else 1)

    @property
    def n_reduce_sms(self) -> int:
        """CTAs of ``reduce_and_copy_to_output``, which sum the rows that have arrived."""
        return self.n_sms - self.n_wait_sms

    @property
    def n_wait_sms(self) -> int:
        """CTAs of ``wait_for_all_arrivals``."""
        return 1

    @property
    def n_warps(self) -> int:
        """Warps of a program."""
        return self.num_threads // self.warp_size

    @property
    def _copies(self) -> int:
        return 1 if self.skip_a2a else self.n_ranks

    @property
    def _tokens(self) -> int:
        return max(1, self.max_tokens_per_rank)


@dataclass(frozen=True, kw_only=True)
class EPDispatchKernel(LaunchFacts):
    """Layout and launch facts of dispatch: the sibling of :class:`~moelink.contract.EPCombineKernel`."""

    def send_buf_layout(self, slot: int, far: int = 0) -> int:
        """Message ``slot`` for the ``far``-th rank of another node (counted from the next node on, around).

        Raises UnsupportedError inside a node: a row is stored from registers into every destination's messages there.
        """
        if not self.inter_node_ranks:
            raise UnsupportedError(
                "send_buf_layout: expected ranks of several nodes, got one node, where dispatch has no send buffer "
                "(its pointer is 0); write no sends there"
            )
        at = inside("far", far, self.inter_node_ranks) * self._tokens + inside("slot", slot, self._tokens)
        return at * align_up(self.msg_bytes, REGION_ALIGNMENT)

    def recv_buf_layout(self, source: int, slot: int) -> int:
        """Message ``slot`` of rank ``source``. 7552-byte messages, 128 tokens: (1, 2) is at 130 * 7552 = 981760."""
        at = inside("source", source, self._copies) * self._tokens + inside("slot", slot, self._tokens)
        return at * align_up(self.msg_bytes, REGION_ALIGNMENT)

    def recv_count_layout(self, source: int, local_expert: int) -> int:
        """The word that counts rows from rank ``source`` for a local expert. 32 experts: (1, 0) is at 8 * 48 = 384."""
        row = COUNT_HEADER + self.n_local_experts
        word = COUNT_HEADER + inside("local_expert", local_expert, self.n_local_experts)
        return (inside("source", source, self._copies) * row + word) * 8


def facts_of(params: EPParams, n_sms: int, warp_size: int, *, num_warps: int = NUM_WARPS) -> dict[str, Any]:
    """The facts that both phases have in common with these parameters."""
    return dict(
        num_threads=num_warps * warp_size, n_sms=n_sms, top_k=params.top_k, n_experts=params.num_experts,
        n_ranks=params.n_ranks, max_tokens_per_rank=params.max_token_per_rank,
        p2p_world_size=1 if params.skip_a2a else params.n_gpus_per_node,
        use_shmem=params.use_shmem is not False and params.n_nodes > 1 and not params.skip_a2a,
        fused_shared_expert=params.fused_shared_expert, skip_a2a=params.skip_a2a, warp_size=warp_size,
    )  # fmt: skip


def dispatch_kernel(params: EPParams, *, n_sms: int, warp_size: int = 32) -> EPDispatchKernel:
    """The facts of a dispatch with these parameters."""
    return EPDispatchKernel(**facts_of(params, n_sms, warp_size), msg_bytes=params.workspace.message_bytes)
