"""Print the cache keys of kernels and of specs, in an order of one's choice. Run without TRITON_INTERPRET.

``python -m tests.kernels.cache_keys forwards`` and the same with ``backwards`` print the same lines, sorted.
Backwards, ``triton.next_power_of_2`` is a plain function, as after an import of SGLang.
"""

import sys

import torch
import triton

import moelink
from moelink.kernels.combine import kernel as combine
from moelink.kernels.dispatch import kernel as dispatch
from moelink.kernels.dispatch import padding
from moelink.kernels.launch.cache_keys import settle_cache_key
from moelink.kernels.launch.constants import dispatch_spec
from moelink.memory.workspace import Workspace
from moelink.rows import activation_kernel as activation

KERNELS = (
    combine.ep_combine_wait_kernel, dispatch.ep_fused_dispatch_kernel, dispatch.ep_dispatch_wait_kernel,
    activation.silu_and_quantize_kernel, combine.ep_fused_combine_kernel, padding.pad_rows,
)  # fmt: skip


def spec_of(fmt):
    config = moelink.EPConfig(num_experts=8, topk=2, hidden_size=256, max_tokens_per_rank=4, dispatch_format=fmt)
    return dispatch_spec(
        Workspace(config), torch.device("cuda"), input_dtype=torch.bfloat16, quantized=False, weights=True
    )


def plain(n):
    return 1 << (n - 1).bit_length() if n > 0 else 1


def main(order):
    if order == "backwards":
        triton.next_power_of_2 = plain
    work = [*KERNELS, "fp8_block128", "nvfp4", "mxfp4"]
    lines = []
    for item in work if order == "forwards" else reversed(work):
        if isinstance(item, str):
            lines.append(f"{item} {spec_of(item)}")
        else:
            lines.append(f"{item.__name__} {settle_cache_key(item).cache_key}")
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main(sys.argv[1])
