"""Hold every setting of a communicator, validated once, and the sizes that follow from them: EPConfig."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from moelink.arith import align_up, ceil_div
from moelink.errors import ConfigError
from moelink.formats import Format, get_format
from moelink.formats.base import encodes_rows_alone
from moelink.levels import Routes, prefers_two_levels
from moelink.memory.layout import ALIGNMENT, DispatchMessage, HomeRow
from moelink.memory.workspace import Workspace
from moelink.names import FormatName, Layout, Mode, OnFailure, TransportName

MAX_TIMEOUT = 2_000_000
"""Most seconds of ``timeout``, 23 days: torch's store waits for milliseconds in 32 bits."""

MAX_INT32 = 2**31 - 1
"""Most rows of an output and most (message, slot) pairs: ``row_offsets``, ``src_info`` and routing notes are int32."""

COMBINE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

COMBINE_FORMATS = ("fp8_block128", "mxfp8")
"""Formats in which rows may travel home."""


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that one rank will hold, before anything is allocated.

    Attributes:
        wire_send: worst-case bytes of the messages that one dispatch and one combine send, plus one message per token
            from which they are copied (staging of the collective transport, which keeps it between calls).
        wire_recv: the same for the bytes that they receive.
        outputs: worst-case bytes of the tensors that one dispatch and one combine return.
        in_place: with ``zero_copy``, bytes of the rows and scales of an output. On the symmetric transport they are a
            part of ``block`` (no second buffer is needed); the collective transport copies them into tensors.
        block: the symmetric transport's block, in place of ``wire_send`` and ``wire_recv``
            (:class:`moelink.memory.workspace.Workspace`).
        notes: on the symmetric transport, the routing notes of one dispatch, beside ``outputs``, and the number of the
            message that each row came with.
        staging: the part of ``block`` that holds what is on its way between nodes; 0 on one node. With
            ``two_level`` it grows with the number of nodes, else with the number of ranks.
        lanes: lanes of the communicator. The other fields are the bytes of one lane, the totals those of all.
    """

    wire_send: int
    wire_recv: int
    outputs: int
    block: int
    notes: int
    in_place: int = 0
    staging: int = 0
    lanes: int = 1

    @property
    def total(self) -> int:
        """Bytes that the collective transport holds."""
        return self.lanes * (self.wire_send + self.wire_recv + self.outputs + self.in_place)

    @property
    def symmetric_total(self) -> int:
        """Bytes that the symmetric transport holds."""
        return self.lanes * (self.block + self.notes + self.outputs)

    def __str__(self) -> str:
        sums = {"collective transport": self.total, "symmetric transport": self.symmetric_total}
        rows = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "lanes"} | sums
        lines = [f"{name:<20} {size / 2**20:10.1f} MiB" for name, size in rows.items()]
        return "\n".join(lines if self.lanes == 1 else [*lines, f"The totals are of {self.lanes} lanes."])


_MOST = {"num_experts": 1 << 20, "topk": 1 << 10, "hidden_size": 1 << 20, "lanes": 64}
"""Larger values are mistakes: they take the host seconds to find out, and end in an error of an allocator."""


@dataclass(frozen=True, kw_only=True)
class EPConfig:
    """Settings of one communicator. The same on every rank but for ``rank``.

    Attributes:
        num_experts: routed experts over all ranks; need not be a multiple of ``world_size``.
        topk: expert ids per token.
        hidden_size: elements of a row; a multiple of the dispatch format's group.
        max_tokens_per_rank: most tokens one rank passes in a call; 0 is allowed.
        dispatch_format: registered name of the format of dispatched rows.
        combine_dtype: dtype of expert outputs, of rows on the way home and of the result.
        combine_format: "fp8_block128" or "mxfp8": rows travel home in this format, about half the bytes of bf16, and
            are summed in fp32; None: in ``combine_dtype``.
        layout: "expert" (rows grouped by local expert), "masked" (the same, but that every group has room for
            ``rows_per_expert`` rows) or "rank" (one row per token and destination rank).
        expert_alignment: group sizes are rounded up to this many rows ("expert" layout).
        capacity: rows of the dispatch output, or None for the worst case; a call's ``max_tokens`` may make it smaller.
        rows_per_expert: layout "masked": rows of each expert, or None for the worst case, in which all slots of all
            tokens name one expert; a call's ``max_tokens`` may make it smaller.
        pre_reduce: sum a token's rows on the expert's rank before they travel home; None: if not ``batch_invariant``.
        batch_invariant: the bits of a token's result depend neither on the number of ranks, nor on the places of
            experts, nor on other tokens (docs/batch-invariance.md). Rows travel home one by one and are summed there
            in fp32, slots ascending; settings that cannot keep the promise are refused.
        fused_shared_expert: group 0 is the rank's own tokens.
        global_ids: layout "rank": the ids of an output count over all ranks, not from this rank's first expert.
        zero_copy: layout "rank": rows and scales of an output stay where they arrived, in the workspace, until the next
            call (:mod:`moelink.lease`); outputs are [world_size, max_tokens_per_rank, ...].
        mode: "alltoall", or "allreduce" (replicated activations, nothing travels).
        transport: "auto", "collective" or "symmetric".
        ranks_per_node: ranks that can address each other's memory, or None for all of them.
        two_level: symmetric transport on several nodes: send one copy of a token to each node, where one rank forwards
            it, and sum rows within a node before they cross the network. "auto" becomes True or False when the
            configuration is made: what is estimated to be faster (``moelink.levels``), False where it is impossible.
        num_sms: SMs that one kernel may occupy, or None for all of them.
        lanes: calls of a phase that may be in flight, each in memory of its own (:meth:`moelink.Communicator.lane`).
        timeout: seconds after which a call gives up on a peer.
        on_failure: "raise", or "mask": where a call fails because of a peer, the ranks that go on mask it, and raise
            MembershipError in place of PeerTimeoutError (:meth:`moelink.Communicator.mask`).
        rank, world_size: this rank, and their number.
    """

    num_experts: int
    topk: int
    hidden_size: int
    max_tokens_per_rank: int
    dispatch_format: FormatName = "bf16"
    combine_dtype: torch.dtype = torch.bfloat16
    combine_format: str | None = None
    layout: Layout = "expert"
    expert_alignment: int = 1
    capacity: int | None = None
    rows_per_expert: int | None = None
    pre_reduce: bool | None = None
    batch_invariant: bool = False
    fused_shared_expert: bool = False
    global_ids: bool = False
    zero_copy: bool = False
    mode: Mode = "alltoall"
    transport: TransportName = "auto"
    ranks_per_node: int | None = None
    two_level: bool | Literal["auto"] = False
    num_sms: int | None = None
    lanes: int = 1
    timeout: float = 60.0
    on_failure: OnFailure = "raise"
    world_size: int = 1
    rank: int = field(default=0, metadata={"differs": True})

    def __post_init__(self) -> None:
        if self.pre_reduce is None:
            object.__setattr__(self, "pre_reduce", not self.batch_invariant)
        for name, minimum in (
            ("num_experts", 1),
            ("topk", 1),
            ("hidden_size", 1),
            ("max_tokens_per_rank", 0),
            ("expert_alignment", 1),
            ("lanes", 1),
            ("world_size", 1),
            ("rank", 0),
        ):
            self._integer(name, minimum)
        for name, minimum in (("capacity", 0), ("rows_per_expert", 0), ("ranks_per_node", 1), ("num_sms", 1)):
            if getattr(self, name) is not None:
                self._integer(name, minimum)
        for name in ("pre_reduce", "batch_invariant", "fused_shared_expert", "global_ids", "zero_copy"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, "True or False", getattr(self, name))
        for name, choices in (
            ("layout", get_args(Layout)),
            ("mode", get_args(Mode)),
            ("on_failure", get_args(OnFailure)),
            ("transport", get_args(TransportName)),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(name, f"one of {', '.join(map(repr, choices))}", getattr(self, name))
        if self.combine_dtype not in COMBINE_DTYPES:
            raise ConfigError("combine_dtype", f"one of {', '.join(map(str, COMBINE_DTYPES))}", self.combine_dtype)
        if (
            isinstance(self.timeout, bool)
            or not isinstance(self.timeout, (int, float))
            or not 0 < self.timeout <= MAX_TIMEOUT
        ):
            raise ConfigError("timeout", f"a positive number of seconds up to {MAX_TIMEOUT}", self.timeout)
        if self.rank >= self.world_size:
            raise ConfigError("rank", f"below world_size {self.world_size}", self.rank)
        if self.ranks_per_node is not None and self.world_size % self.ranks_per_node:
            raise ConfigError("ranks_per_node", f"a divisor of world_size {self.world_size}", self.ranks_per_node)
        if not isinstance(self.dispatch_format, str):
            raise ConfigError("dispatch_format", "the name of a format", self.dispatch_format)
        self.format.validate_hidden(self.hidden_size)
        self._check_batch_invariant()
        self._check_combine_format()
        self._check_layout()
        self._settle_levels()
        pairs = self.max_recv_tokens * self.topk
        if max(pairs, self.max_rows, self.total_rows) > MAX_INT32:
            bound = self.row_bound
            raise ConfigError(
                "max_tokens_per_rank" if max(pairs, self.max_rows) > MAX_INT32 else bound,
                f"sizes with at most {MAX_INT32} (token, slot) pairs and rows on a rank, which int32 can count",
                f"{pairs} pairs, {max(self.max_rows, self.total_rows)} rows and {bound} {getattr(self, bound)}",
            )

    def _check_combine_format(self) -> None:
        """Refuse a combine format that does not exist, that nothing travels in, or that takes fp64."""
        name, choices = self.combine_format, f"one of {', '.join(map(repr, COMBINE_FORMATS))}"
        if name is None:
            return
        if name not in COMBINE_FORMATS:
            raise ConfigError("combine_format", f"None or {choices}", name)
        if self.combine_dtype == torch.float64:
            raise ConfigError("combine_format", "None with combine_dtype=torch.float64 (its sums are fp64)", name)
        if self.mode == "allreduce":
            raise ConfigError("combine_format", "None with mode='allreduce' (nothing travels)", name)
        get_format(name).validate_hidden(self.hidden_size)

    def _check_batch_invariant(self) -> None:
        """Refuse settings in which the bits of a token's result depend on more than the token, if they must not."""
        if not self.batch_invariant:
            return
        refused: tuple[tuple[str, tuple[object, ...], str], ...] = (
            ("pre_reduce", (False, None), "a sum on the expert's rank is of the experts that this rank owns"),
            ("mode", ("alltoall",), "a sum over ranks is of the experts of each rank"),
            ("layout", ("expert", "masked"), "experts of the other sum the rows of a token on their rank"),
            ("capacity", (None,), "other tokens decide which rows are dropped"),
            ("rows_per_expert", (None,), "other tokens decide which rows are dropped"),
        )
        for name, allowed, why in refused:
            if getattr(self, name) not in allowed:
                words = " or ".join(map(repr, allowed))
                raise ConfigError(name, f"{words} with batch_invariant=True ({why})", getattr(self, name))
        if not encodes_rows_alone(self.format, self.hidden_size):
            expected = "a format that encodes each row by itself, with batch_invariant=True"
            raise ConfigError("dispatch_format", expected, self.dispatch_format)

    def _settle_levels(self) -> None:
        """Make ``two_level`` True or False; refuse True where it is impossible."""
        if self.two_level is False:
            return
        if self.two_level is not True and self.two_level != "auto":
            raise ConfigError("two_level", "True, False or 'auto'", self.two_level)
        near, what = self.ranks_per_node, None
        if self.mode != "alltoall":
            what = f"mode={self.mode!r}, in which nothing travels"
        elif self.transport != "symmetric":
            what = f"transport={self.transport!r} (pass transport='symmetric')"
        elif near is None or not 1 < near < self.world_size:
            what = f"ranks_per_node={near} of {self.world_size} ranks (pass several nodes of several ranks)"
        elif not self.pre_reduce:
            what = "pre_reduce=False, because rows are summed on the way home"
        if what is not None and self.two_level is True:
            raise ConfigError("two_level", f"False or 'auto' with {what}", True)
        chosen = what is None and (self.two_level is True or self._prefers_two_levels())
        object.__setattr__(self, "two_level", chosen)

    def _prefers_two_levels(self) -> bool:
        routes = Routes.uniform(
            num_experts=self.num_experts, topk=self.topk, tokens=self.max_tokens_per_rank, ranks=self.world_size,
            per_node=self.node_size,
        )  # fmt: skip
        space = Workspace(self)
        return prefers_two_levels(routes, message=space.message_bytes, relay=space.relay_bytes, row=space.row_bytes)

    def _check_layout(self) -> None:
        """Refuse options that a layout does not allow."""
        single = (("fused_shared_expert", False), ("pre_reduce", True), ("expert_alignment", 1))
        own = (("zero_copy", False),)  # only rows that need no place of their own can stay where they arrived
        allowed: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
            "expert": ("its rows are grouped by expert, and its output has no ids", (("global_ids", False), *own)),
            "rank": ("its rows are one per token and rank", single),
            "masked": (
                "its groups have rows_per_expert rows each",
                (
                    ("fused_shared_expert", False),
                    ("expert_alignment", 1),
                    ("capacity", None),
                    ("global_ids", False),
                    *own,
                ),  # fmt: skip
            ),
        }
        why, values = allowed[self.layout]
        for name, value in values:
            if getattr(self, name) != value:
                raise ConfigError(name, f"{value} with layout={self.layout!r} ({why})", getattr(self, name))
        self._check_zero_copy()
        if self.rows_per_expert is None:
            return
        if self.layout != "masked":
            raise ConfigError(
                "rows_per_expert", f"None with layout={self.layout!r} (use capacity)", self.rows_per_expert
            )
        if self.rows_per_expert % self._rows_multiple:
            expected = f"a multiple of {self._rows_multiple}, as the scales of {self.dispatch_format!r} are laid out"
            raise ConfigError("rows_per_expert", expected, self.rows_per_expert)

    def _check_zero_copy(self) -> None:
        """Refuse settings in which rows do not stay where they arrived."""
        if not self.zero_copy:
            return
        if self.capacity is not None:
            expected = "None with zero_copy=True, whose rows stay where they arrived (bound them with max_tokens)"
            raise ConfigError("capacity", expected, self.capacity)
        if self.mode != "alltoall":
            raise ConfigError("mode", "'alltoall' with zero_copy=True (otherwise nothing arrives)", self.mode)
        if self.node_size < self.world_size:
            expected = f"None or {self.world_size} with zero_copy=True: a network is told at once that rows were read"
            raise ConfigError("ranks_per_node", expected, self.ranks_per_node)

    def _integer(self, name: str, minimum: int) -> None:
        value, most = getattr(self, name), _MOST.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(name, f"an integer >= {minimum}", value)
        if most is not None and value > most:
            raise ConfigError(name, f"an integer in [{minimum}, {most}]", value)

    @property
    def format(self) -> Format:
        """The dispatch format object."""
        return get_format(self.dispatch_format)

    @property
    def node_size(self) -> int:
        """Ranks of a node, which address each other's memory. All ranks where nothing travels."""
        return self.ranks_per_node if self.ranks_per_node and self.mode == "alltoall" else self.world_size

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """dtype of sums: fp64 when ``combine_dtype`` is fp64, else fp32."""
        return torch.float64 if self.combine_dtype == torch.float64 else torch.float32

    @property
    def weight_dtype(self) -> torch.dtype:
        """dtype of router weights: that of the sums."""
        return self.accumulate_dtype

    @property
    def num_local_experts(self) -> int:
        """Experts on this rank; the first ``num_experts % world_size`` ranks own one more than the others."""
        return self.num_experts // self.world_size + (self.rank < self.num_experts % self.world_size)

    @property
    def num_groups(self) -> int:
        """Groups of dispatch's output: local experts (+ 1 fused shared), or source ranks for layout "rank"."""
        return self.world_size if self.layout == "rank" else self.num_local_experts + self.fused_shared_expert

    @property
    def rows_by_group(self) -> bool:
        """Whether the groups of an output have one size, [num_groups, rows, ...]: layout "masked", and zero_copy."""
        return self.layout == "masked" or self.zero_copy

    @property
    def row_alignment(self) -> int:
        """Rows that group sizes are a multiple of: the least common multiple of ``expert_alignment`` and the format's
        own row multiple (for powers of two, the larger one). 1 where groups are not padded."""
        if self.layout != "expert":
            return 1
        return math.lcm(self.expert_alignment, self.format.row_multiple)

    @property
    def _rows_multiple(self) -> int:
        """Rows that ``rows_per_expert`` is a multiple of: the format's, or with scales in tiles those of a tile."""
        layout = self.format.scale_layout
        return math.lcm(self.format.row_multiple, 1 if layout is None else layout.block_rows)

    @property
    def max_recv_tokens(self) -> int:
        """Most messages (one per token and source) that this rank receives in a call."""
        return self._recv_tokens(self.max_tokens_per_rank)

    @property
    def max_shared_rows(self) -> int:
        """Most rows of the fused shared expert's group: all own tokens, or in allreduce mode a part of them."""
        return self._shared_rows(self.max_tokens_per_rank)

    @property
    def max_rows(self) -> int:
        """Most output rows of a dispatch without ``capacity``: routed, shared and padding rows. Layout "masked": most
        rows of an expert, as a multiple of what its scales demand. With ``zero_copy``: of a source rank."""
        return self._worst_rows(self.max_tokens_per_rank)

    @property
    def row_capacity(self) -> int:
        """Rows of the dispatch output: ``capacity``, or the worst case. Layout "masked": rows of each expert; with
        ``zero_copy`` of each source rank."""
        return self.output_rows()

    def output_rows(self, max_tokens: int | None = None) -> int:
        """Return the rows of the output of a dispatch with this ``max_tokens``: the worst case of so many tokens on
        every rank, or ``capacity`` where that is smaller; for None :attr:`row_capacity`. Layout "masked": the rows of
        each expert.

        Example: 2 ranks, topk 3: at most 5 tokens a rank are 2 x 5 x 3 = 30 rows.
        """
        limit = getattr(self, self.row_bound)
        if max_tokens is None:
            return self.max_rows if limit is None else limit
        worst = self._worst_rows(max_tokens)
        return worst if limit is None else torch.sym_min(worst, limit)  # type: ignore[no-any-return]

    def _recv_tokens(self, tokens: int) -> int:
        return tokens * (1 if self.mode == "allreduce" else self.world_size)

    def _shared_rows(self, tokens: int) -> int:
        if not self.fused_shared_expert:
            return 0
        return ceil_div(tokens, self.world_size if self.mode == "allreduce" else 1)

    def _worst_rows(self, tokens: int) -> int:
        """Return the most output rows when ranks pass up to ``tokens`` tokens, which under a tracer may be a symbol."""
        received = self._recv_tokens(tokens)
        if self.zero_copy:
            return tokens
        if self.layout == "rank":
            return received
        if self.layout == "masked":
            return align_up(received * self.topk, self._rows_multiple)
        routed, shared = received * self.topk, self._shared_rows(tokens)
        if self.row_alignment == 1:
            return routed + shared
        padded_groups = torch.sym_min(self.num_local_experts, routed) + torch.sym_min(1, shared)
        return routed + shared + padded_groups * (self.row_alignment - 1)  # type: ignore[no-any-return]

    @property
    def row_bound(self) -> Literal["capacity", "rows_per_expert"]:
        """The field that bounds :attr:`row_capacity`."""
        return "rows_per_expert" if self.layout == "masked" else "capacity"

    @property
    def total_rows(self) -> int:
        """Rows of an output in all: :attr:`row_capacity`, for each group where these have one size."""
        return self.row_capacity * (self.num_groups if self.rows_by_group else 1)

    @property
    def most_total_rows(self) -> int:
        """The largest :attr:`total_rows` of any rank: rank 0 owns as many experts as any."""
        return dataclasses.replace(self, rank=0).total_rows

    def scale_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of an output's scales, of ``rows`` rows; of each group where these have one size."""
        layout, width = self.format.scale_layout, self.format.scale_width(self.hidden_size)
        if self.zero_copy:
            return (self.num_groups, rows, width)
        if self.layout == "rank" or layout is None:
            return (rows, width)
        if self.layout == "masked":
            return (self.num_groups, *layout.group_shape(rows, width))
        return layout.shape(rows, width, self.num_groups)

    @property
    def dispatch_message(self) -> DispatchMessage:
        """The largest message dispatch sends: ids and router weights included."""
        return DispatchMessage(self.format, self.hidden_size, self.topk, weight_dtype=self.weight_dtype)

    @property
    def home_row(self) -> HomeRow:
        """One row on its way home."""
        name = self.combine_format
        return HomeRow(self.hidden_size, self.combine_dtype, None if name is None else get_format(name))

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of one row on its way home."""
        return self.home_row.nbytes

    @property
    def result_row_bytes(self) -> int:
        """Bytes of one row of expert outputs, and of combine's result."""
        return self.hidden_size * self.combine_dtype.itemsize

    @property
    def home_message_bytes(self) -> int:
        """Bytes of one row on its way home on the collective transport: the row, padded, and 16 bytes with the number
        of its place at the home rank."""
        return align_up(self.combine_row_bytes, ALIGNMENT) + ALIGNMENT

    def memory_report(self, *, max_tokens: int | None = None) -> MemoryReport:
        """Return the most memory that this rank will hold, before anything is allocated.

        ``max_tokens``: of calls that are given this bound. It makes ``outputs`` smaller, and the notes of own tokens;
        what is made once for all calls stays as it is.

        Raises:
            ConfigError: it is no integer, negative, or more than ``max_tokens_per_rank``.
        """
        most = self.max_tokens_per_rank
        if max_tokens is not None and (type(max_tokens) is not int or not 0 <= max_tokens <= most):
            raise ConfigError("max_tokens", f"an integer in [0, {most}] or None", max_tokens)
        tokens = self.max_tokens_per_rank if max_tokens is None else max_tokens
        travels = self.mode == "alltoall"
        copies = min(self.world_size, self.topk)
        rows_home = copies if self.pre_reduce else self.topk
        results = (
            1 if self.layout == "rank" or self.fused_shared_expert else self.topk
        )  # of reduce=False, where allowed
        own = self.max_tokens_per_rank * self.dispatch_message.nbytes
        send = own * copies
        recv = self.max_recv_tokens * self.dispatch_message.nbytes
        home = self.max_tokens_per_rank * rows_home * self.home_message_bytes
        back = self.max_recv_tokens * (1 if self.pre_reduce else self.topk) * self.home_message_bytes
        workspace = Workspace(self)
        in_place = self._bytes_in_place(max_tokens) if self.zero_copy else 0
        return MemoryReport(
            wire_send=own + max(send, back) * travels, wire_recv=max(recv, home) if travels else own,
            outputs=self._dispatch_output_bytes(max_tokens) - in_place + tokens * results * self.result_row_bytes,
            block=workspace.nbytes, notes=(workspace.note_words(tokens) + self.row_capacity) * 4,
            in_place=in_place, staging=workspace.staging_bytes, lanes=self.lanes,
        )  # fmt: skip

    def _bytes_in_place(self, max_tokens: int | None) -> int:
        """Return the bytes of the rows and scales of an output that stay where they arrived."""
        rows, fmt = self.num_groups * self.output_rows(max_tokens), self.format
        return rows * (fmt.payload_bytes(self.hidden_size) + fmt.scale_bytes(self.hidden_size))

    def _dispatch_output_bytes(self, max_tokens: int | None) -> int:
        """Return a lower bound of the bytes that a dispatch with router weights returns
        (:class:`moelink.output.OutputShape`)."""
        fmt, rows, groups = self.format, self.output_rows(max_tokens), self.num_groups
        scales, ranked = 0, self.layout == "rank"
        if fmt.scale_dtype is not None:
            scales = math.prod(self.scale_shape(rows)) * fmt.scale_dtype.itemsize
        rows *= groups if self.rows_by_group else 1
        per_row = fmt.payload_bytes(self.hidden_size) + 3 * 4
        per_row += self.topk * (4 + self.weight_dtype.itemsize) if ranked else self.weight_dtype.itemsize
        return rows * per_row + scales + (3 * groups + 3) * 4  # offsets, ids and scales' offsets of groups, two counts

    def shared_fields(self) -> dict[str, str]:
        """Return the fields that must agree on every rank, as text (what ``init`` compares)."""
        return {f.name: str(getattr(self, f.name)) for f in dataclasses.fields(self) if not f.metadata.get("differs")}
