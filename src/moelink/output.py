"""Define the output of dispatch, which combine takes back: DispatchOutput and its handle."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from moelink.arguments import describe
from moelink.arith import align_up
from moelink.config import EPConfig
from moelink.errors import UnsupportedError
from moelink.formats.base import ScaleLayout
from moelink.lease import IN_PLACE, CallCount, RowsInPlace
from moelink.memory.layout import ALIGNMENT

T = TypeVar("T")


@dataclass(frozen=True)
class Blank:
    """Shape, dtype and strides of an uninitialised, contiguous tensor, without a device.

    The strides are computed once and passed to ``torch.empty_strided``; with ``torch.empty`` every call would compute
    them again, at a higher cost (``tensors`` in the results of ``moelink_bench.host``).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, *shape: int, dtype: torch.dtype = torch.int32) -> Blank:
        """Return the blank of a tensor of ``shape``."""
        strides = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            strides[i - 1] = strides[i] * torch.sym_max(shape[i], 1)  # under a tracer, sizes are symbols
        return cls(shape, tuple(strides), dtype)

    def on(self, device: torch.device) -> Tensor:
        """Return a new tensor on ``device``."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def made(cls: type[T], fields: dict[str, Any]) -> T:
    """Return a ``cls``, a frozen dataclass, with these fields. The dictionary is the object's from now on.

    The class's own constructor sets a frozen dataclass's fields one by one, which takes four times as long, in every
    call.
    """
    one = object.__new__(cls)
    object.__setattr__(one, "__dict__", fields)
    return one


@dataclass(frozen=True)
class ArenaLayout:
    """Where small tensors are in an arena, one allocation that holds them all.

    To make a tensor on a CUDA device takes 2 to 3 microseconds of host time, and a dispatch returns nine small ones,
    of which most programs look at one or two. Tokens and scales are none of them: every program looks at them, and
    whoever keeps a count or an offset need not keep them as well.

    Attributes:
        words: int32 elements of the allocation.
        places: by name, the first byte and the blank of a tensor.
    """

    words: int
    places: Mapping[str, tuple[int, Blank]]

    @classmethod
    def of(cls, blanks: Iterable[tuple[str, Blank]]) -> ArenaLayout:
        """Lay ``blanks`` out one after the other, each from a multiple of 16 bytes.

        >>> ArenaLayout.of([("counts", Blank.of(2, 3)), ("weights", Blank.of(5, dtype=torch.float32))]).words
        16
        """
        places, end = {}, 0
        for name, blank in blanks:
            places[name] = end, blank
            end += align_up(math.prod(blank.shape) * blank.dtype.itemsize, ALIGNMENT)
        return cls(end // 4, MappingProxyType(places))

    def tensor(self, memory: Tensor, name: str) -> Tensor:
        """Return the tensor called ``name``, which shares the memory of an arena."""
        begin, blank = self.places[name]
        memory = memory if blank.dtype == torch.int32 else memory.view(blank.dtype)
        return memory.as_strided(blank.shape, blank.strides, begin // blank.dtype.itemsize)


class Source(Protocol):
    """The source of an output's missing fields.

    Attributes:
        carrier: that of the handle.
    """

    carrier: Tensor | None

    def has(self, name: str) -> bool:
        """Return whether the output has a field of this name, which is to be made."""

    def field(self, name: str) -> Any:
        """Make a field."""


@dataclass(frozen=True)
class DispatchHandle:
    """All that combine needs beside the rows. Opaque to users. The communicator itself remembers nothing between calls.

    Attributes:
        owner: identity of the communicator that made it.
        rank: the rank that made it.
        num_tokens: tokens of the home rank in this call.
        topk_ids: [num_tokens, topk], the home rank's ids.
        topk_weights: [num_tokens, topk], the home rank's router weights when they went into dispatch, else None.
        counts: [num_local_experts, world_size] int32, routed rows per (expert, source rank) before capacity.
        routing: the transport's own record of the routing, which ``routing=`` uses again.
        first_id: what an id in ``DispatchOutput.topk_ids`` is of this rank's first expert: 0, or with ``global_ids``
            that expert's number.
        ids_version: what torch counted as changes of ``topk_ids`` when they were dispatched, so that a combine over
            other ids is refused. None where it counts none, and where the dispatch was captured into a CUDA graph,
            whose replays dispatch the ids that are there then.
        absent: [num_experts] bool, the experts of masked ranks, kept up to date by the communicator; None of a compiled
            graph's outputs.
        carrier: the tensor that gradients of quantised rows arrive at: zeros [rows, hidden_size] of combine_dtype that
            take no memory (stride 0), when dispatch ran as an operator on a format with scales; else None.
    """

    owner: str
    rank: int
    num_tokens: int
    topk_ids: Tensor
    topk_weights: Tensor | None
    counts: Tensor
    routing: Any = field(repr=False)
    ids_version: int | None = None
    first_id: int = 0
    absent: Tensor | None = field(default=None, repr=False)
    carrier: Tensor | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        """Dtypes and shapes of tensors, and the other fields."""
        return describe(self, (each.name for each in fields(self) if each.repr))

    def __deepcopy__(self, memo: dict[int, Any]) -> DispatchHandle:
        """Return a handle with tensors of its own, of ids that are as unchanged as these are."""
        made = {each.name: copy.deepcopy(getattr(self, each.name), memo) for each in fields(self)}
        if self.ids_version is not None:
            unchanged = version_of(self.topk_ids) == self.ids_version
            made["ids_version"] = version_of(made["topk_ids"]) if unchanged else -1  # which is no tensor's
        return type(self)(**made)


def version_of(tensor: Tensor) -> int | None:
    """Return how often ``tensor`` was changed in place.

    None where torch does not know: of an inference tensor, and while torch.compile traces.
    """
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def is_captured(tensor: Tensor) -> bool:
    """Return whether launches on the current stream of this tensor's device are captured into a CUDA graph, not run."""
    if not tensor.is_cuda:
        return False
    if tensor.get_device() == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(tensor.device):
        return torch.cuda.is_current_stream_capturing()


