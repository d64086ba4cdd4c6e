"""Run one rank's combine: choose its tensors, and launch the kernels that fill them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelink.hooks import Hook, evaluate_weights
from moelink.kernels.combine import kernel as kernels
from moelink.kernels.launch.constants import combine_spec
from moelink.kernels.launch.grid import combine_launch, combine_numbers
from moelink.kernels.launch.launcher import CompiledKernel
from moelink.kernels.launch.own_rows import with_own_rows
from moelink.kernels.records import CombineInputs, CombineNumbers, CombineOutputs
from moelink.output import Blank
from moelink.transports.base import CombineRequest
from moelink.transports.symmetric.rank import Rank


@dataclass(frozen=True)
class LaunchPlan:
    """All that combines of one kind have in common, decided once.

    Attributes:
        send, receive, both: the compiled kernels of the expert role, of the home role, and of both.
        sending, receiving, fused: the numbers that each of them gets, without the rows of y and the first slot of a
            pass.
        passes: first slot of each launch.
        travels: whether rows move, so that the expert role has work.
        out: the result, where the caller passes no ``out``.
        known: complete numbers, by CTAs, rows of y and first slot.
    """

    send: CompiledKernel
    receive: CompiledKernel
    both: CompiledKernel
    sending: CombineNumbers
    receiving: CombineNumbers
    fused: CombineNumbers
    passes: tuple[int, ...]
    travels: bool
    out: Blank
    known: dict[tuple[int, int, int], CombineNumbers] = field(default_factory=dict)

    @classmethod
    def of(
        cls, rank: Rank, *, num_tokens: int, reduce: bool, row_weights: bool, home_weights: bool, shared: bool,
        epilogue: str, hook: Any, raw_sums: bool, num_sms: int | None,
    ) -> LaunchPlan:  # fmt: skip
        """Return the launch plan of ``rank`` for ``num_tokens`` own tokens, within ``num_sms`` SMs; the others are as
        in :func:`combine_spec`."""
        config, workspace, kernel = rank.within(num_sms)
        spec = combine_spec(
            workspace, rank.device, reduce=reduce, row_weights=row_weights, home_weights=home_weights,
            shared=shared, epilogue=epilogue, hook=hook, raw_sums=raw_sums, tells_weighed=True,
        )  # fmt: skip
        spec = with_own_rows(rank.in_form(spec), workspace, rank.device)
        sums, stay = bool(spec.SENDS_SUMS), bool(spec.OWN_ROWS_STAY)
        launch = combine_launch(workspace, rank.device, num_tokens, sums=sums, own_rows_stay=stay)
        travels = not spec.ALLREDUCE
        senders = launch.send + spec.COLLECTORS if travels else 0
        slots = () if reduce else (config.topk,)
        dtype = config.accumulate_dtype if raw_sums else config.combine_dtype
        how: Any = {"S": spec, "launch": launch}
        numbers = combine_numbers(rank, num_tokens, spread=launch.spread, senders=senders)
        send = kernel(kernels.ep_combine_async_kernel, launch.send + spec.COLLECTORS, **how)
        receive = kernel(kernels.ep_combine_wait_kernel, launch.receive, **how)
        both = kernel(kernels.ep_fused_combine_kernel, senders + launch.receive, **how)
        return cls(
            send=send,
            receive=receive,
            both=both,
            sending=numbers._replace(programs=send.programs),
            receiving=numbers._replace(programs=receive.programs),
            fused=numbers._replace(programs=both.programs),
            passes=(0,) if reduce else tuple(range(0, config.topk, spec.ROWS_PER_TOKEN)),
            travels=travels,
            out=Blank.of(num_tokens, *slots, config.hidden_size, dtype=dtype),
        )


class Combine:
    """A combine of one rank: for each of ``passes``, :meth:`send` and then :meth:`receive`, or both in one launch.

    There is one pass, except for ``reduce=False`` when the workspace holds fewer rows per token than ``topk``.
    """

    def __init__(self, rank: Rank, request: CombineRequest) -> None:
        self.rank, self.request = rank, request
        weights, handle, epilogue = request.home_weights, request.recv.handle, request.epilogue
        hook, bias = (epilogue, None) if isinstance(epilogue, Hook) else (None, epilogue)
        self._torch_hook = hook if hook is not None and hook.triton_fn is None else None
        if request.topk_weights is not None:
            weights = evaluate_weights(
                weights, num_tokens=handle.num_tokens, topk=rank.config.topk, device=rank.device,
                dtype=rank.weight_dtype,
            )  # fmt: skip
        weights = None if weights is None else weights.contiguous()  # type: ignore[union-attr]
        if request.y.data_ptr() % 4:  # two elements of bf16 may be read as a word
            self.request = replace(request, y=request.y.clone())
        self.launch_plan = rank.plan(
            LaunchPlan.of,
            num_tokens=handle.num_tokens,
            reduce=request.reduce,
            row_weights=request.row_weights is not None,
            home_weights=weights is not None,
            shared=request.shared is not None,
            epilogue="" if bias is None else "bias" if bias.dim() == 1 else "residual",
            hook=hook.triton_fn if hook is not None and self._torch_hook is None else None,
            raw_sums=self._torch_hook is not None,
            num_sms=request.num_sms,
        )
        self.output = self._result(hook)
        self._hooked = hook.tensors if hook is not None and self._torch_hook is None else ()
        self._weights, self._bias = weights, bias

    @property
    def given(self) -> list[Tensor]:
        """The caller's tensors that kernels read or write."""
        request = self.request
        tensors = (
            request.y, request.row_weights, self._weights, request.recv.handle.topk_ids, request.shared, self._bias,
            self.output, *self._hooked,
        )  # fmt: skip
        return [tensor for tensor in tensors if tensor is not None]  # type: ignore[misc]

    def _records(self, typed: bool, *, home: bool = True) -> tuple[Any, ...]:
        """Return the records as a launch asks for them (:meth:`Launcher.launch`): those of both roles, or without the
        outputs of the home role."""
        request, nothing = self.request, self.rank.table
        handle = request.recv.handle
        fields = (request.y, request.row_weights, self._weights, handle.topk_ids, request.shared, self._bias)
        inputs = CombineInputs._make([nothing if field is None else field for field in fields])
        notes = handle.routing.parts if typed else handle.routing.addresses
        return (inputs, CombineOutputs(self.output, self._hooked or (nothing,)), notes) if home else (inputs, notes)

    def _numbers(self, numbers: CombineNumbers, slot_begin: int) -> CombineNumbers:
        """Return ``numbers`` completed for this call's rows and a pass."""
        key = (numbers.programs, self.request.y.shape[:-1].numel(), slot_begin)
        known = self.launch_plan.known
        if key not in known:
            known[key] = numbers._replace(y_rows=key[1], slot_begin=slot_begin)
        return known[key]

    @property
    def passes(self) -> tuple[int, ...]:
        """First slot of each launch."""
        return self.launch_plan.passes

    def _result(self, hook: Hook | None) -> Tensor:
        if self._torch_hook is None and self.request.out is not None:
            return self.request.out
        if self._torch_hook is None and hook is not None:
            return hook.tensors[0]
        return self.launch_plan.out.on(self.rank.device)

    def send(self, slot_begin: int) -> None:
        """Launch the expert role, ``send_tokens_back``."""
        plan = self.launch_plan
        if plan.travels:
            numbers = self._numbers(plan.sending, slot_begin)
            self.rank.launcher.launch(plan.send, partial(self._records, home=False), numbers, self.given)

    def receive(self, slot_begin: int) -> None:
        """Launch the home role."""
        plan = self.launch_plan
        self.rank.launcher.launch(plan.receive, self._records, self._numbers(plan.receiving, slot_begin), self.given)
        self.rank.has_received()

    def send_and_receive(self, slot_begin: int) -> None:
        """Launch both roles at once."""
        self.rank.launcher.launch(*self._fused(slot_begin))

    def _fused(self, slot_begin: int) -> tuple[Any, ...]:
        plan = self.launch_plan
        return plan.both, self._records, self._numbers(plan.fused, slot_begin), self.given

    def launches(self) -> list[tuple[Any, ...]]:
        """Return the arguments of the launches of both roles at once, as :meth:`Launcher.launch` takes them."""
        return [self._fused(slot) for slot in self.passes]

    def result(self) -> Tensor:
        """Return the result. An epilogue that exists only in torch runs here."""
        hook, total = self._torch_hook, self.output
        if hook is None:
            return total
        token = torch.arange(len(total), device=total.device)[:, None]
        columns = torch.arange(total.shape[1], device=total.device)[None, :]
        hook.torch_fn(hook.tensors, token, columns, total, torch.ones_like(total, dtype=torch.bool))
        return self.request.out if self.request.out is not None else hook.tensors[0]
