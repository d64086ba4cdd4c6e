"""One rank's combine: its tensors, and the launches that fill them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelink.hooks import Hook, evaluate_weights
from moelink.kernels.combine import kernel as kernels
from moelink.kernels.launch.combine_constants import combine_spec
from moelink.kernels.launch.grid import combine_launch, shared_bounds
from moelink.memory.protocol import STATUS_ABORT, STATUS_OK
from moelink.output import Blank
from moelink.transports.base import CombineRequest
from moelink.transports.symmetric.notes import Parts, SymmetricPlan
from moelink.transports.symmetric.program import Program
from moelink.transports.symmetric.rank import Rank

_EXACT = {"enable_fp_fusion": False}
"""Products are rounded before they are added."""


@dataclass(frozen=True)
class Recipe:
    """What all combines of one kind have in common, computed once.

    Attributes:
        send, receive, both: the kernels. passes: first slot of each launch. travels: rows move, so the expert role has
            something to do.
        first, last: the numbers among the home role's arguments, before and after the rows of y.
        spread, senders: of the expert role.
        out: the result, where the caller gives none.
    """

    send: Program
    receive: Program
    both: Program
    passes: tuple[int, ...]
    travels: bool
    first: tuple[int, ...]
    last: tuple[int, ...]
    spread: int
    senders: int
    out: Blank

    @classmethod
    def of(
        cls, rank: Rank, num_tokens: int, reduce: bool, row_weights: bool, home_weights: bool, shared: bool,
        epilogue: str, hook: Any, raw_sums: bool,
    ) -> Recipe:  # fmt: skip
        """The recipe of ``rank`` for ``num_tokens`` own tokens; the others as in :func:`combine_spec`."""
        config = rank.config
        spec = combine_spec(
            rank.workspace, rank.device, reduce=reduce, row_weights=row_weights, home_weights=home_weights,
            shared=shared, epilogue=epilogue, hook=hook, raw_sums=raw_sums,
        )  # fmt: skip
        launch = combine_launch(rank.workspace, rank.device, num_tokens, sums=bool(spec.SUMS))
        travels = not spec.ALLREDUCE
        senders = launch.send if travels else 0
        slots = () if reduce else (config.topk,)
        dtype = config.accumulate_dtype if raw_sums else config.combine_dtype
        how: Any = {"S": spec, "launch": launch, **_EXACT}
        return cls(
            send=rank.program(kernels.ep_combine_async_kernel, launch.send, **how),
            receive=rank.program(kernels.ep_combine_wait_kernel, launch.receive, **how),
            both=rank.program(kernels.ep_fused_combine_kernel, senders + launch.receive, **how),
            passes=(0,) if reduce else tuple(range(0, config.topk, spec.COPIES)),
            travels=travels,
            first=(rank.me, rank.first, config.num_local_experts, num_tokens),
            last=shared_bounds(config, num_tokens),
            spread=launch.spread,
            senders=senders,
            out=Blank.of(num_tokens, *slots, config.hidden_size, dtype=dtype),
        )


class Combine:
    """A combine of one rank: for each of ``passes``, :meth:`send` and then :meth:`receive`, or both in one launch.

    There is one pass, but for ``reduce=False`` when the workspace holds fewer rows per token than ``topk``.
    """

    def __init__(self, rank: Rank, request: CombineRequest) -> None:
        recv, epilogue, weights, shared = request.recv, request.epilogue, request.topk_weights, request.shared
        handle = recv.handle
        self.rank, self.request = rank, request
        hook, bias = (epilogue, None) if isinstance(epilogue, Hook) else (None, epilogue)
        self._torch_hook = hook if hook is not None and hook.triton_fn is None else None
        if weights is None:
            weights = handle.topk_weights
        else:
            weights = evaluate_weights(
                weights, num_tokens=handle.num_tokens, topk=rank.config.topk, device=rank.device,
                dtype=rank.weight_dtype,
            )  # fmt: skip
        weights = None if weights is None else weights.contiguous()
        self.recipe = rank.recipe(
            Recipe, handle.num_tokens, request.reduce, recv.weights is not None, weights is not None,
            shared is not None, "" if bias is None else "bias" if bias.dim() == 1 else "residual",
            hook.triton_fn if hook is not None and self._torch_hook is None else None, self._torch_hook is not None,
        )  # fmt: skip
        self.out = self._result(hook)
        self._hooked = hook.tensors if hook is not None and self._torch_hook is None else ()
        self._weights, self._bias = weights, bias
        mine = (request.y, recv.weights, weights, handle.topk_ids, shared, bias, self.out, *self._hooked)
        self._given = [t for t in mine if t is not None]

    def _parts(self, typed: bool) -> Parts:
        plan: SymmetricPlan = self.request.recv.handle.plan
        return plan.given(typed)

    def _rows(self) -> tuple[Any, Any]:
        """Rows and their weights."""
        weights = self.request.recv.weights
        return self.request.y, self.rank.table if weights is None else weights

    def _sent(self, typed: bool) -> tuple[Any, ...]:
        parts = self._parts(typed)
        return (*self._rows(), parts.rows_of_message, parts.message_token, parts.received)

    def _home(self, typed: bool, *, fused: bool = False) -> tuple[Any, ...]:
        """Tensors of the home role; ``fused``: with what the expert role takes besides."""
        request, nothing, parts = self.request, self.rank.table, self._parts(typed)
        weights, shared, bias = self._weights, request.shared, self._bias
        return (
            *self._rows(), nothing if weights is None else weights, request.recv.handle.topk_ids, parts.slot_of,
            parts.rows_of_message, *((parts.message_token,) if fused else ()), parts.received, self.out,
            nothing if shared is None else shared, nothing if bias is None else bias, self._hooked or (nothing,),
        )  # fmt: skip

    def _both(self, typed: bool) -> tuple[Any, ...]:
        return self._home(typed, fused=True)

    @property
    def passes(self) -> tuple[int, ...]:
        """First slot of each launch."""
        return self.recipe.passes

    def _result(self, hook: Hook | None) -> Tensor:
        if self._torch_hook is None and self.request.out is not None:
            return self.request.out
        if self._torch_hook is None and hook is not None:
            return hook.tensors[0]
        return self.recipe.out.on(self.rank.device)

    def send(self, slot_begin: int) -> None:
        """Launch the expert role: ``send_tokens_back``."""
        rank, recipe = self.rank, self.recipe
        if recipe.travels:
            numbers = (rank.me, self.request.y.shape[0], slot_begin, recipe.spread, STATUS_OK, rank.limit)
            rank.launch(recipe.send, self._sent, numbers, self._given)

    def receive(self, slot_begin: int) -> None:
        """Launch the home role."""
        rank, recipe = self.rank, self.recipe
        numbers = (*recipe.first, self.request.y.shape[0], *recipe.last, slot_begin, STATUS_OK, rank.limit)
        rank.launch(recipe.receive, self._home, numbers, self._given)
        rank.tell_drained()

    def send_and_receive(self, slot_begin: int) -> None:
        """Launch both roles at once."""
        rank, recipe = self.rank, self.recipe
        numbers = (
            *recipe.first, self.request.y.shape[0], *recipe.last, slot_begin, recipe.spread, STATUS_OK, recipe.senders,
            rank.limit,
        )  # fmt: skip
        rank.launch(recipe.both, self._both, numbers, self._given)

    def result(self) -> Tensor:
        """The result, after an epilogue that is only there in torch."""
        hook, total = self._torch_hook, self.out
        if hook is None:
            return total
        token = torch.arange(len(total), device=total.device)[:, None]
        columns = torch.arange(total.shape[1], device=total.device)[None, :]
        hook.torch_fn(hook.tensors, token, columns, total, torch.ones_like(total, dtype=torch.bool))
        return self.request.out if self.request.out is not None else hook.tensors[0]


def refuse_combine(rank: Rank) -> None:
    """Take part in a combine with nothing but the word that this rank refused it."""
    spec = combine_spec(rank.workspace, rank.device, row_weights=False, home_weights=False)
    if spec.ALLREDUCE:
        return
    how: Any = {"S": spec, "launch": combine_launch(rank.workspace, rank.device, 0, sums=True), **_EXACT}
    dummy = rank.nothing
    rank.launch(
        rank.program(kernels.ep_combine_async_kernel, 1, **how), lambda _: [dummy] * 5,
        (rank.me, 0, 0, 1, STATUS_ABORT, rank.limit),
    )  # fmt: skip
    rank.launch(
        rank.program(kernels.ep_combine_wait_kernel, 1, **how), lambda _: (*[dummy] * 10, (dummy,)),
        (rank.me, rank.first, rank.config.num_local_experts, 0, 0, 0, 0, 0, STATUS_ABORT, rank.limit),
    )  # fmt: skip
    rank.tell_drained()
