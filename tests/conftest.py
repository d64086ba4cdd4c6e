"""Test session set-up.

Kernels are interpreted unless a GPU is there: the variable must be set before anything imports triton, and it is
inherited by the ranks that tests spawn.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
