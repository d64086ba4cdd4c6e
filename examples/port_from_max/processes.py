"""A process per device: memory between them, the fused launchers, an error loop, and the allreduce mode.

torchrun --nproc-per-node 2 examples/port_from_max/processes.py
"""

import dataclasses
import os

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from layer import Layer, plain_layer, tokens_of

from moelink import MoelinkError, RoutingError
from moelink.contract import EPParams, create_memory, ep_fused_combine, ep_fused_dispatch

ranks = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
TOKENS, STEPS = 6, 3
params = EPParams(
    dispatch_fmt_str="BF16", hidden_size=64, top_k=2, n_experts=4, max_token_per_rank=TOKENS, n_gpus_per_node=ranks,
    fused_shared_expert=True, timeout=60,
)  # fmt: skip


def forward(layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Dispatch, experts, combine: one launch each way."""
    ep, out = layer.ep, torch.empty_like(x)
    ep_fused_dispatch(ep, *layer.outputs, ep.atomic_counters[0], x, ids, ep.pointers[0], layer.routing)
    y = layer.run_experts()
    ep_fused_combine(ep, out, ep.atomic_counters[1], y, layer.routing, ep.pointers[1], ids, router_weights=weights)
    return out


# ep.init: create_memory meets the other processes, ep_init lays the buffers out.
layer = Layer(params, create_memory(params))
layer.ep.warmup(id_dtypes=[torch.int64], forms=["fused"])
x, ids, weights = tokens_of(rank, params, layer.ep.device, TOKENS)
refused = 0
for step in range(STEPS):
    step_ids = ids.clone()
    if step == 1:
        step_ids[0, 0] = params.num_experts  # a router's bug: there is no such expert
    try:
        out = forward(layer, x, step_ids, weights)
        layer.ep.raise_error()  # reads host memory: a peer that did not come, as soon as it is known
        layer.ep.check()  # waits for the device: ids out of range, rows that did not fit
    except RoutingError as error:
        refused += error.count  # such ids acted as -1; the next step works
    except MoelinkError:
        layer.close()  # a peer is gone: begin again with new memory, or end
        raise
torch.testing.assert_close(out.float(), plain_layer(params, x, ids, weights), rtol=0.05, atol=0.05)
layer.close()

# Allreduce mode: every rank has all tokens and keeps the rows of its own experts; the partial results are added.
alone = dataclasses.replace(params, skip_a2a=True, allreduce_world_size=ranks)
layer = Layer(alone, create_memory(alone), my_rank=rank)
x, ids, weights = tokens_of(0, alone, layer.ep.device, TOKENS)
total = forward(layer, x, ids, weights).float()
layer.ep.check()
if ranks > 1:
    dist.all_reduce(total)
torch.testing.assert_close(total, plain_layer(alone, x, ids, weights), rtol=0.05, atol=0.05)
layer.close()
# One print of one string: lines of several ranks do not mix.
print(
    f"rank {rank} of {ranks}: {STEPS} steps, {refused} id refused, then allreduce mode: both as without moelink\n",
    end="",
)
if dist.is_initialized():
    dist.destroy_process_group()
