"""One data-parallel rank of vLLM's ``LLM.generate``, in a process that :mod:`moelink_bench.serve_processes` starts.

Its arguments are two files, both JSON: a :class:`Task`, which it reads, and an :class:`Answer`, which it writes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """The prompts that a rank continues.

    Attributes:
        engine: arguments of vLLM's ``LLM``.
        prompts: token ids of each.
        new_tokens: after each prompt.
        rounds: of all prompts; one more comes before them, whose times are not kept.
    """

    engine: dict[str, Any]
    prompts: list[list[int]]
    new_tokens: int
    rounds: int


@dataclass(frozen=True)
class Answer:
    """The tokens of a rank, and their times.

    Attributes:
        tokens: of each prompt, in the first round.
        begun, ended: of each other round, seconds of the machine's clock.
        smallest_gap: between the logarithms of the probabilities of a chosen token and the second best.
        same: whether all rounds had the same tokens.
    """

    tokens: list[list[int]]
    begun: list[float]
    ended: list[float]
    smallest_gap: float
    same: bool


def generate(task: Task) -> Answer:
    """Generate greedily with vLLM."""
    from vllm import LLM, SamplingParams

    llm, prompts = LLM(**task.engine), [{"prompt_token_ids": prompt} for prompt in task.prompts]
    how = {"temperature": 0.0, "max_tokens": task.new_tokens, "ignore_eos": True}
    first = [made.outputs[0] for made in llm.generate(prompts, SamplingParams(**how, logprobs=2), use_tqdm=False)]
    tokens, begun, ended, same = [list(made.token_ids) for made in first], [], [], True
    for _ in range(task.rounds):
        begun.append(time.time())
        again = llm.generate(prompts, SamplingParams(**how), use_tqdm=False)
        ended.append(time.time())
        same &= [list(made.outputs[0].token_ids) for made in again] == tokens
    best = [sorted(each.logprob for each in step.values()) for made in first for step in made.logprobs]
    return Answer(tokens, begun, ended, min(step[-1] - step[-2] for step in best), same)


if __name__ == "__main__":
    given, made = map(Path, sys.argv[1:])
    made.write_text(json.dumps(dataclasses.asdict(generate(Task(**json.loads(given.read_text()))))))
