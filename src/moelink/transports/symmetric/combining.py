"""One rank's combine: its tensors, and the launches that fill them."""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.hooks import Hook, evaluate_weights
from moelink.kernels import combine as kernels
from moelink.kernels.cut import combine_launch, shared_bounds
from moelink.kernels.spec import combine_spec
from moelink.protocol import STATUS_ABORT, STATUS_OK
from moelink.transports.base import CombineRequest
from moelink.transports.symmetric.plan import SymmetricPlan
from moelink.transports.symmetric.rank import Rank

_EXACT = {"enable_fp_fusion": False}
"""Products are rounded before they are added."""


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
        self.spec = combine_spec(
            rank.workspace,
            rank.device,
            row_weights=request.recv.weights is not None,
            home_weights=home_weights is not None,
            reduce=request.reduce,
            shared=request.shared is not None,
            epilogue="" if bias is None else "bias" if bias.dim() == 1 else "residual",
            hook=hook.triton_fn if hook is not None and self._torch_hook is None else None,
            raw_sums=self._torch_hook is not None,
        )
        self.passes = [0] if request.reduce else list(range(0, config.topk, self.spec.COPIES))
        self.out = self._result(hook)
        plan: SymmetricPlan = handle.plan
        tensors = hook.tensors if hook is not None and self._torch_hook is None else ()
        row_weights = rank.optional(request.recv.weights)
        self._launch = combine_launch(config, rank.device, handle.num_tokens)
        self._options = {**self._launch.options, **_EXACT}
        self._back = (
            request.y, row_weights, plan.rows_of_message, plan.message_token, plan.received, rank.me, len(request.y)
        )  # fmt: skip
        rows = (
            request.y,
            row_weights,
            rank.optional(home_weights),
            handle.topk_ids,
            plan.slot_of,
            plan.rows_of_message,
        )
        ends = (self.out, rank.optional(request.shared), rank.optional(bias), tensors or (rank.table,))
        sizes = (
            rank.me, rank.first, config.num_local_experts, handle.num_tokens, len(request.y),
            *shared_bounds(config, handle.num_tokens),
        )  # fmt: skip
        mine = (
            request.y,
            request.recv.weights,
            home_weights,
            handle.topk_ids,
            request.shared,
            bias,
            self.out,
            *tensors,
        )
        self._given = tuple(t for t in mine if t is not None)
        self._home = (*rows, plan.received, *ends, *sizes)
        self._fused = (*rows, plan.message_token, plan.received, *ends, *sizes)

    def _result(self, hook: Hook | None) -> Tensor:
        config, request = self.rank.config, self.request
        if self._torch_hook is None and request.out is not None:
            return request.out
        if self._torch_hook is None and hook is not None:
            return hook.tensors[0]
        shape = [request.recv.handle.num_tokens, config.hidden_size]
        if not request.reduce:
            shape.insert(1, config.topk)
        dtype = config.combine_dtype if self._torch_hook is None else config.accumulate_dtype
        return torch.empty(shape, dtype=dtype, device=self.rank.device)

    @property
    def travels(self) -> bool:
        """Rows move, so the expert role has something to do."""
        return not self.spec.ALLREDUCE

    def send(self, slot_begin: int) -> None:
        """Launch the expert role: ``send_tokens_back``."""
        if self.travels:
            self.rank.launch(
                kernels.ep_combine_async_kernel, self._launch.send, *self._back, slot_begin, STATUS_OK, self.rank.limit,
                given=self._given, S=self.spec, options=self._options,
            )  # fmt: skip

    def receive(self, slot_begin: int) -> None:
        """Launch the home role."""
        self.rank.launch(
            kernels.ep_combine_wait_kernel, self._launch.receive, *self._home, slot_begin, STATUS_OK,
            self.rank.limit, given=self._given, S=self.spec, options=self._options,
        )  # fmt: skip

    def send_and_receive(self, slot_begin: int) -> None:
        """Launch both roles at once."""
        senders = self._launch.send if self.travels else 0
        self.rank.launch(
            kernels.ep_fused_combine_kernel, senders + self._launch.receive, *self._fused, slot_begin,
            STATUS_OK, senders, self.rank.limit, given=self._given, S=self.spec, options=self._options,
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
        kernels.ep_combine_async_kernel, 1, *[dummy] * 5, rank.me, 0, 0, STATUS_ABORT, rank.limit, S=spec,
        options=options,
    )  # fmt: skip
    rank.launch(
        kernels.ep_combine_wait_kernel, 1, *[dummy] * 10, (dummy,), rank.me, rank.first,
        rank.config.num_local_experts, 0, 0, 0, 0, 0, STATUS_ABORT, rank.limit, S=spec, options=options,
    )  # fmt: skip
