"""All devices in one process: NVFP4 on every device at once, then two batches that overlap over a second ``ep_init``.

python examples/port_from_max/one_process.py --ranks 2
"""

import argparse
import os

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from layer import Layer, plain_layer, tokens_of

from moelink.contract import (
    EPParams,
    distributed_ep_combine,
    distributed_ep_dispatch,
    ep_combine_async,
    ep_combine_wait,
    ep_dispatch_async,
    ep_dispatch_wait,
)
from moelink.memory import create_all

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--ranks", type=int, default=0, help="default: the CUDA devices, or 2 on CPUs")
ranks = parser.parse_args().ranks or torch.cuda.device_count() or 2
gpus = torch.cuda.device_count()
devices = [f"cuda:{rank % gpus}" for rank in range(ranks)] if gpus else ["cpu"] * ranks
TOKENS = 6
params = EPParams(
    dispatch_fmt_str="NVFP4", hidden_size=64, top_k=2, n_experts=2 * ranks, max_token_per_rank=TOKENS,
    n_gpus_per_node=ranks,
)  # fmt: skip


def all_layers() -> list[Layer]:
    """One per device, with blocks of their own."""
    return [Layer(params, memory) for memory in create_all(devices, params.nbytes)]


def check(layers: list[Layer], outs: list[Tensor], given: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Every result is that of the layer without communication, but for the rounding to 4 bits."""
    for layer, out, (x, ids, weights) in zip(layers, outs, given, strict=True):
        layer.ep.check()
        want = plain_layer(params, x, ids, weights)
        error = float((out.float() - want).norm() / want.norm())
        assert error < 0.2, error


# DistributedEPDispatchNVFP4: lists with an entry per device. The input scale is 1 / the checkpoint's.
layers = all_layers()
eps = [layer.ep for layer in layers]
given = [tokens_of(rank, params, ep.device, TOKENS) for rank, ep in enumerate(eps)]
scales = [torch.full((1,), 2.0, device=ep.device) for ep in eps]
distributed_ep_dispatch(
    eps,
    *[list(column) for column in zip(*(layer.outputs for layer in layers), strict=True)],
    [ep.atomic_counters[0] for ep in eps],
    [x for x, _, _ in given],
    [ids for _, ids, _ in given],
    [ep.pointers[0] for ep in eps],
    [layer.routing for layer in layers],
    input_scales=scales,
)
ys = [layer.run_experts(scale) for layer, scale in zip(layers, scales, strict=True)]
outs = [torch.empty_like(x) for x, _, _ in given]
distributed_ep_combine(
    eps,
    outs,
    [ep.atomic_counters[1] for ep in eps],
    ys,
    [layer.routing for layer in layers],
    [ep.pointers[1] for ep in eps],
    [ids for _, ids, _ in given],
    router_weights=[weights for _, _, weights in given],
)
check(layers, outs, given)
print(f"NVFP4 on {ranks} ranks: {sum(int(layer.row_offsets[-1]) for layer in layers)} rows in one call")

# Two batches: where MAX takes its second group of counters, take a second ep_init over other memory. While the rows of
# one batch travel, the experts compute the other.
batches = [layers, all_layers()]
halves = [
    [tuple(tensor[begin : begin + TOKENS // 2] for tensor in each) for each in given] for begin in (0, TOKENS // 2)
]
for batch, half in zip(batches, halves, strict=True):
    for layer, (x, ids, _) in zip(batch, half, strict=True):
        ep_dispatch_async(layer.ep, layer.ep.atomic_counters[0], x, ids, layer.ep.pointers[0], layer.routing)
for batch, half in zip(batches, halves, strict=True):
    for layer, (_, ids, _) in zip(batch, half, strict=True):
        ep = layer.ep
        ep_dispatch_wait(
            ep, *layer.outputs, ep.pointers[0], ep.atomic_counters[0], layer.routing, num_input_tokens=len(ids)
        )
    for layer in batch:  # the rows of the second batch are still on their way while the first is computed
        ep_combine_async(
            layer.ep, layer.ep.atomic_counters[1], layer.run_experts(), layer.routing, layer.ep.pointers[1]
        )
for batch, half in zip(batches, halves, strict=True):
    outs = [torch.empty_like(x) for x, _, _ in half]
    for layer, out, (_, ids, weights) in zip(batch, outs, half, strict=True):
        ep = layer.ep
        ep_combine_wait(
            ep, out, ep.atomic_counters[1], layer.y, layer.routing, ep.pointers[1], ids, router_weights=weights
        )
    check(batch, outs, half)
for layer in (*batches[0], *batches[1]):
    layer.close()
print(f"two batches of {TOKENS // 2} tokens a rank, overlapped over two ep_init: as without moelink")
