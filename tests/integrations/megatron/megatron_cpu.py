"""Let Megatron-core run on CPUs. Import this before anything of Megatron.

Megatron asks for CUDA in a few places, with ``use_cpu_initialization`` too. Here these do nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

torch.Tensor.cuda = lambda self, *args, **options: self
torch.nn.Module.cuda = lambda self, *args, **options: self
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *args: None
torch.cuda.Stream = MagicMock
torch.cuda.stream = lambda stream: nullcontext()
torch.cuda.current_stream = MagicMock
all_to_all_single = dist.all_to_all_single


def with_lists(output, rows, output_split_sizes=None, input_split_sizes=None, **options):
    """torch's all_to_all_single, for sizes that Megatron only makes lists of as it copies them from a GPU."""
    sizes = [None if each is None else [int(n) for n in each] for each in (output_split_sizes, input_split_sizes)]
    return all_to_all_single(output, rows, *sizes, **options)


dist.all_to_all_single = with_lists

import megatron.core.tensor_parallel.random as rng
import megatron.core.transformer.moe.moe_utils as moe_utils

moe_utils.te_general_gemm = None
rng._get_cuda_rng_state = rng._set_cuda_rng_state = lambda *args, **options: None  # as recomputation begins and ends
