"""SGLang's token dispatcher over moelink, in the expanded format. Importing this needs SGLang."""

from __future__ import annotations

from typing import Any

from moelink.integrations.versions import require

require("sglang")  # before anything of it is subclassed

import torch  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.layers.dp_attention import get_is_extend_in_batch  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton import layer  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher, CombineInputFormat  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2DispatchOutput  # noqa: E402
from sglang.srt.layers.moe.utils import get_deepep_v2_fp8_scale_format, get_moe_a2a_backend  # noqa: E402
from sglang.srt.runtime_context import get_exec, get_parallel  # noqa: E402
from torch import Tensor  # noqa: E402

import moelink  # noqa: E402
from moelink.errors import ArgumentError, StateError, UnsupportedError  # noqa: E402
from moelink.integrations.settings import Settings, device_of  # noqa: E402
from moelink.integrations.sglang.settings import (  # noqa: E402
    COMMUNICATORS,
    ends_of,
    expected_rows,
    format_of,
    init_arguments,
    refuse_elastic,
    scales_of,
)


def make(config: Any, quant_method: Any, settings: Settings) -> MoelinkDispatcher:
    """Return the dispatcher of a layer.

    Args:
        config: the layer's ``MoeRunnerConfig``.
        quant_method: how its experts are quantised.
        settings: of the environment variable.

    Raises:
        UnsupportedError: SGLang was started in a way that moelink does not support; it names the option.
    """
    asked = get_exec().moe
    refuse_elastic(asked.elastic_ep_backend, asked.enable_elastic_expert_backup)
    fp8 = layer._deepep_v2_experts_are_fp8(quant_method)
    dispatch_format = format_of(
        config.params_dtype,
        backend=get_moe_a2a_backend().value,
        fp8=fp8,
        e8m0=fp8 and get_deepep_v2_fp8_scale_format().ue8m0,
        block=32 if getattr(quant_method, "use_mxfp8", False) else 128,
    )
    return MoelinkDispatcher(
        get_parallel().tp_group.device_group,
        settings,
        num_experts=config.num_experts,
        num_local_experts=config.num_local_experts,
        topk=config.top_k,
        hidden_size=config.hidden_size,
        max_tokens=envs.SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get(),
        dispatch_format=dispatch_format,
    )


class MoelinkDispatcher(BaseDispatcher):  # type: ignore[misc]
    """Sends tokens to the ranks of their experts, one row for each token and expert, and brings the results home.

    Rows lie grouped by local expert, in groups of a multiple of 128 rows. Experts multiply by the router weights;
    combine adds the rows of a token. The host never waits, also not in prefill, so CUDA graphs may capture both.
    Decode asks SGLang for its masked product, prefill for the contiguous one.
    """

    def __init__(
        self,
        group: Any,
        settings: Settings,
        *,
        num_local_experts: int,
        device: torch.device | None = None,
        **sizes: Any,
    ) -> None:
        """Find the communicator for such a layer, or open it. Collective over ``group``.

        Args:
            sizes: the other arguments of :func:`moelink.integrations.sglang.settings.init_arguments`.

        Raises:
            UnsupportedError: experts are not spread evenly.
            ConfigError, ConfigMismatchError, PeerTimeoutError: as :func:`moelink.init`.
        """
        super().__init__()
        device = device or device_of("cuda" if torch.cuda.is_available() else "cpu")
        self.ep = COMMUNICATORS.get(group, init_arguments(settings=settings, device=device, **sizes))
        here = self.ep.config.num_local_experts
        if here != num_local_experts:
            raise UnsupportedError(f"--ep-num-redundant-experts: expected {here} experts on this rank, got "
                                   f"{num_local_experts}; choose a number that the ranks divide")  # fmt: skip
        self._received: moelink.DispatchOutput | None = None

    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> Any:
        """Send ``hidden_states``, [tokens, hidden] bf16, to the experts in ``topk_output``.

        Returns:
            ``DeepEPv2DispatchOutput`` in the expanded form: rows [rows, hidden], scales, router weights [rows], and
            the ends of the rows of each expert.

        Raises:
            StateError: the output of the dispatch before was not combined.
            ArgumentError: more tokens than SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK.
        """
        if self._received is not None:
            raise StateError("dispatch: expected a combine of the dispatch before it, got none; call combine first")
        tokens, config = hidden_states.shape[0], self.ep.config
        if tokens > config.max_tokens_per_rank:
            raise ArgumentError(
                "hidden_states",
                f"at most {config.max_tokens_per_rank} tokens; raise SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
                tokens,
            )
        recv = self.ep.dispatch(
            hidden_states.contiguous(),
            topk_output.topk_ids.contiguous(),
            topk_output.topk_weights.float().contiguous(),
        )
        self._received, rows = recv, recv.tokens.shape[0]
        masked, weights = not get_is_extend_in_batch(), recv.weights
        if config.batch_invariant and weights is not None:  # home weighs rows, as it does in training
            weights = torch.ones_like(weights)
        most = config.world_size * config.max_tokens_per_rank
        return DeepEPv2DispatchOutput(
            recv.tokens,
            scales_of(recv.scales),
            None,
            weights,
            ends_of(recv.row_offsets, recv.num_recv_per_expert),
            is_expanded=True,
            use_masked_gemm=masked,
            expected_m=expected_rows(
                tokens, world_size=config.world_size, topk=config.topk, num_experts=config.num_experts
            ) if masked else 0,
            masked_max_m=-(-most // config.expert_alignment) * config.expert_alignment if masked else 0,
            total_expanded=rows if masked else 0,
            expert_alignment=config.expert_alignment,
        )  # fmt: skip

    def combine(self, combine_input: Any) -> Tensor:
        """Bring the experts' outputs home: [tokens, hidden] bf16, the sum of each token's rows.

        Args:
            combine_input: ``DeepEPv2CombineInput`` whose rows are already multiplied by the router weights.

        Raises:
            StateError: nothing was dispatched.
            ArgumentError: another format, or rows that the model has to weigh first.
        """
        if self._received is None:
            raise StateError("combine: expected a dispatch before it, got none; call dispatch first")
        recv, self._received = self._received, None
        if combine_input.format != CombineInputFormat.DEEPEP_V2:
            raise ArgumentError("combine_input", "DeepEPv2CombineInput", combine_input.format)
        if combine_input.routewise_layout is not None:
            raise ArgumentError("combine_input", "rows that are multiplied by the router weights", "unweighted ones")
        rows = combine_input.hidden_states.contiguous()
        return self.ep.combine(rows, recv, weigh=self.ep.config.batch_invariant)
