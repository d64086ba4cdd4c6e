"""Dispatch and combine on one rank, with nothing launched and no GPU: what arrives where, and what comes back.

python examples/one_rank.py
"""

import torch

import moelink

x = torch.arange(4.0)[:, None].expand(4, 256).to(torch.bfloat16).contiguous()  # token t is the number t
topk_ids = torch.tensor([[0, 2], [2, 1], [0, -1], [2, 0]])  # -1: this slot goes nowhere
topk_weights = torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0], [0.5, 0.5]])

with moelink.init(num_experts=3, topk=2, hidden_size=256, max_tokens_per_rank=4, device="cpu") as ep:
    recv = ep.dispatch(x, topk_ids, topk_weights)
    starts = recv.row_offsets.tolist()
    for expert in range(3):
        rows = recv.src_info[starts[expert] : starts[expert + 1]]
        print(f"expert {expert} gets tokens {rows[:, 1].tolist()}")

    y = recv.tokens.clone()
    for expert in range(3):
        y[starts[expert] : starts[expert + 1]] *= expert + 1  # expert e multiplies by e + 1
    out = ep.combine(y, recv)

factors = ((topk_ids + 1) * topk_weights).sum(1)
print("each token was multiplied by", (out[1:, 0].float() / x[1:, 0].float()).tolist())
assert torch.equal(out.float(), x.float() * factors[:, None])
