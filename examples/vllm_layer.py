"""What a layer of vLLM asks of moelink, on CPU ranks: prepare, experts, finalize. It needs no vLLM.

python examples/vllm_layer.py
torchrun --nproc-per-node 2 examples/vllm_layer.py
"""

from types import SimpleNamespace

import torch

import moelink
from moelink.integrations.settings import Settings
from moelink.integrations.vllm.settings import Quantization, bound_of, init_arguments, rows_of

EXPERTS, TOPK, HIDDEN, MOST = 8, 2, 128, 64

# What vLLM knows of a layer: its FusedMoEConfig, and that its experts want fp8 with blocks of 128 x 128.
config = SimpleNamespace(
    num_experts=EXPERTS, experts_per_token=TOPK, hidden_dim=HIDDEN, max_num_tokens=MOST, in_dtype=torch.bfloat16
)
rows = rows_of(config.in_dtype, Quantization(torch.float8_e4m3fn, (128, 128)))
arguments = init_arguments(rows, settings=Settings(), config=config, device=torch.device("cpu"), microbatches=1)

with moelink.init(**arguments) as ep:
    rank, world_size = ep.config.rank, ep.config.world_size
    for step, tokens in (("prefill", 48), ("decode", 3)):
        torch.manual_seed(rank)
        x = torch.randn(tokens, HIDDEN).bfloat16()
        weights, ids = torch.randn(tokens, EXPERTS).softmax(-1).topk(TOPK)
        # vLLM's data-parallel ranks have agreed on the sizes of their batches, so a step has room for the largest.
        bound = bound_of(tokens, own=tokens, shards=1, limit=MOST)
        recv = ep.dispatch(x, ids, weights, max_tokens=bound)
        # Experts get fp8 rows with global ids. Here each of them returns its input, weighed by the router.
        scaled = recv.tokens.float().view(len(recv.tokens), -1, 128) * recv.scales[..., None]
        y = (scaled.flatten(1) * recv.topk_weights.sum(1, keepdim=True)).bfloat16()
        out = ep.combine(y, recv)
        off = (out.float() - x.float() * weights.sum(1, keepdim=True)).abs().max().item()
        print(f"rank {rank} of {world_size}: {step} in {rows.format}, room for {len(recv.tokens)} rows, {off:.3f} off")
        assert off < 0.25
