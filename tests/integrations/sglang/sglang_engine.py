"""SGLang's whole engine on CPUs, from its ``Engine`` to tokens: scheduler, model runner, model, loader and cache.

    python sglang_engine.py MODEL RANKS OUT

answers :data:`TEXTS` greedily and writes :class:`Answers` as JSON. One rank is SGLang alone. More ranks have attention
by data parallelism, and experts by expert parallelism over moelink; :func:`stand_in` has what SGLang lacks for them on
a CPU. The caller puts ``stand_ins/`` on the path, with names of kernels that SGLang imports and does not call here.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXTS = (
    "Hello!", "Name three rivers of Europe.", "Why is the sky blue?", "Write a line about rain.",
    "What is 17 times 23?", "Translate 'good morning' to French.", "Who wrote Faust?",
    "Give me a word that rhymes with light.",
)  # fmt: skip
NEW_TOKENS, MOST_TOKENS = 8, 256


@dataclass(frozen=True)
class Answers:
    """What an engine answered.

    Attributes:
        tokens: of each prompt.
        logprobs: of these tokens, logarithms of their probabilities.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]


def stand_in() -> None:
    """Let unquantised experts on a CPU take the rows of ``deepep_v2``, as on a GPU.

    * SGLang chooses its ``forward_cpu`` there, which takes the rows of no dispatcher but the standard one. Its
      ``forward_cuda`` hands them to the runner.
    * The runner is DeepGEMM's, by SGLang's own registry, with products of torch.
    * Padding of a batch asks the attention for the length of an empty sequence, which only AMX's attention knows.
    """
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
    from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2CombineInput
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from torch.nn.functional import linear, silu

    from moelink.integrations.sglang.dispatcher import MoelinkDispatcher

    class Products(DispatchMoeRunnerCore):  # type: ignore[misc]
        runner_backend = MoeRunnerBackend.DEEP_GEMM

        def run_from_dispatch(self, dispatched: Any, weights: Any, config: Any, hooks: Any = None) -> Any:
            assert isinstance(config.layer.dispatcher, MoelinkDispatcher)
            rows, start = dispatched.hidden_states, 0
            out = torch.full_like(rows, torch.nan)
            for expert, end in enumerate(dispatched.psum_num_recv_tokens_per_expert.tolist()):
                gate, up = linear(rows[start:end], weights.w13_weight[expert]).chunk(2, -1)
                y = linear(silu(gate) * up, weights.w2_weight[expert])
                out[start:end] = y * dispatched.topk_weights[start:end, None]
                start = -(-end // dispatched.expert_alignment) * dispatched.expert_alignment
            return DeepEPv2CombineInput(out, None)

    register_moe_runner_core("deep_gemm", Products)
    UnquantizedFusedMoEMethod.apply = UnquantizedFusedMoEMethod.forward_cuda
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def rank(*args: Any, **options: Any) -> None:
    """Run SGLang's process of a rank after :func:`stand_in`."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    stand_in()
    run_scheduler_process(*args, **options)


def main(model: str, ranks: int, out: Path) -> None:
    from sglang.srt.entrypoints.engine import Engine

    spread: dict[str, Any] = {}
    if ranks > 1:
        Engine.run_scheduler_process_func = staticmethod(rank)
        spread = {"tp_size": ranks, "dp_size": ranks, "enable_dp_attention": True, "moe_a2a_backend": "deepep_v2"}
    engine = Engine(
        model_path=model, device="cpu", dtype="bfloat16", attention_backend="torch_native", enable_fp32_lm_head=True,
        max_total_tokens=4096, max_running_requests=16, chunked_prefill_size=MOST_TOKENS,
        max_prefill_tokens=MOST_TOKENS, disable_cuda_graph=True, disable_overlap_schedule=True,
        log_level="warning", **spread,
    )  # fmt: skip
    answers = engine.generate(
        input_ids=[list(text.encode()) for text in TEXTS], return_logprob=True,
        sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    )  # fmt: skip
    logprobs = [[step[0] for step in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
    out.write_text(json.dumps(dataclasses.asdict(Answers([answer["output_ids"] for answer in answers], logprobs))))
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
