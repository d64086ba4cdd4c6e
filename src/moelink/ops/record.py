"""Pack a transport's plan into tensors whose sizes follow from the configuration, and unpack it.

Operators pass tensors only, and a compiler must know their sizes before they run. The plan of the symmetric transport
is tensors of fixed sizes already. The collective transport counts on the host and keeps exact sizes: its plan is copied
into one tensor of the worst-case size, of which only the used part is read or written. A second one holds the number of
the dispatch, which is all that a dispatch over a reused routing has of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.errors import UnsupportedError
from moelink.routing import RowPlan
from moelink.transports.collective.plan import CollectivePlan, Messages

MAX_PARTS = 12
"""Outputs of a dispatch operator that are reserved for a plan."""


@dataclass(frozen=True)
class PackedPlan:
    """A plan as an operator returned it: ``tensors``, at most :data:`MAX_PARTS`."""

    tensors: tuple[Tensor, ...]


def pack(plan: Any, config: EPConfig) -> tuple[Tensor, ...]:
    """Pack ``plan`` of either transport.

    A plan of the symmetric transport gives two tensors that share its memory: all notes, and the notes that are the
    call's own when it reused a routing (else empty). A plan of the collective transport is copied.

    Raises:
        UnsupportedError: a tracer met a plan of the collective transport that was made outside the compiled region.
    """
    if isinstance(plan, PackedPlan):
        return plan.tensors
    if not isinstance(plan, CollectivePlan):
        return plan.notes, plan.notes.new_empty(0) if plan.own is None else plan.own
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "recv: expected one that was dispatched inside the compiled region, because the collective transport's "
            "have sizes of their own, got one from outside; move its dispatch into the region"
        )
    return _pack_collective(plan, config), pack_call(plan)


def pack_call(plan: CollectivePlan) -> Tensor:
    """Return the part of a plan of the collective transport that is a call's own: its number, [1] int64."""
    return torch.tensor([plan.call], device=plan.messages.tokens.device)


def unpack(tensors: tuple[Tensor, ...], config: EPConfig, *, transport: str) -> Any:
    """Unpack the tensors that :func:`pack` returned; ``transport`` names the transport that made the plan."""
    if transport == "collective":
        words, call = tensors
        return _unpack_collective(words, int(call), config)
    # Not imported at the top: it loads Triton, which not every platform has.
    from moelink.memory.workspace import Workspace
    from moelink.transports.symmetric.notes import NotesLayout, SymmetricNotes

    notes, own = tensors
    return SymmetricNotes(NotesLayout.of(Workspace(config)), notes, own if own.numel() else None)


def allocate(
    config: EPConfig, *, transport: str, num_tokens: int, device: torch.device, again: bool = False
) -> tuple[Tensor, ...]:
    """Allocate uninitialised tensors like those of :func:`pack` for a call with ``num_tokens`` tokens.

    ``again``: the call reuses the routing of an earlier one.
    """
    if transport == "collective":
        sizes = (sum(_sections(config).values()), 1)
        return tuple(torch.empty(size, dtype=torch.int64, device=device) for size in sizes)
    from moelink.kernels.records import RoutingNotes
    from moelink.memory.workspace import Workspace

    workspace = Workspace(config)
    own = RoutingNotes._make(workspace.note_shapes(num_tokens)).received if again else (0,)
    shapes = (workspace.note_words(num_tokens),), own
    return tuple(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes)


def count_parts(config: EPConfig, *, transport: str) -> int:
    """Return the number of tensors of :func:`pack`."""
    parts = len(allocate(config, transport=transport, num_tokens=0, device=torch.device("meta")))
    assert parts <= MAX_PARTS, f"a plan of {parts} tensors: raise MAX_PARTS"
    return parts


OWN_PARTS = (1,)
"""Indices of the tensors that a dispatch with a reused routing fills in itself."""

_HEADER = 6


def _sections(config: EPConfig) -> dict[str, int]:
    """Worst-case size of each part of a collective plan, in 8-byte words, in the order in which they are stored."""
    ranks, topk, groups = config.world_size, config.topk, config.num_groups
    messages = config.max_recv_tokens
    by_message = {"tokens": messages, "sources": messages, "local_ids": messages * topk}
    by_row = dict.fromkeys(("message", "slot", "group", "row"), messages * topk)
    by_row["counts"] = config.num_local_experts * ranks
    return {
        "host": _HEADER + 2 * ranks,
        "invalid_ids": 1,
        "group_sizes": groups,
        "row_offsets": groups + 1,
        "send_tokens": config.max_tokens_per_rank * min(ranks, topk),
        **by_message,
        **({} if config.layout == "rank" else by_row),
    }


def _pack_collective(plan: CollectivePlan, config: EPConfig) -> Tensor:
    got, rows = plan.messages, plan.rows
    shared = plan.shared if plan.shared is not None else range(-1, -1)
    routed = 0 if rows is None else len(rows.row)
    header = [len(got.send_tokens), len(got.tokens), routed, shared.start, shared.stop, got.call]
    host = torch.tensor([*header, *got.send_counts, *got.recv_counts], device="cpu")
    parts = {**vars(got), **vars(plan), **({} if rows is None else vars(rows)), "host": host}
    sections = _sections(config)
    words = torch.empty(sum(sections.values()), dtype=torch.int64, device=got.tokens.device)
    for section, name in zip(words.split(list(sections.values())), sections, strict=True):
        section[: parts[name].numel()] = parts[name].reshape(-1)
    return words


def _unpack_collective(words: Tensor, call: int, config: EPConfig) -> CollectivePlan:
    sections, ranks, topk = _sections(config), config.world_size, config.topk
    parts = dict(zip(sections, words.split(list(sections.values())), strict=True))
    host = parts["host"].tolist()
    sent, received, routed, start, stop, counted = host[:_HEADER]
    messages = Messages(
        send_tokens=parts["send_tokens"][:sent],
        send_counts=host[_HEADER : _HEADER + ranks],
        recv_counts=host[_HEADER + ranks :],
        tokens=parts["tokens"][:received],
        sources=parts["sources"][:received],
        local_ids=parts["local_ids"][: received * topk].view(received, topk).int(),
        invalid_ids=parts["invalid_ids"][0],
        call=counted,
    )
    rows = None
    if config.layout == "expert":
        rows = RowPlan(
            message=parts["message"][:routed],
            slot=parts["slot"][:routed],
            group=parts["group"][:routed],
            row=parts["row"][:routed],
            counts=parts["counts"].view(config.num_local_experts, ranks).int(),
            group_sizes=parts["group_sizes"],
            row_offsets=parts["row_offsets"],
        )
    shared = None if start < 0 else range(start, stop)
    return CollectivePlan(messages, rows, parts["row_offsets"], parts["group_sizes"], shared, call)
