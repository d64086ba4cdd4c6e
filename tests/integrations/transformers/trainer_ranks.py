"""A tiny Mixtral under transformers' Trainer: what a rank does, and the same on one process without moelink."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from torch import Tensor
from transformers import TrainingArguments

from tests.integrations.transformers.transformers_models import VOCABULARY, build

LENGTH, STEPS, SAVED, BATCH = 6, 4, 2, 4
"""Tokens of an example, steps, the step after which is saved, and examples of a step over all ranks."""
MAX_NORM = 0.5
"""Less than the norm of each step's gradient."""


def examples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, VOCABULARY, (BATCH * STEPS, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder: Path, ranks: int) -> TrainingArguments:
    if ranks > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # accelerate warns where it has to choose
    return TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH // ranks, max_steps=STEPS, save_steps=SAVED,
        save_strategy="steps", logging_steps=1, learning_rate=1e-2, max_grad_norm=MAX_NORM, use_cpu=True,
        report_to=[], disable_tqdm=True, seed=11, ddp_backend="gloo" if ranks > 1 else None,
        dataloader_pin_memory=False,
        adam_epsilon=1e-3,  # with less, what rounding leaves of a gradient makes whole steps
    )  # fmt: skip


def steps_of(trainer: Any) -> dict[int, tuple[float, float]]:
    """Loss and norm of the gradient, by step."""
    logged = trainer.state.log_history
    return {entry["step"]: (entry["loss"], float(entry["grad_norm"])) for entry in logged if "loss" in entry}


def alone(folder: Path, adapters: str | None = None) -> tuple[dict[int, tuple[float, float]], dict[str, Tensor]]:
    """Steps and last weights of transformers' own Trainer on one process; of ``adapters`` alone, a folder with some."""
    model: Any = build("mixtral")
    if adapters is not None:
        model = PeftModel.from_pretrained(model, adapters, is_trainable=True)
    trainer = transformers.Trainer(model, arguments(folder, 1), train_dataset=examples())
    trainer.train()
    return steps_of(trainer), trainer.model.state_dict()


def on_ranks(rank: int, world_size: int, folder: str, adapters: str | None = None) -> dict[str, Any]:
    """The same over ranks: all steps, and those after the checkpoint in a model that begins anew."""
    from moelink.integrations.transformers import parallelize
    from moelink.integrations.transformers.trainer import Trainer

    found: dict[str, Any] = {}
    for name in ("all", "resumed"):
        args = arguments(Path(folder), world_size)
        assert args.world_size == world_size
        model = build("mixtral")
        with parallelize(model, max_tokens_per_rank=BATCH * LENGTH, device="cpu") as parallel:
            if adapters is not None:
                parallel = parallel.with_adapters(adapters)
            if name == "resumed":
                with torch.no_grad():
                    for parameter in parallel.model.parameters():
                        parameter.mul_(not parameter.requires_grad)
            trainer = Trainer(parallel, args, train_dataset=examples())
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if name == "resumed" else None)
            found[name] = steps_of(trainer)
    return found
