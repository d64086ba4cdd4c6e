"""A Mixture-of-Experts layer whose shared expert runs while tokens travel: with moelink.nn.MoE, and the same by hand.

python examples/moe_overlap.py
torchrun --nproc-per-node 4 examples/moe_overlap.py
"""

import torch

import moelink
from moelink.nn import GatedMLP, MoE, dequantized

sizes = {"num_experts": 8, "topk": 2, "hidden_size": 256, "max_tokens_per_rank": 32, "dispatch_format": "fp8_block128"}
with moelink.init(**sizes) as ep:
    new = {"device": ep.device, "dtype": torch.bfloat16}
    layer = MoE(ep, intermediate_size=512, shared_expert=GatedMLP(256, 512, **new))
    x = torch.randn(32, 256, **new)
    with torch.no_grad():
        out = layer(x)

        routing = layer.router(x)
        pending = ep.dispatch_async(x, routing.topk_ids, routing.topk_weights)  # tokens are on their way ...
        shared = layer.shared_expert(x)  # ... while this runs
        recv = pending.wait()
        y = layer.experts(dequantized(recv, ep.config), recv.row_offsets)
        by_hand = ep.combine(y, recv, shared=shared)

    assert torch.equal(out, by_hand)
    stats = layer.stats()
    if ep.config.rank == 0:
        print(f"tokens of rank 0 by expert: {list(stats.tokens_per_expert)}, by rank: {list(stats.tokens_per_rank)}")
