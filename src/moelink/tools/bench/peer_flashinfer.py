"""FlashInfer's one-sided all-to-all (``flashinfer.comm.MoeAlltoAll``), where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moelink.config import Layout
from moelink.errors import UnsupportedError
from moelink.formats import get_format
from moelink.routing import ExpertMap
from moelink.tools.bench.presets import Case
from moelink.tools.bench.workload import Workload

NAME = "FlashInfer one-sided"
_QUANTISED = "quantising (its rows already are)"
LEAVES_OUT: Mapping[Layout, str] = MappingProxyType({
    "expert": f"packing rows by expert (they stay as they arrive, by source rank), {_QUANTISED}, pre-reduction (one "
    "row per token and rank is given ready-made, in its workspace)",
    "rank": f"by rank: bringing rows out of its workspace and home through it, {_QUANTISED}",
})  # fmt: skip
"""By moelink's layout of received rows."""


def is_installed() -> bool:
    """The package is there."""
    return importlib.util.find_spec("flashinfer") is not None


class _TorchComm:
    """What its set-up asks of a group, over torch.distributed."""

    def Get_rank(self) -> int:  # noqa: N802
        return dist.get_rank()

    def Get_size(self) -> int:  # noqa: N802
        return dist.get_world_size()

    def allgather(self, data: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, data)
        return everyone

    def bcast(self, data: Any, root: int = 0) -> Any:
        box = [data]
        dist.broadcast_object_list(box, src=root)
        return box[0]

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(1))

    def Split(self, color: int, key: int) -> _TorchComm:  # noqa: N802
        return self


class FlashInferContender:
    """Dispatch of quantised rows, scales, ids and weights; combine of one bf16 row per (token, rank)."""

    name = NAME
    capturable = True
    alternates = True
    kernel_prefix = ""

    def __init__(self, workload: Workload, *, rank: int, world_size: int) -> None:
        """Collective. Raises UnsupportedError when the package is not there."""
        if not is_installed():
            raise UnsupportedError("flashinfer is not installed")
        comm = importlib.import_module("flashinfer.comm")
        mnnvl = importlib.import_module("flashinfer.comm.mnnvl")
        self._case = case = workload.case
        self.leaves_out = LEAVES_OUT[case.layout]
        mapping = comm.Mapping(
            rank=rank, world_size=world_size, gpus_per_node=world_size, tp_size=world_size, moe_ep_size=world_size
        )
        self._moe = comm.MoeAlltoAll(
            mapping, max_num_tokens=case.tokens, top_k=case.topk, num_experts=case.num_experts,
            hidden_size=case.hidden_size, mnnvl_config=mnnvl.MnnvlConfig(comm_backend=_TorchComm()),
        )  # fmt: skip
        self._ids = [batch.topk_ids for batch in workload.batches]
        self._payloads = [payloads(case, batch.x, batch.topk_ids, batch.topk_weights) for batch in workload.batches]

    def dispatch(self, copy: int) -> Tensor:
        """See :class:`~moelink.tools.bench.contenders.Contender`."""
        case = self._case
        self._moe.dispatch(self._ids[copy], self._payloads[copy], case.tokens)
        ready: Tensor = self._moe.get_combine_payload_tensor_in_workspace(case.tokens, case.hidden_size, torch.bfloat16)
        return ready.view(-1, case.tokens, case.hidden_size)

    def combine(self, copy: int, handle: Tensor) -> Tensor:
        """See :class:`~moelink.tools.bench.contenders.Contender`."""
        combined: Tensor = self._moe.combine(handle, self._case.tokens, payload_in_workspace=True)
        return combined

    def check(self) -> str:
        """Rows of ones come home as the number of ranks that a token went to."""
        case, ids = self._case, self._ids[0]
        ready = self.dispatch(0)
        ready.fill_(1)
        combined = self.combine(0, ready)
        owner = ExpertMap(case.num_experts, dist.get_world_size()).owner(ids)
        ranks = sum((owner == rank).any(1).to(combined.dtype) for rank in range(dist.get_world_size()))
        return "" if bool((combined == ranks[:, None]).all()) else "combine does not sum one row of each rank"  # type: ignore[index]

    def close(self) -> None:
        """Its workspace is released with the process."""


def payloads(case: Case, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> list[Tensor]:
    """What travels for each token: quantised rows, row-major scales if there are any, ids, weights."""
    quantized = get_format(case.format).quantize(x)
    rows = [quantized.payload] if quantized.scales is None else [quantized.payload, quantized.scales]
    return [*(row.view(torch.uint8) if row.element_size() == 1 else row for row in rows), topk_ids, topk_weights]
