"""One rank's combine: its tensors, and the launches that fill them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelink.blank import Blank
from moelink.hooks import Hook, evaluate_weights
from moelink.kernels import combine as kernels
from moelink.kernels.combine_spec import CombineSpec, combine_spec
from moelink.kernels.cut import Launch, combine_launch, shared_bounds
from moelink.protocol import STATUS_ABORT, STATUS_OK
from moelink.transports.base import CombineRequest
from moelink.transports.symmetric.plan import SymmetricPlan
from moelink.transports.symmetric.rank import Rank

_EXACT = {"enable_fp_fusion": False}
"""Products are rounded before they are added."""


@dataclass(frozen=True)
class Recipe:
    """What all combines of one kind have in common, computed once.

    Attributes:
        spec: the kernel. passes: first slot of each launch.
        launch, options: how it is launched.
        shared: first and last + 1 own token of the fused shared expert's group.
        out: the result, where the caller gives none.
    """

    spec: CombineSpec
    passes: tuple[int, ...]
    launch: Launch
    options: dict[str, Any]
    shared: tuple[int, int]
    out: Blank

    @classmethod
    def of(cls, rank: Rank, num_tokens: int, *, reduce: bool, **kind: Any) -> Recipe:
        """The recipe of ``rank`` for ``num_tokens`` own tokens; ``kind`` as in :func:`combine_spec`."""

        def make() -> Recipe:
            config = rank.config
            spec = combine_spec(rank.workspace, rank.device, reduce=reduce, **kind)
            launch = combine_launch(config, rank.device, num_tokens)
            passes = (0,) if reduce else tuple(range(0, config.topk, spec.COPIES))
            slots = () if reduce else (config.topk,)
            dtype = config.accumulate_dtype if kind["raw_sums"] else config.combine_dtype
            out = Blank.of(num_tokens, *slots, config.hidden_size, dtype=dtype)
            return cls(spec, passes, launch, {**launch.options, **_EXACT}, shared_bounds(config, num_tokens), out)

        return rank.once((cls, num_tokens, reduce, *kind.values()), make)


class Combine:
    """A combine of one rank: for each of ``passes``, :meth:`send` and then :meth:`receive`, or both in one launch.

    There is one pass, but for ``reduce=False`` when the workspace holds fewer rows per token than ``topk``.
    """

    def __init__(self, rank: Rank, request: CombineRequest) -> None:
        config, handle = rank.config, request.recv.handle
        self.rank, self.request = rank, request
        hook = request.epilogue if isinstance(request.epilogue, Hook) else None
        self._torch_hook = hook if hook is not None and hook.triton_fn is None else None
        bias = request.epilogue if isinstance(request.epilogue, Tensor) else None
        home_weights = handle.topk_weights
        if request.topk_weights is not None:
            home_weights = evaluate_weights(
                request.topk_weights,
                num_tokens=handle.num_tokens,
                topk=config.topk,
                device=rank.device,
                dtype=config.weight_dtype,
            )
        home_weights = None if home_weights is None else home_weights.contiguous()
        row_weights = request.recv.weights
        self.recipe = Recipe.of(
            rank,
            handle.num_tokens,
            reduce=request.reduce,
            row_weights=row_weights is not None,
            home_weights=home_weights is not None,
            shared=request.shared is not None,
            epilogue="" if bias is None else "bias" if bias.dim() == 1 else "residual",
            hook=hook.triton_fn if hook is not None and self._torch_hook is None else None,
            raw_sums=self._torch_hook is not None,
        )
        self.out = self._result(hook)
        plan: SymmetricPlan = handle.plan
        tensors = hook.tensors if hook is not None and self._torch_hook is None else ()
        y, y_rows = request.y, request.y.shape[0]
        weights = rank.optional(row_weights)
        self._back = (y, weights, plan.rows_of_message, plan.message_token, plan.received, rank.me, y_rows)
        rows = (y, weights, rank.optional(home_weights), handle.topk_ids, plan.slot_of, plan.rows_of_message)
        rest = (
            plan.received, self.out, rank.optional(request.shared), rank.optional(bias), tensors or (rank.table,),
            rank.me, rank.first, config.num_local_experts, handle.num_tokens, y_rows, *self.recipe.shared,
        )  # fmt: skip
        mine = (y, row_weights, home_weights, handle.topk_ids, request.shared, bias, self.out, *tensors)
        self._given = [t for t in mine if t is not None]
        self._home, self._fused = (*rows, *rest), (*rows, plan.message_token, *rest)

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

    @property
    def travels(self) -> bool:
        """Rows move, so the expert role has something to do."""
        return not self.recipe.spec.ALLREDUCE

    def send(self, slot_begin: int) -> None:
        """Launch the expert role: ``send_tokens_back``."""
        if self.travels:
            self.rank.launch(
                kernels.ep_combine_async_kernel, self.recipe.launch.send, *self._back, slot_begin,
                self.recipe.launch.spread, STATUS_OK, self.rank.limit, given=self._given, S=self.recipe.spec,
                options=self.recipe.options, resident=self.recipe.launch.resident,
            )  # fmt: skip

    def receive(self, slot_begin: int) -> None:
        """Launch the home role."""
        self.rank.launch(
            kernels.ep_combine_wait_kernel, self.recipe.launch.receive, *self._home, slot_begin, STATUS_OK,
            self.rank.limit, given=self._given, S=self.recipe.spec, options=self.recipe.options,
            resident=self.recipe.launch.resident,
        )  # fmt: skip
        self.rank.tell_drained()

    def send_and_receive(self, slot_begin: int) -> None:
        """Launch both roles at once."""
        senders = self.recipe.launch.send if self.travels else 0
        self.rank.launch(
            kernels.ep_fused_combine_kernel, senders + self.recipe.launch.receive, *self._fused, slot_begin,
            self.recipe.launch.spread, STATUS_OK, senders, self.rank.limit, given=self._given, S=self.recipe.spec,
            options=self.recipe.options, resident=self.recipe.launch.resident,
        )  # fmt: skip

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
    options = {**combine_launch(rank.config, rank.device, 0).options, **_EXACT}
    dummy = rank.nothing
    rank.launch(
        kernels.ep_combine_async_kernel, 1, *[dummy] * 5, rank.me, 0, 0, 1, STATUS_ABORT, rank.limit, S=spec,
        options=options,
    )  # fmt: skip
    rank.launch(
        kernels.ep_combine_wait_kernel, 1, *[dummy] * 10, (dummy,), rank.me, rank.first,
        rank.config.num_local_experts, 0, 0, 0, 0, 0, STATUS_ABORT, rank.limit, S=spec, options=options,
    )  # fmt: skip
    rank.tell_drained()
