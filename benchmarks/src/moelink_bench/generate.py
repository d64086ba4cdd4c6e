"""Time a transformers model with its own expert parallelism and with moelink: prefill and decode, by torchrun.

A Qwen3-MoE with layers of full size and random weights, but few layers, is loaded once for each implementation of
``DistributedConfig``: transformers' own ("auto") and "moelink". All ranks hold the same batch; everything but the
experts is tensor-parallel in both. Logits must be close before anything is timed.

    torchrun --nproc-per-node 2 -m moelink_bench.generate --out generate_2xh200.json
    torchrun --nproc-per-node 2 -m moelink_bench.generate --device cpu --hidden 64 --intermediate 32 --experts 8 \\
      --topk 2 --heads 4 --vocabulary 512 --prompt 16 --new-tokens 4 --out generate_cpu.json
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moelink.integrations.transformers import register
from moelink.integrations.versions import require
from moelink_bench.document import device_names
from moelink_bench.ranks import joined
from moelink_bench.script import Save, Script, add_numbers
from moelink_bench.timing import Clock, Turns, everyone, in_turns, slowest_rank

IMPLEMENTATIONS = {"transformers": "auto", "moelink": "moelink"}
"""By contender, its name in transformers' registry."""
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
TOLERANCE = {"cuda": 0.02, "cpu": 1e-4}
"""Of logits: the length of the difference over their length."""
SIZES = {
    "hidden": 2048, "layers": 4, "heads": 32, "kv-heads": 4, "head-dim": 128, "intermediate": 768, "experts": 128,
    "topk": 8, "vocabulary": 151936,
}  # fmt: skip
"""Those of Qwen3-30B-A3B, but for its 48 layers."""


def save_model(folder: Path, args: argparse.Namespace) -> None:
    """Save the model with the sizes of the command line, in the dtype of the device."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    make: Any = Qwen3MoeConfig
    config = make(
        vocab_size=args.vocabulary, hidden_size=args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, head_dim=args.head_dim,
        intermediate_size=args.hidden, moe_intermediate_size=args.intermediate, num_experts=args.experts,
        num_experts_per_tok=args.topk, norm_topk_prob=True, tie_word_embeddings=False, eos_token_id=None,
        bos_token_id=None, pad_token_id=0, dtype=DTYPES[args.device],
    )  # fmt: skip
    torch.manual_seed(0)
    models: Any = AutoModelForCausalLM
    with torch.device(args.device):  # three billion numbers take a CPU a minute
        models.from_config(config, dtype=DTYPES[args.device]).save_pretrained(folder)


def load(folder: Path, implementation: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model, sharded by transformers over all ranks."""
    from transformers import AutoModelForCausalLM, DistributedConfig

    ranks = dist.get_world_size()
    config = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation=implementation)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=dtype)
    return model.to(device).eval()


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits of the last token of each prompt, [batch, vocabulary] fp32."""
    with torch.inference_mode():
        found = model(tokens, use_cache=False, logits_to_keep=1).logits
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    return found[:, -1].float().clone()  # type: ignore[no-any-return]


def generating(model: Any, tokens: Tensor, new_tokens: int) -> Callable[[], Tensor]:
    """Return a call that generates greedily and returns the new tokens."""

    def generate() -> Tensor:
        with torch.inference_mode():
            made: Tensor = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )  # fmt: skip
        return made[:, tokens.shape[1] :]

    return generate


def measure(models: Mapping[str, Any], args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Compare the logits of both models, and time them in turns if they are close: the fields of a result. Collective.

    Prefill is a generation of one token. Decode is what a generation of ``new_tokens`` more takes beyond it.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, args.vocabulary, (args.batch, args.prompt), generator=generator).to(clock.device)
    first, second = (logits_of(model, tokens) for model in models.values())
    difference = max(everyone(((first - second).norm() / first.norm()).item()))
    passed = difference <= TOLERANCE[args.device]
    fields: dict[str, Any] = {
        "gate": {"passed": passed, "fault": "" if passed else "logits differ", "difference": difference}
    }
    if not passed:
        return fields
    long = {name: generating(model, tokens, 1 + args.new_tokens) for name, model in models.items()}
    ours, theirs = long["moelink"](), long["transformers"]()
    fields["gate"]["equal_tokens"] = round((ours == theirs).float().mean().item(), 4)
    turns = Turns(turns=args.samples, dropped=1)
    short = in_turns({name: generating(model, tokens, 1) for name, model in models.items()}, clock, turns)
    both = in_turns(long, clock, turns)
    fields["rows"] = []
    for name in models:
        prefill = slowest_rank(everyone(short[name])).median
        decode = slowest_rank(everyone(both[name])).median - prefill
        fields["rows"].append({
            "contender": name, "prefill_us": round(prefill, 1), "decode_us": round(decode / args.new_tokens, 1),
            "prefill_tokens_per_second": round(1e6 * args.batch * args.prompt / prefill, 1),
            "decode_tokens_per_second": round(1e6 * args.batch * args.new_tokens / decode, 1),
        })  # fmt: skip
    theirs_row, ours_row = fields["rows"]
    fields["times_as_fast"] = {
        phase: round(theirs_row[f"{phase}_us"] / ours_row[f"{phase}_us"], 3) for phase in ("prefill", "decode")
    }
    return fields


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    parser.add_argument("--device", choices=DTYPES, default="cuda")
    add_numbers(parser, {**SIZES, "batch": 8, "prompt": 512, "new-tokens": 32, "samples": 7})


def run(args: argparse.Namespace, save: Save) -> int:
    """Run the benchmark on the ranks of torchrun; rank 0 saves."""
    release = require("transformers")
    with joined(int(os.environ.get("RANK", "0")), args.device, flush_bytes=0) as clock:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with tempfile.TemporaryDirectory() as scratch, register(max_tokens_per_rank=args.batch * args.prompt):
            folder = Path(everyone(scratch)[0])
            if rank == 0:
                save_model(folder, args)
            dist.barrier()
            dtype = DTYPES[args.device]
            models = {name: load(folder, way, clock.device, dtype) for name, way in IMPLEMENTATIONS.items()}
            fields = measure(models, args, clock)
            dist.barrier()
    if rank == 0:
        case = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in SIZES}
        amounts = {name: getattr(args, name) for name in ("batch", "prompt", "new_tokens")}
        save("generate", {
            "framework": {"package": "transformers", "release": release}, "device": args.device,
            "devices": device_names(args.device) * ranks, "ranks": ranks,
            "method": "greedy generation of the same batch on all ranks, eager, samples of both in turns; the slowest "
            "rank, median",
            "case": {**case, **amounts, "dtype": str(dtype).removeprefix("torch.")}, **fields,
        })  # fmt: skip
        print(*fields.get("rows", ()), fields.get("times_as_fast") or fields["gate"], sep="\n")
    return 0 if fields["gate"]["passed"] else 1


main = Script("generate", __doc__, options, run, out="generate_transformers.json").main

if __name__ == "__main__":
    raise SystemExit(main())
