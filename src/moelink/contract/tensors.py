"""Tensors of a launch that the caller owns, and the checks that every launcher makes before it launches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moelink.contract.notes import Given
from moelink.errors import ArgumentError
from moelink.memory.layout import ALIGNMENT
from moelink.memory.protocol import PHASES

if TYPE_CHECKING:
    from moelink.contract.buffers import EPBuffers


@dataclass(frozen=True)
class TokenHandler:
    """Output tensors whose dtypes and shapes the dispatch format decides. Uninitialised; the caller's, call after call.

    Each begins at a multiple of 16 bytes, as torch allocates it.

    Attributes:
        output_tokens: [rows, width] of the payload dtype. Its rows are the capacity: other rows are dropped and
            counted.
        output_scales: scales in the format's layout, or None for formats without.
        scales_offsets: [G] int32 for 128x4 scale tiles (NVFP4, MXFP8), else None.
        weights: [rows] router weight of each row when ``router_weights`` go into dispatch, else None.
    """

    output_tokens: Tensor
    output_scales: Tensor | None = None
    scales_offsets: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def allocate(cls, ep: EPBuffers, *, rows: int | None = None, weighted: bool = False) -> TokenHandler:
        """New tensors for ``rows`` rows.

        The default is the worst case of any ids. Where those of each token are distinct, as the contract demands,
        ``ep.params.max_recv_tokens`` rows are enough.
        """
        config = ep.config
        fmt, count = config.format, config.max_rows if rows is None else rows
        shapes = _handler_shapes(ep, count)
        tokens = torch.empty(shapes["output_tokens"], dtype=fmt.payload_dtype, device=ep.device)
        scales = offsets = weights = None
        if fmt.scale_dtype is not None:
            scales = torch.empty(shapes["output_scales"], dtype=fmt.scale_dtype, device=ep.device)
        if "scales_offsets" in shapes:
            offsets = torch.empty(shapes["scales_offsets"], dtype=torch.int32, device=ep.device)
        if weighted:
            weights = torch.empty(count, dtype=config.weight_dtype, device=ep.device)
        return cls(tokens, scales, offsets, weights)

    def check(self, ep: EPBuffers) -> None:
        """Raise ArgumentError unless the tensors fit the parameters."""
        fmt, rows = ep.config.format, len(self.output_tokens)
        shapes = _handler_shapes(ep, rows)
        check_output(ep, "output_tokens", self.output_tokens, shapes["output_tokens"], fmt.payload_dtype)
        for name, dtype in (("output_scales", fmt.scale_dtype), ("scales_offsets", torch.int32)):
            value, shape = getattr(self, name), shapes.get(name)
            if (value is None) != (shape is None):
                expected = "None" if shape is None else f"a tensor {list(shape)}"
                raise ArgumentError(name, f"{expected} for format {fmt.name!r}", describe(value))
            if value is not None and shape is not None and dtype is not None:
                check_output(ep, name, value, shape, dtype)
        if self.weights is not None:
            check_output(ep, "weights", self.weights, (rows,), ep.config.weight_dtype)


def _handler_shapes(ep: EPBuffers, rows: int) -> dict[str, tuple[int, ...]]:
    config = ep.config
    fmt, hidden, groups = config.format, config.hidden_size, config.num_groups
    shapes: dict[str, tuple[int, ...]] = {"output_tokens": (rows, fmt.payload_width(hidden))}
    if fmt.scale_layout is not None:
        shapes["output_scales"] = fmt.scale_layout.shape(rows, fmt.scale_width(hidden), groups)
        if fmt.scale_layout.name == "tiles_128x4":
            shapes["scales_offsets"] = (groups,)
    return shapes


@dataclass(frozen=True)
class EPRouting:
    """The routing notes: written by dispatch, read by combine. The caller's, call after call.

    It stands where the contract keeps row ranges in its atomic counters: there the next dispatch overwrites them, here
    any dispatch can be combined later, as often as wanted. ``T`` = max_token_per_rank.

    Attributes:
        slot_of: [T, W] int32, message slot of each own token at each rank, -1 where it did not go.
        rows_of_message: [W, T, top_k] int32, output row of each top-k slot of each message; -1 not here, -2 dropped.
        message_token: [W, T] int32, source token of each message.
        received: [W + 1, 2] int32: messages and tokens of each source; then 1 if the call failed.
        counts: [L, n_ranks] int32, rows per (local expert, source rank), before capacity.
        num_recv_tokens: [] int32, routed rows in the output.
        overflow: [] int32, rows that did not fit it.
    """

    slot_of: Tensor
    rows_of_message: Tensor
    message_token: Tensor
    received: Tensor
    counts: Tensor
    num_recv_tokens: Tensor
    overflow: Tensor

    @classmethod
    def allocate(cls, ep: EPBuffers) -> EPRouting:
        """New tensors, zero."""
        shapes = _routing_shapes(ep)
        made = cls(**{name: torch.zeros(shape, dtype=torch.int32, device=ep.device) for name, shape in shapes.items()})
        ep.notes.forget(made.slot_of)
        return made

    def clone(self, ep: EPBuffers) -> EPRouting:
        """A copy in new tensors, which combine takes as it takes this one. (Copies made otherwise are refused.)"""
        made = EPRouting(**{field.name: getattr(self, field.name).clone() for field in fields(self)})
        ep.notes.copy(self.slot_of, made.slot_of)
        return made

    def check(self, ep: EPBuffers) -> None:
        """Raise ArgumentError unless the tensors fit the parameters."""
        for name, shape in _routing_shapes(ep).items():
            check_tensor(ep, f"routing.{name}", getattr(self, name), shape, torch.int32)


def _routing_shapes(ep: EPBuffers) -> dict[str, tuple[int, ...]]:
    config, ranks = ep.config, ep.workspace.world_size
    tokens = max(1, config.max_tokens_per_rank)
    return {
        "slot_of": (tokens, ranks),
        "rows_of_message": (ranks, tokens, config.topk),
        "message_token": (ranks, tokens),
        "received": (ranks + 1, 2),
        "counts": (config.num_local_experts, config.world_size),
        "num_recv_tokens": (),
        "overflow": (),
    }


def describe(value: object) -> str:
    """A tensor's shape, dtype and device, or a type's name."""
    if not isinstance(value, Tensor):
        return "None" if value is None else type(value).__name__
    return f"{list(value.shape)} {value.dtype} on {value.device}{'' if value.is_contiguous() else ', not contiguous'}"


def check_tensor(ep: EPBuffers, name: str, value: object, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ArgumentError unless ``value`` is a contiguous tensor of that shape and a dtype of these on ep's device."""
    fits = isinstance(value, Tensor) and tuple(value.shape) == shape and value.dtype in dtypes
    if not (fits and isinstance(value, Tensor) and value.is_contiguous() and value.device == ep.device):
        kinds = " or ".join(map(str, dtypes))
        raise ArgumentError(name, f"{list(shape)} {kinds}, contiguous, on {ep.device}", describe(value))