def version_at_dispatch(topk_ids: Tensor) -> int | None:
    """Return the ``ids_version`` of a handle over ``topk_ids``.

    It is None while a CUDA graph is captured. Each replay dispatches the ids that are there then, so whoever overwrites
    them between two replays has not changed what the latest one dispatched.
    """
    version = version_of(topk_ids)
    return None if version is None or is_captured(topk_ids) else version


@dataclass(frozen=True)
class DispatchOutput:
    """Rows received by one rank, in ordinary torch memory that the caller owns.

    The tensors other than tokens and scales may share one allocation, which lives as long as any of them.

    ``rows`` is the worst case, with ``max_tokens`` that of this bound, the capacity where that is smaller, that of the
    output whose routing is used again, or (``host_counts=True``) exact; ``num_groups`` is the number of local
    experts, plus one with a fused shared expert, or the world size for layout "rank".

    With layout "masked", ``[rows, ...]`` below is ``[num_groups, rows_per_expert, ...]``, and also with
    ``host_counts=True``. The rows of expert e come first in group e; there are ``num_recv_per_expert[e]`` of them. The
    group's other rows are undefined in every field.

    With ``zero_copy`` (layout "rank"), ``[rows, ...]`` is ``[world_size, max_tokens, ...]``: the call's bound
    ``max_tokens``, or ``max_tokens_per_rank``. Group s holds the rows of source rank s, in the order of its tokens, of
    which there are ``num_recv_per_rank[s]``; other rows have ids -1 and are undefined in every other field. ``tokens``
    and ``scales`` are strided views of the workspace. Reading these two fields after the next call of the lane has
    begun raises ExpiredRowsError (:mod:`moelink.lease`).

    Attributes:
        tokens: [rows, width] of the format's payload dtype. Layout "expert": grouped by local expert, inside a group by
            source rank, source token, slot. Layout "rank": by source rank, then source token. Padding rows inside a
            group are zero; rows past ``row_offsets[-1]`` are undefined.
        scales: in the layout that the format declares (row-major [rows, n] for layout "rank"), or None. Layout
            "masked": that layout for each group, [num_groups, rows_per_expert, n], transposed [num_groups, n,
            rows_per_expert], or in tiles [num_groups, rows_per_expert / 128, ceil(n / 4), 32, 4, 4].
        row_offsets: [num_groups + 1] int32, exclusive starts; the last entry counts all rows including padding. Layout
            "masked": multiples of ``rows_per_expert``; with ``zero_copy`` multiples of the rows of a source rank.
        expert_ids: [num_groups] int32, 0 .. num_groups - 1; None for layout "rank".
        src_info: [rows, 3] int32: source rank, source token, top-k slot (-1 for shared rows and layout "rank"); -1
            throughout on padding rows.
        scales_offsets: [num_groups] int32 for the 128x4 scale-tile layout, else None. None with layout "masked".
        weights: [rows] router weight of each row when ``topk_weights`` went into dispatch, else None. None with layout
            "rank".
        num_recv_tokens: [] int32, routed rows present in the output.
        overflow: [] int32, rows that did not fit ``rows``, or those of their expert.
        handle: for combine and ``routing=``.
        topk_ids: layout "rank" only: [rows, topk] int32 local expert ids (with ``global_ids``, ids over all ranks), -1
            elsewhere: for experts of other ranks, and throughout on rows past ``row_offsets[-1]``.
        topk_weights: layout "rank" only: [rows, topk] router weights if they went into dispatch, 0 where the id is -1.
        host_counts: with ``host_counts=True``, :attr:`num_recv_per_expert` as a list on the host; else None.
    """

    tokens: Tensor
    scales: Tensor | None
    row_offsets: Tensor
    expert_ids: Tensor | None
    src_info: Tensor
    scales_offsets: Tensor | None
    weights: Tensor | None
    num_recv_tokens: Tensor
    overflow: Tensor
    handle: DispatchHandle = field(repr=False)
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    host_counts: list[int] | None = None

    def __getattr__(self, name: str) -> Any:
        """Make a field that nobody has looked at from the output's source, and keep it.

        To make a tensor or a handle takes longer than all else in a call, and most programs look at few of them.
        Fields that stay where they arrived are not kept: each look asks whether they are still there.
        """
        rows: RowsInPlace | None = self.__dict__.get("_rows")
        if rows is not None and name in IN_PLACE:
            return rows.field(name)
        source: Source | None = self.__dict__.get("_source")
        if source is None or not source.has(name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = self.__dict__[name] = source.field(name)
        return value

    def __repr__(self) -> str:
        """Dtypes and shapes of all fields but the handle, and but rows that have ended."""
        rows = self.rows_in_place
        ended = IN_PLACE if rows is not None and rows.has_ended else ()
        return describe(self, (each.name for each in fields(self) if each.repr and each.name not in ended))

    @property
    def rows_in_place(self) -> RowsInPlace | None:
        """With ``zero_copy``, the holder of tokens and scales until the next call; else None."""
        return self.__dict__.get("_rows")

    @property
    def num_recv_per_rank(self) -> Tensor:
        """[world_size] int32, layout "rank" only: rows present from each source rank.

        Computed on the device at each access, without host synchronisation, so a CUDA graph may capture it.

        Raises:
            UnsupportedError: another layout, whose ``src_info`` names the source of each row.
        """
        ids = self.topk_ids
        if ids is None:
            raise UnsupportedError(
                "num_recv_per_rank: expected an output of layout 'rank', got one of another layout; use src_info, "
                "which has the source of each row"
            )
        if ids.dim() == 2:
            return self.row_offsets[1:] - self.row_offsets[:-1]
        return (ids >= 0).any(2).sum(1, dtype=torch.int32)

    @property
    def masked(self) -> Tensor:
        """[] int32: (token, slot) pairs of this rank's own tokens that were dropped: their expert is on a masked rank.

        Like the two methods below it goes by the ranks that are masked when it is looked at. Computed on the device at
        each access, without host synchronisation, so a CUDA graph may capture it.
        """
        return self._pairs(present=False).sum(dtype=torch.int32)

    def weight_share(self) -> Tensor:
        """Return [num_tokens] the share of each token's router weight that goes to ranks that are not masked.

        Without router weights in dispatch each of a token's pairs weighs the same. It is 1 for a token without weight.
        """
        weights = self.handle.topk_weights
        routed, arrives = self.handle.topk_ids >= 0, self._pairs(present=True)
        if weights is None:
            weights = torch.ones(routed.shape, dtype=torch.float32, device=routed.device)
        whole, part = (weights.masked_fill(~pairs, 0).sum(1) for pairs in (routed, arrives))
        return torch.where(whole == 0, 1, part / whole)

    def rescale(self, out: Tensor) -> Tensor:
        """Return a combine's result [num_tokens, hidden_size] divided by :meth:`weight_share`, and rounded once more.

        A token of which no weight arrived stays as it is. Meant for sums of routed experts alone, without a shared
        expert, bias or residual in them.
        """
        share = self.weight_share()
        wide = out.to(share.dtype) / torch.where(share == 0, 1, share)[:, None]
        return wide.to(out.dtype)

    def _pairs(self, *, present: bool) -> Tensor:
        """Return [num_tokens, topk] bool: pairs whose expert takes part, or those of masked ranks."""
        ids, absent = self.handle.topk_ids, self.handle.absent
        if absent is None:
            raise UnsupportedError(
                "masked: expected an output of an eager call, got one of a compiled graph; call it outside"
            )
        valid = (ids >= 0) & (ids < absent.shape[0])
        return valid & (absent[torch.where(valid, ids, 0).long()] != present)

    def rows_by_expert(self) -> tuple[Tensor, Tensor]:
        """Return the index by which a gather GEMM reads rows grouped by expert; layout "rank" only.

        Computed on the device without host synchronisation, so a CUDA graph may capture it.

        Returns:
            ``pairs`` [rows * topk] int32 and ``offsets`` [num_local_experts + 1] int32. The rows of local expert e are
            ``pairs[offsets[e]:offsets[e + 1]] // topk``, numbered over all groups (with ``zero_copy`` row i of source
            rank s is ``s * rows_of_a_group + i``), and ``pairs % topk`` are their top-k slots. They are in the order of
            layout "expert". Pairs past the last offset name no local expert.

        Raises:
            UnsupportedError: another layout, whose rows are grouped already.

        Example: topk 2, ids [[0, -1], [1, 0]]: pairs begin with [0, 3, 2], offsets are [0, 2, 3]. Expert 0 reads rows 0
        and 1, expert 1 reads row 1.
        """
        ids, experts = self.topk_ids, self.handle.counts.shape[0]
        if ids is None:
            raise UnsupportedError(
                "rows_by_expert: expected an output of layout 'rank', got one of another layout; use row_offsets, by "
                "which its rows are grouped"
            )
        local = torch.where(ids >= 0, ids - self.handle.first_id, experts).flatten()
        ordered, pairs = local.sort(stable=True)
        every = torch.arange(experts + 1, dtype=ordered.dtype, device=ids.device)
        return pairs.int(), torch.searchsorted(ordered, every).int()

    @property
    def num_recv_per_expert(self) -> Tensor:
        """[num_local_experts] int32: routed rows present for each local expert, padding left out.

        They are counted after ``capacity``, as ``num_recv_tokens`` is. The fused shared expert is not among them. With
        layout "rank" it is (row, slot) pairs that name the expert. Computed on the device at each access, without host
        synchronisation, so a CUDA graph may capture it.
        """
        counts = self.handle.counts
        experts = counts.shape[0]
        if self.topk_ids is None:
            offsets = self.row_offsets[self.row_offsets.shape[0] - experts - 1 :]
            return torch.minimum(counts.sum(1, dtype=torch.int32), offsets[1:] - offsets[:-1])
        ids = self.topk_ids
        local = torch.where(ids >= 0, ids - self.handle.first_id, -1)
        place = (local + 1).flatten().long()  # 0: none of this rank's experts
        counted = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
        return counted.scatter_add_(0, place, torch.ones_like(place, dtype=torch.int32))[1:]


@dataclass(frozen=True)
class OutputShape:
    """The tensors of a DispatchOutput before they are made.

    Attributes:
        present: by field, the blanks of the tensors that the output has.
        absent: the fields that are None.
    """

    present: tuple[tuple[str, Blank], ...]
    absent: Mapping[str, None]

    @classmethod
    def of(cls, config: EPConfig, *, rows: int, weighted: bool) -> OutputShape:
        """Return the shape for ``rows`` rows (layout "masked": of each expert); ``weighted``: router weights
        travelled."""
        fmt, ranked = config.format, config.layout == "rank"
        groups, topk, weight = config.num_groups, config.topk, config.weight_dtype
        by_row = (groups, rows) if config.rows_by_group else (rows,)
        scales = scales_offsets = None
        if fmt.scale_dtype is not None and fmt.scale_layout is not None:
            scales = Blank.of(*config.scale_shape(rows), dtype=fmt.scale_dtype)
            if config.layout == "expert" and _has_offsets(fmt.scale_layout, groups):
                scales_offsets = Blank.of(groups)
        blanks = {
            "tokens": Blank.of(*by_row, fmt.payload_width(config.hidden_size), dtype=fmt.payload_dtype),
            "scales": scales,
            "row_offsets": Blank.of(groups + 1),
            "expert_ids": None if ranked else Blank.of(groups),
            "src_info": Blank.of(*by_row, 3),
            "scales_offsets": scales_offsets,
            "weights": Blank.of(*by_row, dtype=weight) if weighted and not ranked else None,
            "num_recv_tokens": Blank.of(),
            "overflow": Blank.of(),
            "topk_ids": Blank.of(*by_row, topk) if ranked else None,
            "topk_weights": Blank.of(*by_row, topk, dtype=weight) if weighted and ranked else None,
        }
        present = tuple((name, blank) for name, blank in blanks.items() if blank is not None)
        return cls(present, MappingProxyType({name: None for name, blank in blanks.items() if blank is None}))

    @property
    def large(self) -> tuple[tuple[str, Blank], ...]:
        """The tensors that an arena does not hold: rows and their scales, and what only layout "rank" has."""
        return tuple((name, blank) for name, blank in self.present if name in _LARGE)

    @property
    def small(self) -> tuple[tuple[str, Blank], ...]:
        """The tensors that an arena may hold."""
        return tuple((name, blank) for name, blank in self.present if name not in _LARGE)

    def allocate(self, handle: DispatchHandle, device: torch.device, rows: RowsInPlace | None = None) -> DispatchOutput:
        """Make uninitialised tensors, and return them in an output with ``handle``. Each has memory of its own.

        ``rows``: tokens and scales that are there already, and stay where they are.
        """
        made_of: dict[str, Any] = {"handle": handle, **self.absent}
        if rows is not None:
            made_of["_rows"] = rows
            made_of.pop("scales", None)
        left = () if rows is None else IN_PLACE
        made_of.update((name, blank.on(device)) for name, blank in self.present if name not in left)
        return made(DispatchOutput, made_of)


def carrier_of(output: DispatchOutput) -> Tensor | None:
    """Return the ``carrier`` of the handle of ``output``, which is not made to find that out."""
    source: Source | None = output.__dict__.get("_source")
    return output.handle.carrier if source is None else source.carrier


_LARGE = frozenset({"tokens", "scales", "topk_ids", "topk_weights"})


def replace_fields(output: DispatchOutput, **values: Any) -> DispatchOutput:
    """Return ``output`` with other ``values`` of fields. Rows that stay where they arrived do so, and are not read."""
    return made(DispatchOutput, {**output.__dict__, **values})


def take_over(output: DispatchOutput | None, by: DispatchOutput) -> DispatchOutput:
    """Return ``output``, whose tensors a later dispatch has overwritten, as that dispatch's output, which is ``by``.

    Else a combine of ``output`` would send the rows of the later dispatch home by the routing of the earlier one. With
    ``output=None`` the later dispatch has tensors of its own, and this returns ``by``.
    """
    if output is None:
        return by
    object.__setattr__(output, "__dict__", dict(by.__dict__))
    return output


def leave_in_place(output: DispatchOutput, count: CallCount) -> DispatchOutput:
    """Return ``output`` with tokens and scales that may be read until the next call that ``count`` counts."""
    others = dict(output.__dict__)
    views = {name: others.pop(name) for name in IN_PLACE}
    rows = RowsInPlace(count, {name: view for name, view in views.items() if view is not None})
    return made(DispatchOutput, {**others, "_rows": rows})


@lru_cache(maxsize=64)
def shape_of_outputs(config: EPConfig, *, rows: int, weighted: bool) -> OutputShape:
    """Return :meth:`OutputShape.of` of these, made once."""
    return OutputShape.of(config, rows=rows, weighted=weighted)


@lru_cache(maxsize=64)
def _has_offsets(layout: ScaleLayout, num_groups: int) -> bool:
    return layout.scales_offsets(torch.zeros(num_groups + 1, dtype=torch.int32, device="cpu")) is not None
