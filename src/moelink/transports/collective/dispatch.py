"""Dispatch on one rank: quantise, send one message per (token, destination rank), group received rows by expert."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.formats import Quantized
from moelink.hooks import evaluate_input_scale, evaluate_weights
from moelink.memory.layout import DispatchMessage, as_bytes
from moelink.memory.protocol import dispatch_options
from moelink.output import DispatchHandle, DispatchOutput, version_at_dispatch
from moelink.routing import ExpertMap, plan_sends
from moelink.transports.base import DispatchRequest
from moelink.transports.collective.outputs import Scratch, fill_output
from moelink.transports.collective.plan import CollectivePlan, Messages, complete_plan, expert_counts
from moelink.transports.collective.sums import gather_rows
from moelink.transports.collective.wire import Announce, BadMessageError, Learn, Steps, Transfer


def dispatch_steps(
    config: EPConfig, request: DispatchRequest, scratch: Scratch, *, identity: str, absent: Tensor, masked: bool = False
) -> Steps[DispatchOutput]:
    """Dispatch on one rank. In allreduce mode nothing is yielded, so nothing travels.

    ``absent``: [num_experts] bool, the experts of masked ranks, if any are ``masked``. Their ids act as -1.
    """
    num_tokens, capacity = len(request.x), request.output_rows(config)
    weights = evaluate_weights(
        request.topk_weights,
        num_tokens=num_tokens,
        topk=config.topk,
        device=request.x.device,
        dtype=config.weight_dtype,
    )
    cached: CollectivePlan | None = request.routing.handle.routing if request.routing is not None else None
    message = DispatchMessage(
        config.format,
        config.hidden_size,
        config.topk,
        with_ids=cached is None,
        weight_dtype=None if weights is None else config.weight_dtype,
    )
    bad = (request.topk_ids < -1) | (request.topk_ids >= config.num_experts)
    ids = request.topk_ids.masked_fill(bad, -1)
    if masked and config.mode == "alltoall":
        ids = ids.masked_fill((ids >= 0) & absent[ids.clamp(min=0).long()], -1)
    experts = ExpertMap(config.num_experts, config.world_size)
    call = 0
    if config.mode == "alltoall":
        if cached is None:
            sends = plan_sends(ids, experts)
            send_tokens, send_counts = sends.tokens, sends.counts.tolist()
        else:
            send_tokens, send_counts = cached.messages.send_tokens, cached.messages.send_counts
        number = yield Announce(
            dispatch_options(message.weight_dtype is not None, not message.with_ids),
            send_counts,
            limit=config.max_tokens_per_rank,
            row_bytes=message.nbytes,
            origin=0 if cached is None else cached.messages.call,
        )
        assert isinstance(number, int)
        call = number
    own = _messages(config, request, message, ids, weights, scratch)
    if config.mode == "allreduce":
        kept = _keep_own(config, ids, bad.sum())
        plan = cached or complete_plan(config, kept, num_tokens=num_tokens, capacity=capacity)
        received = _gather(own, plan.messages.tokens, "received", scratch, spare_rows=1)
    else:
        rows = _gather(own, send_tokens, "sent", scratch)
        if message.with_ids:
            for rank, block in enumerate(message.field(rows, "ids").split(send_counts)):
                block.copy_(experts.local(block, rank))
        recv_counts = yield Learn()
        assert isinstance(recv_counts, list)
        if cached is not None:
            _check_counts(recv_counts, cached.messages.recv_counts)
        into = scratch.take("received", sum(recv_counts) + 1, message.nbytes, own.device)
        moved = yield Transfer(rows, send_counts, recv_counts, into)
        assert isinstance(moved, Tensor)
        received = moved
        if cached is None:
            messages = _read(config, message, received, send_tokens, send_counts, recv_counts, bad.sum(), call)
            plan = complete_plan(config, messages, num_tokens=num_tokens, capacity=capacity)
        else:
            plan = dataclasses.replace(cached, call=call)
    handle = DispatchHandle(
        owner=identity,
        rank=config.rank,
        num_tokens=num_tokens,
        topk_ids=request.topk_ids,
        topk_weights=weights,
        counts=expert_counts(config, plan),
        routing=plan,
        ids_version=version_at_dispatch(request.topk_ids),
        first_id=experts.first(config.rank) if config.global_ids else 0,
        absent=absent,
    )
    return fill_output(
        config,
        plan,
        message,
        received=received,
        own=own,
        handle=handle,
        capacity=capacity,
        host_counts=request.host_counts,
        out=request.out,
    )


def _messages(
    config: EPConfig,
    request: DispatchRequest,
    message: DispatchMessage,
    ids: Tensor,
    weights: Tensor | None,
    scratch: Scratch,
) -> Tensor:
    """Build one message per own token, with global expert ids: [T, message bytes] uint8."""
    if request.scales is not None:
        rows = Quantized(request.x, request.scales)
    else:
        rows = config.format.quantize(request.x, evaluate_input_scale(request.input_scale))
    buffer = scratch.take("own", len(request.x), message.nbytes, request.x.device)
    message.field(buffer, "payload").copy_(as_bytes(rows.payload))
    if rows.scales is not None:
        message.field(buffer, "scales").copy_(as_bytes(rows.scales))
    if message.with_ids:
        message.field(buffer, "token")[:, 0] = torch.arange(len(buffer), device=buffer.device, dtype=torch.int32)
        message.field(buffer, "ids").copy_(ids)
    if weights is not None:
        message.field(buffer, "weights").copy_(weights)
    return buffer


def _read(
    config: EPConfig,
    message: DispatchMessage,
    received: Tensor,
    send_tokens: Tensor,
    send_counts: list[int],
    recv_counts: list[int],
    invalid: Tensor,
    call: int,
) -> Messages:
    """Read the received messages. Every index from the wire is checked before it is used."""
    tokens = message.field(received, "token")[: sum(recv_counts), 0].long()
    local_ids = message.field(received, "ids")[: sum(recv_counts)].clone()
    sources = torch.repeat_interleave(torch.tensor(recv_counts, device="cpu")).to(received.device)
    bad = (tokens < 0) | (tokens >= config.max_tokens_per_rank)
    bad |= ((local_ids < -1) | (local_ids >= config.num_local_experts)).any(1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise BadMessageError(
            int(sources[first]),
            f"tokens in [0, {config.max_tokens_per_rank}) and local experts in [-1, {config.num_local_experts})",
            f"token {int(tokens[first])} with experts {local_ids[first].tolist()}",
        )
    return Messages(send_tokens, send_counts, recv_counts, tokens, sources, local_ids, invalid, call)


def _check_counts(got: list[int], expected: list[int]) -> None:
    """A routing that is used again must bring as many messages as it did."""
    for source, (announced, before) in enumerate(zip(got, expected, strict=True)):
        if announced != before:
            raise BadMessageError(source, f"the {before} messages of the reused routing", f"{announced}")


def _keep_own(config: EPConfig, ids: Tensor, invalid: Tensor) -> Messages:
    """Allreduce mode: the tokens that name this rank's experts are its messages."""
    local_ids = ExpertMap(config.num_experts, config.world_size).local(ids, config.rank).int()
    tokens = (local_ids >= 0).any(1).nonzero().squeeze(1)
    counts = [0] * config.world_size
    counts[config.rank] = len(tokens)
    sources = torch.full_like(tokens, config.rank)
    return Messages(tokens, counts, counts, tokens, sources, local_ids[tokens], invalid, call=0)


def _gather(own: Tensor, tokens: Tensor, name: str, scratch: Scratch, spare_rows: int = 0) -> Tensor:
    rows = scratch.take(name, len(tokens) + spare_rows, own.shape[1], own.device)
    gather_rows(own, tokens, rows[: len(tokens)])
    return rows
