"""torchtitan's token dispatcher over moelink, and selective checkpointing that keeps its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moelink.integrations.versions import require

require("torchtitan")  # before anything of it is subclassed

import spmd_types as spmd
import torch
from torch import Tensor
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher

import moelink
from moelink.errors import ArgumentError, UnsupportedError
from moelink.integrations.settings import device_of
from moelink.integrations.torchtitan.settings import COMMUNICATORS, DTYPES, init_arguments


class MoelinkTokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """Sends tokens to the ranks of the expert mesh and brings the experts' outputs home, by moelink.

    Rows come grouped by local expert, then by source rank, token and slot, as from torchtitan's AllToAll dispatcher.
    combine applies the router's scores. The host does not read the number of rows: they have the size of the worst case
    (or of ``capacity``), and the counts on the device bound the used ones. With one rank in the expert mesh
    (``expert_parallel_degree=1``) torchtitan wires no mesh, and tokens are reordered by its own local dispatcher.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):  # type: ignore[misc]
        """The result of :func:`moelink.integrations.torchtitan.settings.resolve`.

        Attributes:
            hidden_dim: elements of a row.
            num_max_tokens_per_rank: the most tokens of a rank in one call.
            dtype: torchtitan's name of the dtype of activations.
            dispatch_format, batch_invariant, expert_alignment, capacity, transport, num_sms, timeout: as for
                :func:`moelink.init`.
        """

        hidden_dim: int
        num_max_tokens_per_rank: int
        dtype: str = "bfloat16"
        dispatch_format: str = "bf16"
        batch_invariant: bool = False
        expert_alignment: int = 1
        capacity: int | None = None
        transport: str = "auto"
        num_sms: int | None = None
        timeout: float = 60.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.ep: moelink.Communicator | None = None

    def init_buffer(self) -> None:
        """Find the communicator of the expert mesh, or make it, as torchtitan wires a layer. Collective.

        Raises:
            UnsupportedError: ``parallelism.spmd_backend`` is "full_dtensor".
            ConfigError, ConfigMismatchError, PeerTimeoutError: as :func:`moelink.init`.
        """
        if self.ep_mesh is None:
            self.ep = None
            return
        if get_spmd_backend() == "full_dtensor":
            raise UnsupportedError(
                "parallelism.spmd_backend: expected spmd_types or partial_dtensor, whose dispatchers get local "
                "tensors, got full_dtensor; choose one of them"
            )
        fields = {name: getattr(self.config, name) for name in self.config.__dataclass_fields__}
        arguments = init_arguments(
            fields, num_experts=self.num_experts, top_k=self.top_k, device=device_of(self.ep_mesh.device_type)
        )
        self.ep = COMMUNICATORS.get(self.ep_mesh.get_group(), arguments)

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, object]:
        """Send each token to the ranks that own its experts.

        Args:
            x_TD: [tokens, hidden] of the configured dtype.
            topk_scores_TK: [tokens, top_k] router scores.
            topk_expert_ids_TK: [tokens, top_k] expert ids, -1 for none.
            num_local_tokens_per_expert_E: [experts] tokens of this rank for each expert; the counts have its dtype.

        Returns:
            rows [rows, hidden], of which those past the counts are undefined; the number of rows of each local expert,
            padding of ``expert_alignment`` included; and the metadata of :meth:`combine`.

        Raises:
            ArgumentError: x has another dtype than was configured, or more tokens.
            UnsupportedError: under ``debug.spmd_typechecking``.
        """
        if self.ep is None:
            # torchtitan's has a row for each id, so ids of -1 become rows of expert 0 with a score of zero.
            nobody = topk_expert_ids_TK < 0
            counts = num_local_tokens_per_expert_E.clone()
            counts[0] += nobody.sum()
            local: tuple[Tensor, Tensor, object] = LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK.masked_fill(nobody, 0), topk_expert_ids_TK.clamp(min=0), counts
            )
            return local
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
            raise UnsupportedError(
                "debug.spmd_typechecking: expected False, as moelink's operators have no SPMD types, got True; check "
                "types with the AllToAll dispatcher, and switch the check off for moelink"
            )
        if x_TD.dtype != self.dtype:
            raise ArgumentError(
                "x_TD", f"activations of {self.dtype}, the override's dtype (pass dtype= to it)", x_TD.dtype
            )
        recv = self.ep.dispatch(x_TD.contiguous(), topk_expert_ids_TK.contiguous(), topk_scores_TK.contiguous())
        rows = recv.tokens if recv.scales is None else moelink.ops.dequantize(self.ep, recv)
        return rows, recv.row_offsets.diff().to(num_local_tokens_per_expert_E.dtype), recv

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """Bring the experts' outputs home: [tokens, hidden], summed with the router scores.

        Args:
            routed_output_RD: [rows, hidden], of x's dtype; row i is of the row i that :meth:`dispatch` returned.
            metadata: of the last :meth:`dispatch`.
            x_TD: [tokens, hidden], the tokens that were dispatched.
        """
        if self.ep is None:
            local: Tensor = LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
            return local
        return self.ep.combine(routed_output_RD.contiguous(), metadata)


class MoelinkSelectiveAC(SelectiveAC):  # type: ignore[misc]
    """Selective activation checkpointing that keeps the results of dispatch and combine.

    torchtitan's own would send the tokens again in the recomputation, which is right but slow.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):  # type: ignore[misc]
        """That of torchtitan's SelectiveAC."""

    def get_save_ops(self) -> set[Any]:
        """Return torchtitan's operators to save, and moelink's."""
        return {*super().get_save_ops(), torch.ops.moelink.dispatch.default, torch.ops.moelink.combine.default}
