"""FlashInfer's one-sided all-to-all as a whole operation: rows by expert, and a token's rows summed on the way home."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moelink.config import Layout
from moelink.formats import get_format
from moelink.routing import ExpertMap
from moelink_bench.contenders import difference_from_truth, expert_factor
from moelink_bench.peers import FlashInferContender, FlashInferMarked
from moelink_bench.workload import Workload

if TYPE_CHECKING:
    from moelink_bench.permute import Permuted

FLASHINFER_WHOLE = "FlashInfer + permute + sum"
WHOLE_LEAVES_OUT = (
    "quantising (its rows already are), the layout of scales and the padding that grouped products take, a fixed order "
    "of an expert's rows; permute and sum are Triton kernels of this benchmark"
)


class FlashInferWhole(FlashInferMarked):
    """Dispatch and permute; sum and combine. Its handle is what :meth:`Permutation.permute` returned."""

    name = FLASHINFER_WHOLE
    note = WHOLE_LEAVES_OUT

    def __init__(self, workload: Workload, *, rank: int, world_size: int) -> None:
        """Set up FlashInfer. Collective. Raises UnsupportedError as :class:`FlashInferContender` does."""
        from moelink_bench.permute import Permutation  # which has kernels

        super().__init__(workload, rank=rank, world_size=world_size)
        self._workload = workload
        case, experts = workload.case, ExpertMap(workload.case.num_experts, world_size)
        self._first, self._slots = experts.first(rank), world_size * case.tokens
        self._permutation = Permutation(
            first=self._first, num_local=experts.num_local(rank), capacity=workload.capacity,
            device=workload.batches[0].x.device,
        )  # fmt: skip

    def dispatch(self, copy: int) -> Permuted:  # type: ignore[override]
        """See :class:`~moelink_bench.contenders.Calls`."""
        flat = [each.reshape(self._slots, -1) for each in self._arrived(copy)]
        return self._permutation.permute(flat[0], flat[1] if len(flat) > 3 else None, *flat[-2:])

    def combine(self, copy: int, handle: Permuted) -> Tensor:  # type: ignore[override]
        """See :class:`~moelink_bench.contenders.Calls`."""
        return self._home(self._workload.y[copy], handle)

    def _home(self, y: Tensor, handle: Permuted) -> Tensor:
        ready = self._ready()
        self._permutation.sum(y, handle, ready.view(self._slots, self._case.hidden_size))
        return super().combine(0, ready)

    def experts(self, handle: Permuted) -> Tensor:
        """[capacity, hidden_size] bf16: the dequantised rows, times what their experts multiply with."""
        case, fmt, counts = self._case, get_format(self._case.format), self._permutation.counts.long()
        total = int(counts.sum())
        scales = handle.scales
        if scales is not None and fmt.scale_dtype is not None:
            scales = scales[:total].view(fmt.scale_dtype)
        rows = fmt.dequantize(handle.rows[:total].view(fmt.payload_dtype), scales)
        expert = self._first + torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        y = torch.zeros(self._workload.capacity, case.hidden_size, dtype=torch.bfloat16, device=rows.device)
        y[:total] = (rows * expert_factor(expert)[:, None]).to(torch.bfloat16)
        return y

    def check(self) -> str:
        """Run experts whose result is known, with the first two inputs, and compare what comes home with it."""
        for copy in range(min(2, self._workload.copies)):
            handle = self.dispatch(copy)
            combined = self._home(self.experts(handle), handle)
            fault = difference_from_truth(combined, self._workload.batches[copy], self._case)
            if fault:
                return fault
        return ""


def flashinfer_contenders(layout: Layout) -> tuple[type[FlashInferContender], ...]:
    """Return what runs with moelink's ``layout``: FlashInfer alone does what layout "rank" does."""
    return (FlashInferContender, FlashInferMarked) if layout == "rank" else (FlashInferWhole,)
