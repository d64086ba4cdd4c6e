"""vLLM's backend on GPUs, in the sizes and bounds of vLLM's tests of DeepEP v2, but without vLLM: see vllm_gpu_ranks.

With vLLM 0.33 and two GPUs, ``make upstream-vllm`` runs vLLM's own tests of it over moelink.
"""

from __future__ import annotations

import pytest
import torch

from moelink.testing import run_ranks
from tests.gpu.vllm_gpu_ranks import Answer, Case, answers

DEVICES = torch.cuda.device_count()
SIZES = [
    (1, 256, 256), (2, 256, 512), (3, 1024, 2048), (32, 256, 1024), (45, 512, 2048), (64, 1024, 1024),
    (222, 1024, 2048),
]  # fmt: skip


def judge(by_rank: list[list[Answer]], *, fp8: bool) -> None:
    for rank, made in enumerate(by_rank):
        for answer in made:
            assert answer.truth.abs().max() > 0
            if fp8:  # a value between two of fp8's may go either way
                close = torch.isclose(answer.ours, answer.truth, atol=0.2, rtol=0.2)
                assert close.float().mean() > 0.99, (rank, answer.what)
            else:
                torch.testing.assert_close(
                    answer.ours, answer.truth, atol=6e-2, rtol=6e-2, msg=str((rank, answer.what))
                )


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_on_cpu_ranks(fp8: bool) -> None:
    case = Case(5, 16, 32, fp8, most=8)
    by_rank = run_ranks(answers, 2, case, "cpu")
    assert [answer.what for answer in by_rank[0]] == ["no bound", "a bound", "a microbatch", "a microbatch"]
    judge(by_rank, fp8=fp8)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_on_two_gpus(sizes: tuple[int, int, int], fp8: bool) -> None:
    by_rank = run_ranks(answers, 2, Case(*sizes, fp8), timeout=300)
    assert [answer.what for answer in by_rank[0]][-2:] == ["a replay", "a replay"]
    judge(by_rank, fp8=fp8)
