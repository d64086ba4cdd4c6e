"""Experts that many tokens choose get replicas, and move so that all ranks have as much to do; the pause is bounded.

python examples/balance_experts.py
python examples/balance_experts.py --ranks 2 --redundant 2 --max-bytes 1000000
"""

import argparse

import torch

import moelink
from moelink.nn import Balancer, MoE, Placement
from moelink.testing import run_ranks

EXPERTS, HIDDEN, TOKENS = 16, 64, 64


@torch.no_grad()
def serve(rank, world_size, redundant, max_bytes):
    """Serve skewed tokens before, between and after the steps of a plan; return what rank 0 saw."""
    sizes = {"num_experts": EXPERTS + redundant, "topk": 2, "hidden_size": HIDDEN, "max_tokens_per_rank": TOKENS}
    with moelink.init(**sizes, transport="collective", device="cpu") as ep:
        layer = MoE(ep, intermediate_size=128, placement=Placement.identity(EXPERTS, EXPERTS + redundant))
        layer.router.weight += 0.3 / torch.arange(1, EXPERTS + 1, device=ep.device)[:, None]  # expert 0 most of all
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16() + 0.5
        before = layer(x)

        balancer = Balancer(layer, max_bytes=max_bytes)
        (report,) = balancer.plan()
        pauses = []
        while balancer.steps_left:
            pauses.append(balancer.step())
            torch.testing.assert_close(layer(x), before, atol=0.01, rtol=0.02)  # the same layer all the time
        (after,) = balancer.plan()
        return report, after.before, pauses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--redundant", type=int, default=8, help="physical experts more than experts")
    parser.add_argument("--max-bytes", type=int, default=100_000, help="that a rank receives in a step")
    given = parser.parse_args()
    (report, measured, pauses), *_ = run_ranks(serve, given.ranks, given.redundant, given.max_bytes)
    print(f"busiest rank over the mean: {report.before:.2f}, planned {report.after:.2f}, measured {measured:.2f}")
    print(f"{report.moves} experts moved, {report.nbytes} bytes, in {len(pauses)} steps of up to {max(pauses):.3f} s")
