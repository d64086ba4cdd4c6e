"""A Mixture-of-Experts layer over the launchers of ``moelink.contract``, in the call order of Modular MAX's pages.

Used by ``processes.py`` (a process per device) and ``one_process.py`` (all devices in one process).
"""

import torch
from torch import Tensor

from moelink import get_format
from moelink.contract import EPParams, EPRouting, TokenHandler, ep_init
from moelink.memory import SymmetricMemory

SHARED = -1
"""Number of the shared expert."""


def expert_weights(expert: int, hidden: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Up and down projections of an expert, the same on whatever rank: [hidden, hidden] bf16 each."""
    generator = torch.Generator().manual_seed(100 + expert)
    scale = hidden**-0.5
    up, down = (torch.randn(hidden, hidden, generator=generator) * scale for _ in range(2))
    return up.to(device, torch.bfloat16), down.to(device, torch.bfloat16)


def run_expert(x: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    """What an expert makes of rows [n, hidden] bf16."""
    up, down = weights
    return torch.nn.functional.silu(x @ up) @ down


class Layer:
    """One rank of the layer: what ``ep.init`` and the graph compiler hold in MAX, and the experts that the rank owns.

    ``arguments`` below are those of the launchers, in their order.
    """

    def __init__(self, params: EPParams, memory: SymmetricMemory, *, my_rank: int | None = None) -> None:
        """Collective only in that every rank needs its memory first."""
        self.params, self.memory = params, memory
        self.ep = ep = ep_init(params, memory, my_rank=my_rank)
        rows = params.max_recv_tokens
        self.handler, self.routing = TokenHandler.allocate(ep, rows=rows), EPRouting.allocate(ep)
        shared = int(params.fused_shared_expert)
        owned = [ep.first_expert + i for i in range(ep.config.num_local_experts)]
        self.experts = [expert_weights(e, params.hidden_size, ep.device) for e in [SHARED] * shared + owned]
        groups = len(self.experts)
        self.row_offsets = torch.empty(groups + 1, dtype=torch.int32, device=ep.device)
        self.expert_ids = torch.empty(groups, dtype=torch.int32, device=ep.device)
        self.src_info = torch.empty(rows, 3, dtype=torch.int32, device=ep.device)
        self.y = torch.empty(rows, params.hidden_size, dtype=params.combine_dtype, device=ep.device)

    @property
    def outputs(self) -> tuple:
        """Where a dispatch stores: token_handler, row_offsets, expert_ids, src_info."""
        return self.handler, self.row_offsets, self.expert_ids, self.src_info

    def received(self, input_scale: Tensor | None = None) -> Tensor:
        """The rows that came, [row_offsets[-1], hidden] bf16; those of a quantised format dequantised."""
        fmt, total = get_format(self.ep.config.dispatch_format), int(self.row_offsets[-1])
        rows, scales = self.handler.output_tokens[:total], self.handler.output_scales
        if fmt.scale_layout is None or scales is None:
            return rows
        sizes = self.row_offsets.long().diff()
        scales = fmt.scale_layout.gather(
            scales,
            rows=torch.arange(total, device=rows.device),
            groups=torch.repeat_interleave(torch.arange(len(sizes), device=rows.device), sizes),
            row_offsets=self.row_offsets,
            scale_width=fmt.scale_width(self.params.hidden_size),
        )
        return fmt.dequantize(rows, scales, input_scale).to(torch.bfloat16)

    def run_experts(self, input_scale: Tensor | None = None) -> Tensor:
        """The experts' outputs [rows, hidden], group by group. A grouped matmul would take ``row_offsets`` instead."""
        rows, offsets = self.received(input_scale), self.row_offsets.tolist()
        for begin, end, weights in zip(offsets, offsets[1:], self.experts, strict=False):
            self.y[begin:end] = run_expert(rows[begin:end], weights)
        return self.y

    def close(self) -> None:
        """End what is under way between nodes, then release the block."""
        self.ep.close()
        self.memory.close()


def plain_layer(params: EPParams, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The same layer without any communication, in fp32: what every rank can compute of its own tokens."""
    out = torch.zeros(x.shape, device=x.device)
    for expert in range(params.num_experts):
        factor = (weights * (ids == expert)).sum(1, keepdim=True)
        out += factor * run_expert(x, expert_weights(expert, params.hidden_size, x.device)).float()
    if params.fused_shared_expert:
        out += run_expert(x, expert_weights(SHARED, params.hidden_size, x.device)).float()
    return out


def tokens_of(rank: int, params: EPParams, device: torch.device, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, expert ids and router weights of a rank's tokens."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(count, params.hidden_size, generator=generator).to(torch.bfloat16)
    scores = torch.rand(count, params.num_experts, generator=generator).softmax(1)
    weights, ids = scores.topk(params.top_k)
    return x.to(device), ids.to(device), weights.to(device)
