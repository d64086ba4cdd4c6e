"""One process that drives all ranks of a node: the contract's multi-device operations, for every format.

Every argument but ``ep`` is that of the launcher of one device, as a list with one entry per device. On GPUs each
device gets one fused launch, all of them before the host waits for any. CPUs, and ranks that share a GPU, run launches
one after the other, so there every rank's first half runs before any second half. The arguments of all devices are
checked before the first launch: when one is refused, no device has launched anything, and the next call works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moelink.contract.buffers import EPBuffers
from moelink.contract.combine import ep_combine_async, ep_combine_wait, ep_fused_combine
from moelink.contract.dispatch import ep_dispatch_async, ep_dispatch_wait, ep_fused_dispatch, require_weights
from moelink.contract.launch import Prepared
from moelink.contract.tensors import EPRouting, TokenHandler
from moelink.errors import ArgumentError
from moelink.hooks import Hook
from moelink.kernels.launch.device import launches_overlap
from moelink.memory import SingleProcessMemory


def distributed_ep_dispatch(
    ep: Sequence[EPBuffers],
    token_handler: Sequence[TokenHandler],
    row_offsets: Sequence[Tensor],
    expert_ids: Sequence[Tensor | None],
    src_info: Sequence[Tensor],
    atomic_counters: Sequence[Tensor],
    input_tokens: Sequence[Tensor],
    topk_ids: Sequence[Tensor],
    pointers: Sequence[Tensor],
    routing: Sequence[EPRouting],
    *,
    router_weights: Sequence[Tensor] | None = None,
    input_scales: Sequence[Tensor] | None = None,
) -> None:
    """:func:`~moelink.contract.ep_fused_dispatch` on all devices of this process at once.

    Raises:
        ArgumentError: an ``ep`` is missing or twice in the list, or over blocks of its own, lists have different
            lengths, or what a launcher refuses; nothing was launched on any device.
    """
    each = _by_device(
        ep, token_handler=token_handler, row_offsets=row_offsets, expert_ids=expert_ids, src_info=src_info,
        atomic_counters=atomic_counters, input_tokens=input_tokens, topk_ids=topk_ids, pointers=pointers,
        routing=routing, router_weights=router_weights, input_scales=input_scales,
    )  # fmt: skip
    if launches_overlap([one.device for one in ep]):
        _start(ep, [ep_fused_dispatch.prepare(one, **given) for one, given in zip(ep, each, strict=True)])
        return
    first = _prepared(ep_dispatch_async, ep, each)
    second = _prepared(
        ep_dispatch_wait, ep, [{**given, "num_input_tokens": len(given["input_tokens"])} for given in each]
    )
    for given in each:
        require_weights(given["token_handler"], given["router_weights"] is not None, because="router_weights")
    _start(ep, first)
    _start(ep, second, in_turn=True)


def distributed_ep_combine(
    ep: Sequence[EPBuffers],
    output_tokens: Sequence[Tensor],
    atomic_counters: Sequence[Tensor],
    input_tokens: Sequence[Tensor],
    routing: Sequence[EPRouting],
    pointers: Sequence[Tensor],
    topk_ids: Sequence[Tensor],
    *,
    router_weights: Sequence[Tensor] | None = None,
    row_weights: Sequence[Tensor] | None = None,
    shared: Sequence[Tensor] | None = None,
    epilogue_fn: Sequence[Tensor | Hook] | None = None,
) -> None:
    """:func:`~moelink.contract.ep_fused_combine` on all devices of this process at once.

    Raises:
        ArgumentError: an ``ep`` is missing or twice in the list, or over blocks of its own, lists have different
            lengths, or what a launcher refuses; nothing was launched on any device.
    """
    each = _by_device(
        ep, output_tokens=output_tokens, atomic_counters=atomic_counters, input_tokens=input_tokens, routing=routing,
        pointers=pointers, topk_ids=topk_ids, router_weights=router_weights, row_weights=row_weights, shared=shared,
        epilogue_fn=epilogue_fn,
    )  # fmt: skip
    if launches_overlap([one.device for one in ep]):
        _start(ep, [ep_fused_combine.prepare(one, **given) for one, given in zip(ep, each, strict=True)])
        return
    first, second = _prepared(ep_combine_async, ep, each), _prepared(ep_combine_wait, ep, each)
    _start(ep, first)
    _start(ep, second, in_turn=True)


def _prepared(launcher: Any, ep: Sequence[EPBuffers], each: Sequence[dict[str, Any]]) -> list[Prepared]:
    """Prepare ``launcher`` on each device with those of its arguments that it takes."""
    names = launcher.__signature__.parameters
    taken = ({name: value for name, value in given.items() if name in names} for given in each)
    return [launcher.prepare(one, **given) for one, given in zip(ep, taken, strict=True)]


def _start(ep: Sequence[EPBuffers], prepared: Sequence[Prepared], *, in_turn: bool = False) -> None:
    """Launch on each device, once the arguments of all are checked.

    Before that compile all that is not compiled yet: to load a kernel may synchronise a device, where a kernel that
    runs already would wait for one that this process has not launched.
    """
    if len(ep) > 1 and ep[0].device.type == "cuda":
        for each, start in zip(ep, prepared, strict=True):
            with each.launcher.preparing():
                start(in_turn=in_turn)
    for start in prepared:
        start(in_turn=in_turn)


def _check_ranks(ep: Sequence[EPBuffers]) -> int:
    """Return how many devices there are; ArgumentError unless each rank is there once.

    Where nothing travels (``skip_a2a``) no rank waits for another, and a part of the ranks will do.
    """
    if isinstance(ep, EPBuffers) or not ep or not all(isinstance(each, EPBuffers) for each in ep):
        raise ArgumentError("ep", "a list of what ep_init returned, one per device", type(ep).__name__)
    params, ranks = ep[0].params, [each.my_rank for each in ep]
    if any(each.params != params for each in ep):
        raise ArgumentError("ep", "buffers of equal EPParams", "different ones")
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        got = f"rank {twice[0]} {ranks.count(twice[0])} times; pass what each rank's own ep_init returned"
        raise ArgumentError("ep", "each rank once", got)
    missing = sorted(set(range(params.n_ranks)) - set(ranks))
    if missing and not params.skip_a2a:
        names = ", ".join(map(str, missing))
        raise ArgumentError(
            "ep",
            f"all {params.n_ranks} ranks, because each waits for the others",
            f"{len(ranks)}, without rank {names}; with a process per device call ep_fused_dispatch and "
            "ep_fused_combine there",
        )
    if not params.skip_a2a:
        _check_blocks(ep)
    return len(ranks)


def _check_blocks(ep: Sequence[EPBuffers]) -> None:
    """Raise ArgumentError where ranks of this process see different blocks: they would wait for one another."""
    first = ep[0]
    for each in ep:
        if isinstance(each.memory, SingleProcessMemory) and each.memory.peer(first.my_rank) is not first.memory.local:
            raise ArgumentError(
                "ep",
                "ranks over the same blocks",
                f"rank {each.my_rank} over other blocks than rank {first.my_rank}; call create_all once, with the "
                "devices of all ranks",
            )


def _spread(name: str, values: Sequence[object] | None, count: int) -> list[Any]:
    """One entry per device; None stands for None everywhere."""
    if values is None:
        return [None] * count
    if isinstance(values, Tensor) or len(values) != count:
        raise ArgumentError(name, f"a list of {count} entries, one per device", type(values).__name__)
    return list(values)


def _by_device(ep: Sequence[EPBuffers], **arguments: Sequence[object] | None) -> list[dict[str, Any]]:
    """Return the arguments of each device by name, once the ranks are checked."""
    count = _check_ranks(ep)
    lists = [_spread(name, values, count) for name, values in arguments.items()]
    return [dict(zip(arguments, values, strict=True)) for values in zip(*lists, strict=True)]
