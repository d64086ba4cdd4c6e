"""vLLM's prepare and finalize over moelink's dispatch and combine, layout "rank". Importing this needs vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moelink.integrations.versions import require

require("vllm")  # before anything of it is subclassed

import torch  # noqa: E402
import vllm.model_executor.layers.fused_moe.modular_kernel as mk  # noqa: E402
from torch import Tensor  # noqa: E402
from vllm.config import get_current_vllm_config_or_none  # noqa: E402
from vllm.distributed import get_ep_group  # noqa: E402
from vllm.forward_context import get_forward_context, is_forward_context_available  # noqa: E402
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (  # noqa: E402
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input  # noqa: E402
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used  # noqa: E402
from vllm.v1.worker.ubatching import dbo_current_ubatch_id  # noqa: E402

import moelink  # noqa: E402
from moelink.errors import ArgumentError, StateError, UnsupportedError  # noqa: E402
from moelink.integrations.settings import Settings, device_of  # noqa: E402
from moelink.integrations.vllm.settings import (  # noqa: E402
    COMMUNICATORS,
    Parallelism,
    Quantization,
    Rows,
    bound_of,
    init_arguments,
    refuse,
    rows_by_expert,
    rows_of,
    takes_local_ids,
    without_gaps,
)


def make(fused_experts: Any, settings: Settings) -> MoelinkPrepareAndFinalize:
    """Return the prepare and finalize of a layer's experts.

    Args:
        fused_experts: the layer's ``FusedMoEExperts``, with its configuration.
        settings: of the environment variable.

    Raises:
        UnsupportedError: vLLM was started in a way that moelink does not support; it names the option.
    """
    config, vllm_config = fused_experts.moe_config, get_current_vllm_config_or_none()
    started = None if vllm_config is None else vllm_config.parallel_config
    asked = Parallelism(
        backend=config.moe_parallel_config.all2all_backend,
        spread=config.moe_parallel_config.use_all2all_kernels,
        monolithic=fused_experts.is_monolithic(),
        lora=config.is_lora_enabled,
        elastic=started is not None and started.enable_elastic_ep,
        fault_tolerance=started is not None and started.enable_fault_tolerance,
        microbatches=started.num_ubatches if started is not None and started.use_ubatching else 1,
    )
    refuse(asked)
    return MoelinkPrepareAndFinalize(get_ep_group().device_group, settings, asked.microbatches)


class MoelinkPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """Sends tokens to the ranks of their experts, one row for each token and rank, and brings the sums home.

    Experts get rows in the standard format with global expert ids, -1 for experts of other ranks and on rows past the
    end. Experts that ignore vLLM's ``expert_map`` get local ids, without -1 (:func:`without_gaps`). They weigh and sum;
    combine adds the ranks. Nothing synchronises the host, so CUDA graphs may capture a step.
    Prefill and decode share one communicator: each call has room for the tokens that the data-parallel ranks have.
    """

    def __init__(self, group: Any, settings: Settings, microbatches: int = 1) -> None:
        """``group``: the ranks of expert parallelism; ``microbatches``: that may be in flight at a time."""
        super().__init__()
        self.group, self.settings, self.microbatches = group, settings, microbatches
        self.ep: moelink.Communicator | None = None
        self.rows = Rows("bf16", "nobody")
        self.local_ids = False
        self.shards = 1
        self.knows_tokens = True
        self._received: list[moelink.DispatchOutput | None] = [None] * microbatches

    def post_init_setup(self, fused_experts: Any) -> None:
        """Find the communicator for these experts, or open it; vLLM calls this as it makes a layer. Collective.

        Raises:
            UnsupportedError: a quantisation or a size that moelink does not support.
            ConfigError, ConfigMismatchError, PeerTimeoutError: as :func:`moelink.init`.
        """
        config, quant = fused_experts.moe_config, fused_experts.quant_config
        resized = getattr(fused_experts, "output_hidden_dim", None)  # 0.32 has no experts that change the size
        hidden = config.hidden_dim if resized is None else resized(config.hidden_dim)
        if hidden != config.hidden_dim:
            raise UnsupportedError(
                f"hidden_dim: expected experts whose output has the size of their input, {config.hidden_dim}, got "
                f"{hidden}; unset MOELINK_VLLM for this model"
            )
        self.rows = rows_of(config.in_dtype, _wanted(fused_experts))
        self.local_ids = takes_local_ids(type(fused_experts))
        arguments = init_arguments(
            self.rows,
            settings=self.settings,
            config=config,
            device=device_of(torch.device(config.device).type),
            microbatches=self.microbatches,
            global_ids=not self.local_ids,
        )
        options = {"quantisation of rows": self.rows.quantized_by, "experts": type(fused_experts).__name__}
        self.ep = COMMUNICATORS.get(self.group, arguments, options)
        if self.ep.config.num_local_experts != config.num_local_experts:
            raise UnsupportedError(
                f"--expert-placement-strategy: expected linear, {self.ep.config.num_local_experts} experts here, got "
                f"{config.num_local_experts}; choose linear"
            )
        self.shards = config.moe_parallel_config.sp_size
        self.knows_tokens = config.moe_parallel_config.pcp_size == 1
        if self.rows.quantized_by == "arrival" and quant.quant_dtype == "nvfp4" and quant.a1_gscale is None:
            raise UnsupportedError(
                "quantization: expected nvfp4 with a global input scale, got none; unset MOELINK_VLLM"
            )

    @property
    def activation_format(self) -> Any:
        """Rows [rows, hidden], not [experts, rows, hidden]."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """None: ids may be int32 or int64."""
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        """None, as vLLM asks for it only in the batched format. A call with more than ``max_num_tokens`` is refused."""
        return None

    def num_dispatchers(self) -> int:
        """Return the number of ranks that tokens come from."""
        return self._communicator().config.world_size

    def output_is_reduced(self) -> bool:
        """True: finalize writes the sum over all ranks."""
        return True

    def supports_async(self) -> bool:
        """True with microbatches: one computes while the rows of the other travel.

        Without them vLLM has nothing to do between the two halves of a step but shared experts, which it runs on a
        stream of its own if this is False. A call in one piece is one launch, on vLLM's stream.
        """
        return self.microbatches > 1

    def prepare_async(self, *given: Any, **named: Any) -> tuple[Callable[[], None], Callable[[], Any]]:
        """Start to send ``a1``, [tokens, hidden]; the second callable waits for the rows that come here.

        Arguments and errors are those of :meth:`prepare`. vLLM calls the first callable when the other microbatch is
        about to communicate. It does nothing, as moelink's kernels run on a stream of their own.
        """
        number, quant_config, call = self._dispatch(*given, **named)
        pending = self._communicator().lane(number).dispatch_async(**call)
        return _nothing, lambda: self._arrived(number, pending.wait(), quant_config)

    def prepare(self, *given: Any, **named: Any) -> Any:
        """Send ``a1``, [tokens, hidden]; return the rows that come here, their scales, ids and weights.

        Args:
            given, named: of vLLM, in its order: ``a1``, ``topk_weights``, ``topk_ids``, ``num_experts``,
                ``expert_map``, ``apply_router_weight_on_input``, ``quant_config`` and ``defer_input_quant``.

        Raises:
            ArgumentError: ``num_experts`` is not that of the communicator, or weights on the input with more than one
                expert for a token, as one row carries the token to all experts of a rank.
        """
        number, quant_config, call = self._dispatch(*given, **named)
        return self._arrived(number, self._communicator().lane(number).dispatch(**call), quant_config)

    def _dispatch(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[int, Any, dict[str, Any]]:
        """Return the number of the microbatch, the quantisation, and the arguments of a dispatch."""
        ep = self._communicator()
        if num_experts != ep.config.num_experts:
            raise ArgumentError("num_experts", f"{ep.config.num_experts} physical experts", num_experts)
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1 or ep.config.batch_invariant:
                raise ArgumentError(
                    "apply_router_weight_on_input", "False, or one expert for a token and no batch_invariant",
                    topk_ids.shape[1],
                )  # fmt: skip
            a1 = a1 * topk_weights.to(a1.dtype)
        scales = None
        if self.rows.quantized_by == "vllm":
            a1, scales = _quantize(a1, quant_config)
        call = {
            "x": a1.contiguous(),
            "topk_ids": topk_ids.contiguous(),
            "topk_weights": topk_weights.float().contiguous(),
            "scales": None if scales is None else scales.contiguous(),
            "max_tokens": self._bound(len(a1)),
        }
        return dbo_current_ubatch_id(), quant_config, call

    def _arrived(self, number: int, recv: moelink.DispatchOutput, quant_config: Any) -> Any:
        """Keep the output of the dispatch of microbatch ``number``; return the input of vLLM's experts."""
        self._received[number] = recv
        tokens, scales, ids, weights = recv.tokens, recv.scales, recv.topk_ids, recv.topk_weights
        if self._communicator().config.batch_invariant:
            scales, ids, weights = rows_by_expert(recv, self._communicator().config, local_ids=self.local_ids)
        if self.rows.quantized_by == "arrival":
            tokens, scales = _quantize(tokens, quant_config, swizzled=quant_config.is_scale_swizzled)
        if self.local_ids and ids is not None:
            ids = without_gaps(ids)
        return tokens, scales, None, ids, weights

    def finalize_async(
        self, output: Tensor, *given: Any, **named: Any
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Start to bring the experts' outputs home; the second callable waits for ``output``, [tokens, hidden].

        Arguments and errors are those of :meth:`finalize`.
        """
        number, rows, recv = self._combine(*given, **named)
        pending = self._communicator().lane(number).combine_async(rows, recv, out=output)

        def receive() -> None:
            pending.wait()

        return _nothing, receive

    def finalize(self, output: Tensor, *given: Any, **named: Any) -> None:
        """Bring the experts' outputs home and write their sums to ``output``, [tokens, hidden].

        Rows of experts that leave weights and sums to this step are weighted and summed before they travel.

        Args:
            output: is filled.
            given, named: of vLLM, in its order: ``fused_expert_output``, ``topk_weights``, ``topk_ids``,
                ``apply_router_weight_on_input`` and ``weight_and_reduce_impl``.

        Raises:
            StateError: no prepare came before it.
        """
        number, rows, recv = self._combine(*given, **named)
        self._communicator().lane(number).combine(rows, recv, out=output)

    def _combine(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> tuple[int, Tensor, moelink.DispatchOutput]:
        """Return the number of the microbatch, its rows, weighted and summed, and the output of its dispatch."""
        number = dbo_current_ubatch_id()
        recv, self._received[number] = self._received[number], None
        if recv is None:
            raise StateError(
                "finalize: expected a prepare of the same microbatch before it, got none; call prepare first"
            )
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        rows: Tensor = weight_and_reduce_impl.apply(
            output=None,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        return number, rows.contiguous(), recv

    def _communicator(self) -> moelink.Communicator:
        if self.ep is None:
            raise StateError("prepare: expected a layer's experts, got none; make a FusedMoEKernel of both first")
        return self.ep

    def _bound(self, own: int) -> int | None:
        """Return a bound on the tokens of every rank in this call, known to all data-parallel ranks."""
        largest = None
        if self.knows_tokens and is_forward_context_available():
            met = get_forward_context().dp_metadata
            largest = None if met is None else int(met.num_tokens_across_dp_cpu.max())
        limit = self._communicator().config.max_tokens_per_rank
        return bound_of(largest, own=own, shards=self.shards, limit=limit)


def _nothing() -> None:
    """vLLM's hook between two microbatches."""


def _wanted(fused_experts: Any) -> Quantization:
    """Return the input of these experts."""
    quant = fused_experts.quant_config
    return Quantization(
        dtype=quant.quant_dtype,
        block_shape=None if quant.block_shape is None else tuple(quant.block_shape),
        per_token=quant.per_act_token_quant,
        static=_scale_of(quant) is not None,
        deferred=fused_experts.expects_unquantized_inputs,
        e8m0=is_deep_gemm_e8m0_used(),
        transposed=getattr(quant, "is_scale_transposed", False),  # 0.32's experts transpose scales themselves
    )


def _scale_of(quant: Any) -> Any:
    """Return the scale of the input that is known beforehand, or None."""
    return quant.a1_gscale if quant.quant_dtype == "nvfp4" else quant.a1_scale


def _quantize(rows: Tensor, quant: Any, *, swizzled: bool = False) -> tuple[Tensor, Tensor | None]:
    """Quantise rows as vLLM would on one rank."""
    made: tuple[Tensor, Tensor | None] = moe_kernel_quantize_input(
        rows,
        _scale_of(quant),
        quant_dtype=quant.quant_dtype,
        per_act_token_quant=quant.per_act_token_quant,
        block_shape=quant.block_shape,
        is_scale_swizzled=swizzled,
        mx_alignment=quant.mx_alignment,
    )
    return made
