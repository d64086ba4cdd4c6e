"""A round trip over as many ranks as there are: tokens travel to their experts and come home.

torchrun --nproc-per-node 4 examples/torchrun_round_trip.py --format fp8_block128
"""

import argparse

import torch

import moelink
from moelink.ops import dequantize

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--format", default="bf16", choices=moelink.format_names())
parser.add_argument("--tokens", type=int, default=64, help="tokens per rank")
arguments = parser.parse_args()

sizes = {"num_experts": 16, "topk": 4, "hidden_size": 512, "max_tokens_per_rank": arguments.tokens}
with moelink.init(**sizes, dispatch_format=arguments.format, combine_dtype=torch.float32) as ep:
    rank, device = ep.config.rank, ep.device
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(arguments.tokens, 512, generator=generator).to(device)
    topk_ids = torch.rand(arguments.tokens, 16, generator=generator).topk(4).indices.to(device)
    topk_weights = torch.full((arguments.tokens, 4), 0.25, device=device)

    recv = ep.dispatch(x, topk_ids, topk_weights)
    out = ep.combine(dequantize(ep, recv), recv)  # experts that change nothing

    # The weights of a token sum to one, so it comes back as it was rounded on the way out.
    fmt = ep.config.format
    quantized = fmt.quantize(x)
    sent = fmt.dequantize(quantized.payload, quantized.scales).float()
    torch.testing.assert_close(out, sent)
    traffic = ep.traffic()
    # One print of one string: lines of several ranks do not mix.
    print(
        f"rank {rank} of {ep.config.world_size}: {int(recv.num_recv_tokens)} rows came, "
        f"{traffic.dispatch + traffic.combine} bytes left, largest rounding {float((out - x).abs().max()):.4f}\n",
        end="",
    )
