"""The correctness gate: nothing is timed, and no figure shown, unless moelink's transports return what they must.

Two judges. **Truth**: experts that multiply by a power of two make the result computable from this rank's own tokens,
ids and weights alone, in fp64. **Equality**: all transports return the same bits, dispatch and combine.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import moelink
from moelink.formats import get_format
from moelink.output import DispatchOutput
from moelink.routing import ExpertMap
from moelink.tools.bench.presets import Case
from moelink.tools.bench.workload import Batch

ROUNDINGS = 3.1
"""An expert's result, the sum on its rank and the sum at home are rounded to bf16; the rest is fp32 arithmetic."""

EXACT_FIELDS = ("row_offsets", "expert_ids", "scales_offsets", "num_recv_tokens", "overflow")
ROW_FIELDS = ("tokens", "src_info", "weights", "topk_ids", "topk_weights")


def expert_factor(expert: Tensor) -> Tensor:
    """What an expert multiplies its rows with: +-1, +-2 or +-0.5, exact in every dtype. fp32.

    Example: experts 0, 1, 2, 3 multiply with 0.5, -1, 2, -0.5.
    """
    return torch.exp2((expert % 3 - 1).float()) * (1 - 2 * (expert % 2)).float()


def row_major_scales(recv: DispatchOutput, case: Case) -> Tensor | None:
    """The scales of the rows in use, [row_offsets[-1], n] whatever the layout, or None without scales."""
    fmt = get_format(case.format)
    if recv.scales is None or fmt.scale_layout is None:
        return None
    offsets = recv.row_offsets.long()
    if case.layout == "rank":
        return recv.scales[: int(offsets[-1])]
    sizes = offsets[1:] - offsets[:-1]
    rows = torch.arange(int(offsets[-1]), device=sizes.device)
    groups = torch.repeat_interleave(torch.arange(sizes.numel(), device=sizes.device), sizes)
    return fmt.scale_layout.gather(
        recv.scales, rows=rows, groups=groups, row_offsets=recv.row_offsets,
        scale_width=fmt.scale_width(case.hidden_size),
    )  # fmt: skip


def run_experts(recv: DispatchOutput, case: Case, *, rank: int, world_size: int) -> Tensor:
    """[rows, hidden_size] bf16: each row back to numbers, times :func:`row_factors`; zero past the last row."""
    total = int(recv.row_offsets[-1])
    rows = get_format(case.format).dequantize(recv.tokens[:total], row_major_scales(recv, case))
    y = torch.zeros(len(recv.tokens), case.hidden_size, dtype=torch.bfloat16, device=rows.device)
    factors = row_factors(recv, total, ExpertMap(case.num_experts, world_size).first(rank))
    y[:total] = (rows * factors[:, None]).to(torch.bfloat16)
    return y


def row_factors(recv: DispatchOutput, total: int, first: int) -> Tensor:
    """[total] fp32: factor of each row's expert, or the weighted sum of a row's experts where it is for several (layout
    "rank"). ``first``: this rank's first expert.

    Example: expert 0 multiplies with 0.5, expert 1 with -1. A row of layout "rank" for both, of weights 0.5 and 0.25,
    is multiplied with 0.25 - 0.25 = 0.
    """
    if recv.topk_ids is not None:
        ids, weights = recv.topk_ids[:total], recv.topk_weights
        assert weights is not None
        return (weights[:total] * expert_factor(first + ids) * (ids >= 0)).sum(1)
    offsets = recv.row_offsets.long()
    sizes = offsets[1:] - offsets[:-1]
    groups = torch.repeat_interleave(torch.arange(sizes.numel(), device=sizes.device), sizes)
    return expert_factor(first + groups)


def difference_from_truth(out: Tensor, batch: Batch, case: Case) -> str:
    """Empty when ``out`` [tokens, hidden_size] is the layer's result but for the roundings that combine makes."""
    fmt = get_format(case.format)
    quantized = fmt.quantize(batch.x)
    x = fmt.dequantize(quantized.payload, quantized.scales).double()
    factors = batch.topk_weights.double() * expert_factor(batch.topk_ids).double()
    exact, magnitude = x * factors.sum(1, keepdim=True), x.abs() * factors.abs().sum(1, keepdim=True)
    allowed = ROUNDINGS * torch.finfo(torch.bfloat16).eps / 2 * magnitude
    wrong = ~((out.double() - exact).abs() <= allowed)
    if not bool(wrong.any()):
        return ""
    token = int(wrong.any(1).nonzero()[0])
    return f"combine differs from the layer's result in {int(wrong.any(1).sum())} tokens, the first is {token}"


def first_difference(got: DispatchOutput, want: DispatchOutput, case: Case) -> str:
    """The name of the first field in which two outputs differ in their defined part, or empty."""
    for name in EXACT_FIELDS:
        if not _equal(getattr(got, name), getattr(want, name)):
            return name
    total = int(want.row_offsets[-1])
    for name in ROW_FIELDS:
        a, b = getattr(got, name), getattr(want, name)
        if not _equal(None if a is None else a[:total], None if b is None else b[:total]):
            return name
    return "" if _equal(row_major_scales(got, case), row_major_scales(want, case)) else "scales"


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Same bits."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.numel():
        return True
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def check_transports(
    communicators: Mapping[str, moelink.Communicator], batch: Batch, case: Case, *, rank: int, world_size: int
) -> str:
    """What is wrong with ``communicators``, by name, the first being the one others are compared with; or empty.

    Collective: every rank makes the same calls, whatever it finds.
    """
    recvs, outs, faults = {}, {}, []
    for name, ep in communicators.items():
        recv = ep.dispatch(batch.x, batch.topk_ids, batch.topk_weights)
        outs[name] = ep.combine(run_experts(recv, case, rank=rank, world_size=world_size), recv)
        ep.check()
        recvs[name] = recv
        if int(recv.overflow):
            faults.append(f"{name}: {int(recv.overflow)} rows did not fit")
    baseline = next(iter(communicators))
    for name in communicators:
        fault = difference_from_truth(outs[name], batch, case)
        if not fault and name != baseline:
            field = first_difference(recvs[name], recvs[baseline], case)
            if field:
                fault = f"dispatch differs from {baseline} in {field}"
            elif not _equal(outs[name], outs[baseline]):
                fault = f"combine differs from {baseline}"
        if fault:
            faults.append(f"{name}: {fault}")
    return "; ".join(faults)
