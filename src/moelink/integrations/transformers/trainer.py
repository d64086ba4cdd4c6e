"""``transformers.Trainer`` for a parallelised model: checkpoints and gradient norms are of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.utils import clip_grads_with_norm_

from moelink.errors import UnsupportedError
from moelink.integrations.transformers.checkpoint import CheckpointError
from moelink.integrations.transformers.parallel import ParallelModel


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` over ranks that each hold experts of their own.

    Trainer saves and loads the model and the optimizer on rank 0 alone, and takes gradient norms for equal on all
    ranks; here these steps cover all ranks. Everything else is transformers'. The DistributedDataParallel that
    accelerate puts around the model averages gradients, and leaves experts alone.

    A checkpoint has the whole model, as transformers writes it, and the optimizer's state of each rank in a file of its
    own, ``optimizer-RANK-of-RANKS.pt``: training resumes on as many ranks as have saved.

    Args:
        parallel: of :func:`parallelize`, in mode "alltoall" and over all ranks.
        arguments: of ``transformers.Trainer``, without its model.

    Raises:
        UnsupportedError: ``parallel`` is in mode "allreduce", whose ranks take the same batch, or over other ranks.
    """

    def __init__(self, parallel: ParallelModel, *arguments: Any, **named: Any) -> None:
        super().__init__(parallel.model, *arguments, **named)
        ranks, config = self.args.world_size, parallel.ep.config
        if config.world_size != ranks or (config.mode == "allreduce" and ranks > 1):
            raise UnsupportedError(
                f"parallel: expected a model over all {ranks} ranks in mode 'alltoall', as each trains on a batch of "
                f"its own, got {config.world_size} ranks in mode {config.mode!r}; call parallelize again, or write "
                "the loop without Trainer"
            )
        self.parallel = parallel

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir or ".")
        self.parallel.save_pretrained(folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.parallel.load_pretrained(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None:
            raise CheckpointError(
                "load_best_model_at_end: expected a best checkpoint, got none; pass eval_strategy= to TrainingArguments"
            )
        self.parallel.load_pretrained(best)

    def _optimizer_file(self, folder: str) -> Path:
        return Path(folder) / f"optimizer-{self.args.process_index}-of-{self.args.world_size}.pt"

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.optimizer is not None, "made before the first step"
        assert self.lr_scheduler is not None, "made before the first step"
        torch.save(self.optimizer.state_dict(), self._optimizer_file(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        file = self._optimizer_file(checkpoint)
        if not file.is_file():
            found = sorted(path.name for path in Path(checkpoint).glob("optimizer*.pt"))
            raise CheckpointError(
                f"{checkpoint}: expected {file.name}, the optimizer's state of this rank, got {found}; use as "
                "many ranks as have saved, or begin anew from the model with from_pretrained"
            )
        assert self.optimizer is not None, "made before the state is read"
        assert self.lr_scheduler is not None, "made before the state is read"
        self.optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        schedule = torch.load(Path(checkpoint) / "scheduler.pt", map_location="cpu", weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        self.accelerator.unscale_gradients()
        norm = self.parallel.grad_norm()
        clip_grads_with_norm_(self.parallel.model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        return self.parallel.grad_norm() if grad_norm is None else grad_norm