def check_output(ep: EPBuffers, name: str, value: object, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """:func:`check_tensor` of a tensor that dispatch fills: rows are stored in words of ALIGNMENT bytes."""
    check_tensor(ep, name, value, shape, *dtypes)
    past = value.data_ptr() % ALIGNMENT if isinstance(value, Tensor) else 0
    if past:
        expected = f"memory that begins at a multiple of {ALIGNMENT} bytes, as torch allocates it"
        raise ArgumentError(name, expected, f"an address {past} bytes past a multiple")


def check_pointers(ep: EPBuffers, group: int, pointers: Tensor) -> None:
    """Raise ArgumentError unless ``pointers`` is ``ep.pointers[group]`` itself: kernels store at these addresses.

    Addresses of the tables are compared, not their contents, because the host would have to wait for a device's.
    """
    check_tensor(ep, "pointers", pointers, tuple(ep.pointers.shape[1:]), torch.int64)
    address = pointers.data_ptr()
    if address != ep.pointers[group].data_ptr():
        of_other_group = address == ep.pointers[1 - group].data_ptr()
        got = f"ep.pointers[{1 - group}], of {PHASES[1 - group]}" if of_other_group else "a copy, or another ep's table"
        raise ArgumentError("pointers", f"ep.pointers[{group}], the table of {PHASES[group]}", got)


def check_counters(ep: EPBuffers, atomic_counters: Tensor) -> None:
    """Raise ArgumentError unless these are the counters that ``ep_init`` returned: by them kernels know where this
    rank's block is."""
    check_tensor(ep, "atomic_counters", atomic_counters, tuple(ep.atomic_counters[0].shape), torch.int64)
    if atomic_counters.data_ptr() != ep.atomic_counters[0].data_ptr():
        raise ArgumentError("atomic_counters", "the counters of these buffers (ep.atomic_counters)", "other ones")


def check_ids(ep: EPBuffers, topk_ids: Tensor) -> int:
    """Raise ArgumentError unless ``topk_ids`` fits; returns its number of tokens."""
    count = len(topk_ids) if isinstance(topk_ids, Tensor) and topk_ids.dim() else -1
    most = ep.params.max_token_per_rank
    if not 0 <= count <= most:
        raise ArgumentError("topk_ids", f"at most max_token_per_rank = {most} tokens", describe(topk_ids))
    check_tensor(ep, "topk_ids", topk_ids, (count, ep.params.top_k), torch.int32, torch.int64)
    return count


def check_num_tokens(name: str, num_tokens: int, given: Iterable[Given], *, where: str) -> None:
    """Raise ArgumentError unless the launch ``where`` was given so many tokens."""
    numbers = sorted({each.num_tokens for each in given})
    if num_tokens not in numbers:
        raise ArgumentError(name, f"{' or '.join(map(str, numbers))} tokens, as {where} was given", num_tokens)


def check_dispatched(ep: EPBuffers, routing: EPRouting, num_tokens: int | None = None) -> None:
    """Raise ArgumentError unless a dispatch of these buffers filled ``routing``, from ``num_tokens`` own tokens."""
    given = ep.notes.given("dispatch", routing.slot_of)
    if not given:
        expected = "one that a dispatch of these buffers has filled, or its clone()"
        raise ArgumentError("routing", expected, "one that none of them was given")
    if num_tokens is not None:
        check_num_tokens("topk_ids", num_tokens, given, where="the dispatch of this routing")
