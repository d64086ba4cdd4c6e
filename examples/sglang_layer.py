"""What a layer of SGLang asks of moelink, on CPU ranks: rows of each expert in groups of 128. It needs no SGLang.

python examples/sglang_layer.py
torchrun --nproc-per-node 2 examples/sglang_layer.py
"""

import torch

import moelink
from moelink.integrations.settings import Settings
from moelink.integrations.sglang.settings import ends_of, format_of, init_arguments

EXPERTS, TOPK, HIDDEN, TOKENS = 4, 2, 64, 12

arguments = init_arguments(
    settings=Settings(),
    num_experts=EXPERTS,
    topk=TOPK,
    hidden_size=HIDDEN,
    max_tokens=TOKENS,
    dispatch_format=format_of(torch.bfloat16, backend="deepep_v2", fp8=False, e8m0=False, block=128),
    device=torch.device("cpu"),
)

with moelink.init(**arguments) as ep:
    rank, world_size = ep.config.rank, ep.config.world_size
    torch.manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    weights, ids = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(TOPK)
    recv = ep.dispatch(x, ids, weights)
    ends = ends_of(recv.row_offsets, recv.num_recv_per_expert)
    groups = [f"{start}-{end}" for start, end in zip(recv.row_offsets[:-1].tolist(), ends.tolist(), strict=True)]
    print(f"rank {rank} of {world_size}: rows of its experts, in groups of 128: {', '.join(groups)}")
    y = (
        recv.tokens.float() * recv.weights[:, None]
    ).bfloat16()  # experts that return their input, weighed by the router
    out = ep.combine(y, recv, weigh=False)
    off = (out.float() - x.float() * weights.sum(1, keepdim=True)).abs().max().item()
    print(f"rank {rank} of {world_size}: {off:.3f} off")
    assert off < 0.05
